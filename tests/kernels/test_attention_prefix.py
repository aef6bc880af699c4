"""Attention to what comes before a step's rows, merged with attention to the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_batches import (
    MIXED,
    TOLERANCE,
    UNTOUCHED,
    Batch,
    Request,
    assert_near,
    batches,
    bush,
    chain,
    defined,
    make_batch,
    star,
)
from flash_stand_in import flash_attn_varlen_func
from hypothesis import given, settings
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels.attention_prefix import Prefix
from tree_kernels.attention_variant import AttentionVariant
from tree_kernels.tree_attention import (
    _tree_attention_reference,
    _tree_attention_triton,
    tree_attention,
)

SINKS = torch.tensor([2.0, -1.0, 30.0, 0.0])
VARIANTS = {
    "soft_cap": AttentionVariant(soft_cap=5.0),
    "sinks": AttentionVariant(sinks=SINKS),
    "both": AttentionVariant(soft_cap=20.0, sinks=SINKS),
}


def longest_prefix(batch: Batch) -> torch.Tensor:
    """The tokens before each request's rows and root, `int32 [B]`."""
    _, _, _, _, starts, lengths, trees, _ = batch.arguments
    return (lengths - starts.diff() + trees.clamp(max=0)).clamp(min=0)


def merged(
    batch: Batch, lengths: torch.Tensor, version: int = 3, flash=flash_attn_varlen_func
) -> list[torch.Tensor]:
    """Attention by flash attention and then by the kernel, and by the reference."""
    query, keys, values, table, starts, *_ = batch.arguments
    out = torch.full_like(query, UNTOUCHED)
    _, log_sums = flash(
        q=query,
        k=keys,
        v=values,
        max_seqlen_q=batch.max_query,
        cu_seqlens_q=starts,
        max_seqlen_k=max(int(lengths.max()), 1),
        seqused_k=lengths,
        softmax_scale=batch.scale,
        softcap=batch.variant.soft_cap,
        block_table=table,
        return_softmax_lse=True,
        out=out,
        fa_version=version,
    )
    # Of a request without such tokens, nothing may be read.
    for request, length in enumerate(lengths.tolist()):
        if not length:
            out[starts[request] : starts[request + 1]] = torch.nan
    prefix, found = Prefix(lengths, log_sums), []
    for attend in (_tree_attention_triton, _tree_attention_reference):
        found.append(out.clone())
        given = *batch.arguments, batch.scale, batch.max_query, found[-1], batch.variant, prefix
        attend(*given)
    return found


def assert_as_without(batch: Batch, lengths: torch.Tensor | None = None, version: int = 3) -> None:
    expected = defined(batch)
    for found in merged(batch, longest_prefix(batch) if lengths is None else lengths, version):
        assert_near(found, expected)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2)])
def test_prompts_single_rows_and_trees(interpreter, heads, version):
    """Some have nothing before them, which the versions of flash attention report differently."""
    batch = make_batch(MIXED, heads)
    assert (longest_prefix(batch) == 0).sum() == 2
    assert_as_without(batch, version=version)


def test_trees_whose_first_nodes_are_in_the_cache(interpreter):
    requests = (
        Request(57, parents=bush(9), read=6),
        Request(30, parents=chain(3), read=3),
        Request(0, parents=star(6), read=1),
        Request(79, parents=bush(40, seed=1), read=33),
    )
    assert_as_without(make_batch(requests))


@settings(CASES, max_examples=5)
@given(batch=batches(), share=st.sampled_from([0.0, 0.5, 1.0]), version=st.sampled_from([2, 3]))
def test_any_batch_in_any_layout(interpreter, batch, share, version):
    assert_as_without(batch, (share * longest_prefix(batch)).int(), version)


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes(interpreter, head_size, dtype):
    requests = [Request(150, parents=bush(81)), Request(33, chunk=70), Request(20, chunk=1)]
    assert_as_without(make_batch(requests, (3, 1), head_size, dtype))


