"""Attention over paged KV for prompts, single tokens and trees, compared with its definition."""

from dataclasses import replace

import pytest
import torch
from attention_batches import (
    MIXED,
    TOLERANCE,
    UNTOUCHED,
    Request,
    assert_near,
    attended,
    batches,
    bush,
    chain,
    defined,
    make_batch,
    star,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels._kv_shares import shares_of
from tree_kernels.attention_variant import PLAIN, AttentionVariant
from tree_kernels.tree_attention import _tree_attention_triton, tree_attention


def by_kernel(batch, shares=None):
    out = torch.full_like(batch.arguments[0], UNTOUCHED)
    _tree_attention_triton(
        *batch.arguments, batch.scale, batch.max_query, out, batch.variant, shares=shares
    )
    return out


def by_reference(batch):
    out = torch.full_like(batch.arguments[0], UNTOUCHED)
    arguments = *batch.arguments, batch.scale, batch.max_query, out, batch.variant
    assert tree_attention(*arguments) is out
    return out


@pytest.mark.parametrize(("heads", "shares"), [((2, 2), 2), ((3, 1), 1), ((8, 2), 1)])
def test_prompts_single_rows_and_trees_in_one_launch(interpreter, heads, shares):
    batch = make_batch(MIXED, heads)
    expected = defined(batch)
    assert_near(by_kernel(batch, shares), expected)
    assert_near(by_reference(batch), expected)


@pytest.mark.parametrize("shares", [1, 2])
def test_trees_whose_first_nodes_are_in_the_cache(interpreter, shares):
    """Levels of trees, one of which has no row of the level."""
    requests = (
        Request(57, parents=bush(9), read=6),
        Request(30, parents=chain(3), read=3),
        Request(0, parents=star(6), read=1),
        Request(79, parents=bush(40, seed=1), read=33),
        Request(12, parents=bush(8), read=5),
    )
    batch = make_batch(requests)
    expected = defined(batch)
    assert_near(by_kernel(batch, shares), expected)
    assert_near(by_reference(batch), expected)


@settings(CASES, max_examples=5)
@given(batch=batches(), shares=st.sampled_from([None, 1, 2, 4]))
def test_any_batch_in_any_layout(interpreter, batch, shares):
    expected = defined(batch)
    assert_near(by_kernel(batch, shares), expected)
    assert_near(by_reference(batch), expected)


VARIANTS = {
    "window": AttentionVariant(window=24),
    "window_below_the_depth": AttentionVariant(window=3),
    "soft_cap": AttentionVariant(soft_cap=5.0),
    "sinks": AttentionVariant(sinks=torch.tensor([2.0, -1.0, 30.0, 0.0])),
    "all": AttentionVariant(40, 20.0, torch.tensor([0.5, -9.0, 3.0, 1.0])),
}


@pytest.mark.parametrize("name", [None, "all"])
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_of_8_bit_floats(interpreter, stored, dtype, shares, name):
    """The result is that of a cache in which each number is multiplied by its scale."""
    scales = torch.tensor(0.25), torch.tensor(3.0)
    variant = VARIANTS[name] if name else PLAIN
    batch = make_batch(MIXED, layout="side_by_side", dtype=dtype)
    query, *caches = batch.arguments[:3]
    rest = batch.arguments[3:]
    packed = [(cache / scale).to(stored) for cache, scale in zip(caches, scales, strict=True)]
    wide = [(each.float() * scale).to(dtype) for each, scale in zip(packed, scales, strict=True)]
    expected = defined(replace(batch, arguments=(query, *wide, *rest), variant=variant))
    scaled = replace(variant, kv_scales=scales)
    batch = replace(batch, arguments=(query, *packed, *rest), variant=scaled)
    assert_near(by_kernel(batch, shares), expected)
    assert_near(by_reference(batch), expected)


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_windows_soft_caps_and_sinks(interpreter, name, shares):
    batch = replace(make_batch(MIXED), variant=VARIANTS[name])
    expected = defined(batch)
    assert_near(by_reference(batch), expected)
    _, keys, _, table, starts, lengths, *_ = batch.arguments
    if window := batch.variant.window:
        # Pages before the window of a request's first row may be another's by now.
        contexts = (lengths - starts.diff()).tolist()
        for pages, context in zip(table, contexts, strict=True):
            pages[: max(context - window + 1, 0) // keys.shape[1]] = table[0, -1]
    assert_near(by_kernel(batch, shares), expected)


@pytest.mark.parametrize("context", [63, 64, 80])
def test_a_tree_of_three_words_around_the_end_of_a_tile(interpreter, context):
    batch = make_batch([Request(5, chunk=1), Request(context, parents=bush(81))], (4, 1))
    expected = defined(batch)
    assert_near(by_kernel(batch), expected)
    assert_near(by_reference(batch), expected)


@pytest.mark.parametrize("head_size", [80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes(interpreter, head_size, dtype):
    requests = [Request(33, parents=bush(7)), Request(20, chunk=1)]
    batch = make_batch(requests, (3, 1), head_size, dtype)
    expected = defined(batch)
    assert_near(by_kernel(batch, 1), expected)
    assert_near(by_kernel(batch, 2), expected)


def test_a_prompt_as_long_as_a_tree_is_causal(interpreter):
    both = [Request(24, chunk=9), Request(24, parents=star(9))]
    batch = make_batch(both)
    found = by_kernel(batch)
    assert_near(found, defined(batch))
    as_tree = replace(batch, requests=(Request(24, parents=star(9)), both[1]))
    assert not torch.allclose(found[:9], defined(as_tree)[:9], atol=1e-2)


@pytest.mark.parametrize("shares", [1, 2])
def test_a_root_alone_is_a_plain_row(interpreter, shares):
    plain = make_batch([Request(37, chunk=1), Request(64, chunk=1)])
    root = make_batch([Request(37, parents=chain(1)), Request(64, parents=chain(1))])
    assert torch.equal(by_kernel(plain, shares), by_kernel(root, shares))


def test_a_chain_is_causal(interpreter):
    causal, tree = make_batch([Request(50, chunk=20)]), make_batch([Request(50, parents=chain(20))])
    assert torch.equal(by_kernel(causal), by_kernel(tree))


def test_the_bits_of_the_mask_decide_what_a_node_attends_to(interpreter):
    """A mask may include later nodes, in another program's rows, and exclude ancestors."""
    batch = make_batch([Request(20, parents=chain(6))], (16, 1), spare_rows=0)
    nodes = [[0, 2, 5], [1], [5], [0, 1], [], [4, 5]]
    batch.arguments[-1][:, 0] = torch.tensor([sum(1 << node for node in row) for row in nodes])
    views = [[*range(20), *(20 + node for node in row)] for row in nodes]
    expected = torch.cat([attended(batch, 0, at, seen) for at, seen in enumerate(views)])
    assert_near(by_kernel(batch), expected)
    assert_near(by_reference(batch), expected)


@pytest.mark.parametrize("shares", [1, 4])
def test_scores_may_be_large_and_far_apart(interpreter, shares):
    batch = replace(make_batch([Request(150, parents=bush(5))]), scale=30.0)
    torch.testing.assert_close(by_kernel(batch, shares), defined(batch), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shares", [1, 2])
def test_requests_without_rows_or_tokens_are_skipped(interpreter, shares):
    """CUDA graph batches are padded with requests of no rows, or of one row and no tokens."""
    batch = make_batch([Request(30, chunk=1), Request(20, parents=star(3)), Request(10, chunk=1)])
    query, keys, values, table, starts, lengths, trees, masks = batch.arguments
    expected = by_kernel(batch, shares)
    lengths[2] = 0
    expected[4] = 0.0
    padded = (
        *(query, keys, values, torch.cat([table, table[:2]])),
        torch.cat([starts, starts[-1:].repeat(2)]),
        *(torch.cat([lengths, lengths.new_zeros(2)]), torch.cat([trees, trees.new_zeros(2)])),
        masks,
    )
    padded_batch = replace(batch, arguments=padded)
    assert_near(by_kernel(padded_batch, shares), expected)
    assert_near(by_reference(padded_batch), expected)


def test_few_programs_split_long_caches_into_shares():
    assert shares_of(8, 131072) == 32
    assert shares_of(48, 131072) == 4
    assert shares_of(8, 2048) == 8
    assert shares_of(8, 100) == 1
    assert shares_of(1000, 131072) == 1


def test_shapes_that_do_not_fit_are_errors():
    arguments = make_batch([Request(5, chunk=2)]).arguments
    query, keys, values, table, *integers, masks = arguments
    rest = (*integers, masks)
    made = tree_attention(*arguments, 1.0, 2)
    assert made.shape == query.shape
    fp8 = keys.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="FP8"):
        tree_attention(query, fp8, fp8, table, *rest, 1.0, 2)
    with pytest.raises(ValueError, match="expected"):
        tree_attention(query[:, :3], keys, values, table, *rest, 1.0, 2)
    with pytest.raises(ValueError, match="expected"):
        tree_attention(query, keys, values, table, *integers, masks[1:], 1.0, 2)
    swapped = keys.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ValueError, match="contiguous"):
        tree_attention(query, swapped, values, table, *rest, 1.0, 2)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shares", [None, 1, 8])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_cuda_agrees_with_the_definition(head_size, shares, dtype):
    long = (Request(1900, parents=bush(81)), Request(2047, chunk=1), Request(3, chunk=300))
    for requests in (MIXED, long, long[:1]):
        batch = make_batch(requests, (8, 2), head_size, dtype)
        expected = defined(batch)
        on_device = replace(batch, arguments=tuple(each.cuda() for each in batch.arguments))
        # A GPU adds the products of a score in another order: an H200 is off by up to 3e-5 in
        # float32 where a score has 256 of them.
        times = max(1.0, (head_size / 64) ** 0.5)
        assert_near(by_kernel(on_device, shares).cpu(), expected, times)


@pytest.mark.cuda
def test_one_graph_serves_other_lengths_and_trees():
    batches = [
        make_batch([Request(context, parents=shape(81)) for context in contexts], seed=seed)
        for seed, (shape, contexts) in enumerate([(bush, (100, 130)), (star, (143, 99))])
    ]
    # Both have the same number of pages, so the second fits into the first's tensors.
    static = tuple(each.cuda() for each in batches[0].arguments)
    on_device = replace(batches[0], arguments=static)
    by_kernel(on_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_kernel(on_device)
    for batch in batches:
        for place, new in zip(static, batch.arguments, strict=True):
            place.copy_(new)
        graph.replay()
        assert_near(out.cpu(), defined(batch))
