"""Which rows of a step vLLM's own CPU kernel computes, and how the others are rounded."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from tree_kernels.mask import tree_mask
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from drafttree.vllm.attention.cpu import CpuTreeImpl, CpuTreeMetadata, CpuTreeMetadataBuilder
from drafttree.vllm.step_masks import StepMasks

HEADS, KV_HEADS, SIZE, PAGE, PAGES = 9, 3, 64, 32, 4
DTYPE = torch.bfloat16
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(dtype=DTYPE, get_num_attention_heads=lambda _: HEADS),
    parallel_config=None,
    cache_config=SimpleNamespace(cache_dtype="auto"),
    compilation_config=SimpleNamespace(static_forward_context={}),
)
CHAIN, STAR, FORK, ROOT = [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, 1, 1, 3], [-1]
TREES = [CHAIN, ROOT, STAR, CHAIN, FORK, ROOT, CHAIN, STAR]
CONTEXTS = [40, 61, 23, 90, 35, 70, 50, 44]


def masks_of(*trees: list[int]) -> StepMasks:
    """Masks of those trees with these parents that have drafts."""
    most = max(map(len, trees))
    drafted = [row for row, tree in enumerate(trees) if len(tree) > 1]
    parents = [[*trees[row], *[-1] * (most - len(trees[row]))] for row in drafted]
    sizes = torch.tensor([len(trees[row]) for row in drafted])
    masks = tree_mask(torch.tensor(parents).int(), sizes.int())
    return StepMasks(torch.tensor(drafted), sizes, masks)


class Layer(NamedTuple):
    """A layer of attention with rows and cached tokens of all requests."""

    builder: CpuTreeMetadataBuilder
    cache: torch.Tensor
    query: torch.Tensor
    """`[B, 5, heads, size]`."""

    def metadata(
        self, contexts: list[int], rows: list[int], masks: StepMasks | None
    ) -> CpuTreeMetadata:
        """Metadata of a step with so many rows of each request, after these contexts."""
        requests = len(contexts)
        starts = torch.tensor([0, *accumulate(rows)]).int()
        lengths = [context + n for context, n in zip(contexts, rows, strict=True)]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths).int(),
            num_reqs=requests,
            num_actual_tokens=sum(rows),
            max_query_len=max(rows),
            max_seq_len=max(lengths),
            block_table_tensor=torch.arange(PAGES * requests).int().view(requests, PAGES),
            slot_mapping=torch.zeros(sum(rows)).long(),
        )
        self.builder.step_masks = masks
        return self.builder.build(0, common)

    def attend(self, kind: Any, query: torch.Tensor, metadata: CpuTreeMetadata) -> torch.Tensor:
        """What a layer of some kind makes of queries, `[R, heads, size]`."""
        layer: Any = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, isa=self.builder.isa)
        with patch.object(cpu_attn, "get_current_vllm_config", lambda: CONFIG):
            impl = kind(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        none: Any = None
        found = torch.zeros_like(query)
        impl.forward(layer, query, none, none, self.cache, metadata, found)
        return found


@pytest.fixture(scope="module")
def layer() -> Layer:
    """A layer in bfloat16."""
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=DTYPE)
    builder = CpuTreeMetadataBuilder(spec, [], CONFIG, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return (2 * torch.randn(*shape, generator=generator)).to(DTYPE)

    pages = PAGES * len(CONTEXTS)
    cache = torch.zeros(pages, KV_HEADS, PAGE, 2 * SIZE, dtype=DTYPE)
    halves = cache.view(pages, KV_HEADS, 2 * PAGE, SIZE).chunk(2, dim=2)
    tokens = pages * PAGE
    key, value = (drawn(tokens, KV_HEADS, SIZE) for _ in range(2))
    ops.cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(tokens), builder.isa)
    return Layer(builder, cache, drawn(len(CONTEXTS), len(CHAIN), HEADS, SIZE))


@pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's kernels for AVX2 cut off the last bits of bfloat16, which is not followed",
)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_rows_are_rounded_as_in_plain_decoding(layer: Layer, count: int) -> None:
    trees, contexts = TREES[:count], CONTEXTS[:count]
    rows = [len(tree) for tree in trees]
    metadata = layer.metadata(contexts, rows, masks_of(*trees))
    assert metadata.only_trees
    query = torch.cat([layer.query[request, :n] for request, n in enumerate(rows)])
    found = layer.attend(CpuTreeImpl, query, metadata).split(rows)
    for node in range(len(CHAIN)):
        step = layer.metadata([context + node for context in contexts], [1] * count, None)
        plain = layer.attend(CPUAttentionBackendImpl, layer.query[:count, node], step)
        for tree, row, expected in zip(trees, found, plain, strict=True):
            if tree[: node + 1] == CHAIN[: node + 1]:
                assert torch.equal(row[node], expected)
            elif node < len(tree):  # it does not see the node before it
                assert (row[node] - expected).abs().max() > 0.03


def test_prefill_beside_trees_is_the_engines(layer: Layer) -> None:
    rows = [3, len(FORK), 1]
    masks = masks_of(ROOT, FORK, ROOT)
    metadata = layer.metadata(CONTEXTS[:3], rows, masks)
    assert not metadata.only_trees
    assert metadata.trees is not None
    assert len(metadata.trees.starts) == 1
    query = torch.cat([layer.query[request, :n] for request, n in enumerate(rows)])
    found = layer.attend(CpuTreeImpl, query, metadata)
    engines = layer.attend(CPUAttentionBackendImpl, query, layer.metadata(CONTEXTS[:3], rows, None))
    assert torch.equal(found[:3], engines[:3])
    assert torch.equal(found[-1], engines[-1])
    assert (found[3 + len(FORK) - 1] - engines[3 + len(FORK) - 1]).abs().max() > 0.03


def test_trees_that_may_change_are_computed_by_their_masks(layer: Layer) -> None:
    """Those of drafters that draft within the step, whose masks are shown after the metadata."""
    masks = masks_of(CHAIN, STAR, ROOT)
    metadata = layer.metadata(CONTEXTS[:3], [5, 5, 1], masks)
    assert metadata.trees is not None
    assert metadata.trees.masks.data_ptr() == masks.masks.data_ptr()
    assert metadata.only_trees
