"""Which rows of a step vLLM's own CPU kernel computes, and how they are rounded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from tree_kernels.mask import tree_mask
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from drafttree.vllm.attention.cpu import (
    CpuTreeImpl,
    CpuTreeMetadata,
    CpuTreeMetadataBuilder,
    isa_of,
    without_chains,
)
from drafttree.vllm.step import StepTrees
from drafttree.vllm.step_masks import StepMasks
from drafttree.vllm.stored_tree import StoredTree

HEADS, KV_HEADS, SIZE, PAGE, PAGES = 9, 3, 64, 32, 4
DTYPE = torch.bfloat16
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(dtype=DTYPE, get_num_attention_heads=lambda _: HEADS),
    parallel_config=None,
    cache_config=SimpleNamespace(cache_dtype="auto"),
    compilation_config=SimpleNamespace(static_forward_context={}),
)
CHAIN, STAR, FORK = [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, 1, 1, 3]
CONTEXTS = [40, 61, 23, 90, 35, 70, 50, 44]
"""Enough requests that the engine does not share a row's context among its threads."""


def masks_of(*trees: list[int]) -> StepMasks:
    """Masks of trees with these parents."""
    most = max(map(len, trees))
    parents = torch.tensor([[*tree, *[-1] * (most - len(tree))] for tree in trees]).int()
    sizes = torch.tensor([len(tree) for tree in trees])
    chains = np.array([tree == list(range(-1, len(tree) - 1)) for tree in trees])
    masks = tree_mask(parents, sizes.int())
    return StepMasks(torch.arange(len(trees)), sizes, masks, chains=chains)


class Layer(NamedTuple):
    """A layer of attention with rows and cached tokens of all requests."""

    builder: CpuTreeMetadataBuilder
    cache: torch.Tensor
    query: torch.Tensor
    """`[B, 5, heads, size]`."""

    def metadata(self, contexts: list[int], rows: int, masks: StepMasks | None) -> CpuTreeMetadata:
        """Metadata of a step with as many rows of each request, after these contexts."""
        requests = len(contexts)
        starts = torch.arange(requests + 1).int() * rows
        lengths = [context + rows for context in contexts]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths).int(),
            num_reqs=requests,
            num_actual_tokens=requests * rows,
            max_query_len=rows,
            max_seq_len=max(lengths),
            block_table_tensor=torch.arange(PAGES * requests).int().view(requests, PAGES),
            slot_mapping=torch.zeros(requests * rows).long(),
        )
        self.builder.step_masks = masks
        return self.builder.build(0, common)

    def attend(self, kind: Any, query: torch.Tensor, metadata: CpuTreeMetadata) -> torch.Tensor:
        """What a layer of some kind makes of queries, `[B, n, heads, size]`."""
        layer: Any = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
        with patch.object(cpu_attn, "get_current_vllm_config", lambda: CONFIG):
            impl = kind(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        rows = query.flatten(0, 1).contiguous()
        none: Any = None
        found = torch.zeros_like(rows)
        impl.forward(layer, rows, none, none, self.cache, metadata, found)
        return found.view(query.shape)


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
    ops.cpu_attn_reshape_and_cache(key, value, *halves, torch.arange(tokens), isa_of(SIZE))
    return Layer(builder, cache, drawn(len(CONTEXTS), len(CHAIN), HEADS, SIZE))


def test_rows_of_chains_are_rounded_as_in_plain_decoding(layer: Layer) -> None:
    trees = [CHAIN, STAR, CHAIN, FORK, CHAIN, CHAIN, STAR, CHAIN]
    metadata = layer.metadata(CONTEXTS, len(CHAIN), masks_of(*trees))
    assert metadata.trees is not None
    assert len(metadata.trees.starts) == trees.count(STAR) + trees.count(FORK)
    found = layer.attend(CpuTreeImpl, layer.query, metadata)
    plain = torch.empty_like(found)
    for node in range(len(CHAIN)):
        contexts = [context + node for context in CONTEXTS]
        step = layer.metadata(contexts, 1, None)
        row = slice(node, node + 1)
        plain[:, row] = layer.attend(CPUAttentionBackendImpl, layer.query[:, row], step)
    chains = torch.tensor([tree is CHAIN for tree in trees])
    assert torch.equal(found[chains], plain[chains])
    # The last node of a star does not see its siblings.
    stars = torch.tensor([tree is STAR for tree in trees])
    last = (found - plain)[stars][:, -1].abs()
    assert bool((last.flatten(1).amax(1) > 0.1).all())


def test_a_step_of_chains_is_the_engines_own(layer: Layer) -> None:
    metadata = layer.metadata(CONTEXTS[:2], len(CHAIN), masks_of(CHAIN, CHAIN))
    assert metadata.trees is None
    assert not metadata.only_trees


def test_a_step_of_trees_that_branch_needs_no_kernel_of_the_engine(layer: Layer) -> None:
    assert layer.metadata(CONTEXTS[:2], len(STAR), masks_of(STAR, FORK)).only_trees


def test_a_chain_of_a_single_request_is_computed_as_other_trees_are(layer: Layer) -> None:
    metadata = layer.metadata(CONTEXTS[:1], len(CHAIN), masks_of(CHAIN))
    assert metadata.trees is not None
    assert metadata.only_trees


def test_trees_that_may_change_are_computed_by_their_masks(layer: Layer) -> None:
    """Those of drafters that draft within the step, whose masks are shown after the metadata."""
    masks = replace(masks_of(CHAIN, STAR), chains=None)
    metadata = layer.metadata(CONTEXTS[:2], len(STAR), masks)
    assert metadata.trees is not None
    assert metadata.trees.masks.data_ptr() == masks.masks.data_ptr()
    assert metadata.only_trees


def test_a_step_tells_which_of_its_trees_are_chains() -> None:
    shapes = {"pair": [-1, 0], "star": STAR, "fork": FORK, "chain": CHAIN}
    stored = {
        name: StoredTree(np.array(parents, np.int32), np.zeros(len(parents), np.int32))
        for name, parents in shapes.items()
    }
    names = ["pair", "plain", "star", "fork", "chain"]
    scheduled = {name: [0] * (len(parents) - 1) for name, parents in shapes.items()}
    scheduled["fork"] = [0, 0]  # of which a chain is left
    sizes = np.array([1 + len(scheduled.get(name, ())) for name in names])
    trees = StepTrees.of_batch(
        names, scheduled, stored, sizes, np.ones(len(names), np.bool_), torch.arange(sizes.sum())
    )
    masks = trees.masks()
    assert masks.requests.tolist() == [0, 2, 3, 4]
    assert masks.chains is not None
    assert masks.chains.tolist() == [True, False, True, True]
    kept = without_chains(masks)
    assert kept is not None
    assert kept.requests.tolist() == [2]
    assert torch.equal(kept.masks, masks.masks[1:2])