@pytest.mark.parametrize("name", VARIANTS)
def test_soft_caps_and_sinks(interpreter, name):
    assert_as_without(replace(make_batch(MIXED), variant=VARIANTS[name]))


def test_scores_may_be_large_and_far_apart(interpreter):
    batch = replace(make_batch([Request(150, parents=bush(5))]), scale=30.0)
    expected = defined(batch)
    for found in merged(batch, longest_prefix(batch)):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_the_kernel_reads_nothing_of_the_prefix(interpreter):
    batch = make_batch([Request(48, parents=bush(9)), Request(64, chunk=3)])
    lengths, expected = longest_prefix(batch), defined(batch)
    query, keys, values, table, *rest = batch.arguments
    out = torch.full_like(query, UNTOUCHED)
    _, log_sums = flash_attn_varlen_func(
        *(query, keys, values, batch.max_query, rest[0], 64, lengths, batch.scale),
        block_table=table,
        return_softmax_lse=True,
        out=out,
    )
    for pages, length in zip(table, lengths.tolist(), strict=True):
        keys[pages[: length // 16].long()] = torch.nan
    _tree_attention_triton(
        *batch.arguments, batch.scale, batch.max_query, out, prefix=Prefix(lengths, log_sums)
    )
    assert_near(out, expected)


def test_requests_that_pad_a_graph(interpreter):
    """They have no rows, or rows and no tokens."""
    batch = make_batch([Request(30, parents=bush(4)), Request(10, chunk=1)])
    expected = defined(batch)
    query, keys, values, table, starts, lengths, trees, masks = batch.arguments
    lengths[1], expected[4] = 0, 0.0
    padded = (
        *(query, keys, values, torch.cat([table, table[:1]])),
        torch.cat([starts, starts[-1:]]),
        *(torch.cat([each, each.new_zeros(1)]) for each in (lengths, trees)),
        masks,
    )
    batch = replace(batch, arguments=padded)
    for found in merged(batch, longest_prefix(batch)):
        assert_near(found, expected)


def test_what_does_not_fit_is_an_error():
    batch = make_batch([Request(5, chunk=2)])
    query, scale, rows = batch.arguments[0], 1.0, 2
    lengths, log_sums = longest_prefix(batch), torch.zeros(4, len(query))
    prefix, out = Prefix(lengths, log_sums), torch.zeros_like(query)
    given = *batch.arguments, scale, rows
    with pytest.raises(ValueError, match="out"):
        tree_attention(*given, prefix=prefix)
    with pytest.raises(ValueError, match="window"):
        tree_attention(*given, out, AttentionVariant(window=3), prefix)
    for wrong in (
        Prefix(lengths.long(), log_sums),
        Prefix(lengths[:0], log_sums),
        Prefix(lengths, log_sums[:3]),
        Prefix(lengths, log_sums.double()),
    ):
        with pytest.raises(ValueError, match="a prefix is"):
            tree_attention(*given, out, prefix=wrong)
    with pytest.raises(ValueError, match="contiguous"):
        tree_attention(*given, out, prefix=Prefix(lengths, log_sums.mT.contiguous().mT))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("version", [2, 3])
def test_cuda_with_vllms_flash_attention(version, head_size, dtype):
    flash = pytest.importorskip("vllm.vllm_flash_attn", reason="vLLM's is not there")
    if not flash.is_fa_version_supported(version):
        pytest.skip("this GPU has another version")
    long = (Request(1900, parents=bush(81)), Request(2047, chunk=1), Request(3, chunk=300))
    for requests in (MIXED, long, long[:1]):
        batch = make_batch(requests, (8, 2), head_size, dtype, layout="side_by_side")
        expected = defined(batch)
        on_device = replace(batch, arguments=tuple(each.cuda() for each in batch.arguments))
        lengths = longest_prefix(on_device)
        for found in merged(on_device, lengths, version, flash.flash_attn_varlen_func):
            torch.testing.assert_close(
                found.cpu(), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
            )
