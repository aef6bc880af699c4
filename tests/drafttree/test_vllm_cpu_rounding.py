"""Tree attention on a CPU rounds each row as vLLM's own kernel does in plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from tree_kernels.attention_variant import PLAIN, AttentionVariant
from tree_kernels.cpu_attention import DecodeOrder, TreeAttention, untiled
from tree_kernels.kv_move import movers_of
from tree_kernels.mask import tree_mask
from tree_kernels.paged_trees import PagedTrees
from vllm import _custom_ops as ops

from drafttree.vllm.attention.cpu import decode_order, isa_of, kv_views, row_views

PAGE = 128
NODES = 10
pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="only its AVX-512 and AMX kernels are followed"
)
HAS_AMX = torch.cpu._is_amx_tile_supported()
KERNELS = [
    (torch.float32, "vec"),
    (torch.bfloat16, "vec"),
    pytest.param(
        torch.bfloat16, "amx", marks=pytest.mark.skipif(not HAS_AMX, reason="the CPU has no AMX")
    ),
]
"""Element types and the kernels that the engine chooses for them."""


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    """Heads of a layer."""

    heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    stock: str = "vec"

    @property
    def isa(self) -> str:
        """The engine's kernels."""
        layer = (self.heads, self.kv_heads, self.size, PAGE, self.dtype)
        return isa_of(self.stock if self.size % 32 == 0 else "vec16", *layer)

    def order(self, window: int = 0) -> DecodeOrder:
        return decode_order(self.isa, self.size, window)


class Texts:
    """Requests with their own contexts, keys and values, each with a random tree.

    Args:
        shape: The layer's heads.
        contexts: Number of tokens before each request's tree.
    """

    def __init__(self, shape: Shape, contexts: list[int]) -> None:
        generator = torch.Generator().manual_seed(sum(contexts))
        self.shape, self.contexts = shape, contexts
        count = len(contexts)
        pages = (max(contexts) + NODES) // PAGE + 1
        self.table = torch.randperm(count * pages, generator=generator).int().view(count, pages)
        size, dtype = shape.size, shape.dtype
        self.cache = torch.zeros(count * pages, shape.kv_heads, PAGE, 2 * size, dtype=dtype)

        def drawn(*dims: int) -> torch.Tensor:
            return (2 * torch.randn(*dims, generator=generator)).to(dtype)

        self.query = drawn(count, NODES, shape.heads, size)
        rows = [context + NODES for context in contexts]
        self.keys = [drawn(n, shape.kv_heads, size) for n in rows]
        self.values = [drawn(n, shape.kv_heads, size) for n in rows]
        self.sinks = 5 * torch.randn(shape.heads, generator=generator)
        above = torch.randint(1, 4, (count, NODES), generator=generator)
        parents = (torch.arange(NODES) - above).clamp(min=0).int()
        parents[:, 0] = -1
        self.masks = tree_mask(parents, torch.full((count,), NODES).int())
        for request, n in enumerate(rows):
            self._write(request, torch.arange(n), 0)

    @property
    def halves(self) -> tuple[torch.Tensor, ...]:
        """The cache as the engine's kernels take it."""
        return self.cache.view(len(self.cache), -1, 2 * PAGE, self.shape.size).chunk(2, dim=2)

    def _write(self, request: int, rows: torch.Tensor, position: int) -> None:
        """Write keys and values of rows to consecutive positions."""
        places = position + torch.arange(len(rows))
        slots = self.table[request].long()[places // PAGE] * PAGE + places % PAGE
        given = self.keys[request][rows], self.values[request][rows]
        ops.cpu_attn_reshape_and_cache(*given, *self.halves, slots, self.shape.isa)

    def attend(self, order: DecodeOrder, variant: AttentionVariant) -> torch.Tensor:
        """Rows of all nodes, `[B, NODES, heads, size]`."""
        shape, count = self.shape, len(self.contexts)
        attend = TreeAttention(
            *(shape.heads, shape.kv_heads, shape.size, PAGE, shape.dtype),
            order=order,
            tiles=shape.isa == "amx",
        )
        assert attend.is_cpp
        trees = PagedTrees(
            starts=torch.arange(count) * NODES,
            tree_sizes=torch.full((count,), NODES),
            lengths=torch.tensor(self.contexts) + NODES,
            blocks=self.table,
            masks=self.masks,
        )
        found = torch.empty_like(self.query)
        rows = self.query.flatten(0, 1), *kv_views(self.cache, shape.isa), found.flatten(0, 1)
        attend(trees, *rows, shape.size**-0.5, variant)
        return found

    def decode(self, depth: int, node: int, variant: AttentionVariant) -> torch.Tensor:
        """A step of plain decoding, in which some node of each request is the last token.

        Args:
            depth: Depth of the node in each tree. Others' rows have the same length only.
            node: The node.
            variant: The layer's variant.

        Returns:
            Rows `[B, heads, size]`.
        """
        shape, count = self.shape, len(self.contexts)
        for request, context in enumerate(self.contexts):
            path = self.masks[request, node].nonzero()[:, 0]
            if len(path) == depth + 1:
                self._write(request, context + path, context)
        lengths = (torch.tensor(self.contexts) + depth + 1).int()
        starts = torch.arange(count + 1).int()
        window = variant.window or -1
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=count,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.size,
            seq_lens=lengths,
            dtype=shape.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=window,
            isa=shape.isa,
            enable_kv_split=True,
        )
        found = torch.empty_like(self.query[:, node])
        keys, values = self.halves
        ops.cpu_attention_with_kv_cache(
            query=self.query[:, node].contiguous(),
            key_cache=keys,
            value_cache=values,
            output=found,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=shape.size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=window,
            block_table=self.table,
            softcap=variant.soft_cap,
            scheduler_metadata=metadata,
            s_aux=variant.sinks,
        )
        for request, context in enumerate(self.contexts):
            self._write(request, torch.arange(context, context + NODES), context)
        return found

    def differences(self, order: DecodeOrder, variant: AttentionVariant = PLAIN) -> int:
        """The number of floats that differ from plain decoding's, in all rows of all trees."""
        found = self.attend(order, variant)
        depths = self.masks.sum(2) - 1
        assert depths.max() < NODES - 1  # they branch
        different = 0
        for node in range(NODES):
            for depth in depths[:, node].unique().tolist():
                here = depths[:, node] == depth
                plain = self.decode(depth, node, variant)
                different += int((found[:, node] != plain)[here].sum())
        return different


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "stock"), KERNELS)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    "contexts",
    # Before and after borders of what the kernels read at a time, and of pages.
    # With several requests some have no share of their own, after one that takes a thread's time.
    [
        [21],
        [59],
        [124],
        [760],
        [250, 31, 500],
        [29, 230, 21, 160],
        [90, 400, 123, 11, 700, 256, 60, 300],
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 128), (8, 1, 80), (14, 2, 96)]
)
def test_rows_are_those_of_plain_decoding(
    heads: int,
    kv_heads: int,
    size: int,
    contexts: list[int],
    count: int,
    dtype: torch.dtype,
    stock: str,
) -> None:
    torch.set_num_threads(count)
    shape = Shape(heads, kv_heads, size, dtype, stock)
    assert Texts(shape, contexts).differences(shape.order()) == 0


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "stock"), KERNELS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (70, 0.0), (0, 20.0), (70, 20.0)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_of_windows_soft_caps_and_sinks_are_those_of_plain_decoding(
    window: int, cap: float, has_sinks: bool, count: int, dtype: torch.dtype, stock: str
) -> None:
    torch.set_num_threads(count)
    shape = Shape(6, 2, 64, dtype, stock)
    texts = Texts(shape, [300, 45, 90])
    variant = AttentionVariant(window, cap, texts.sinks if has_sinks else None)
    assert texts.differences(shape.order(window), variant) == 0


@pytest.mark.parametrize(("dtype", "stock"), KERNELS)
def test_a_context_of_several_tiles(dtype: torch.dtype, stock: str) -> None:
    shape = Shape(2, 1, 64, dtype, stock)
    order = shape.order()
    texts = Texts(shape, [order.tile - 4])
    assert texts.differences(order) == 0
    if dtype == torch.float32:  # rounding to bfloat16 hides one unit of so many
        assert texts.differences(replace(order, tile=order.tile - order.unit)) > 0


def test_rows_of_tiles_move() -> None:
    """Accepted nodes' keys and values move to the places after the root's, in other blocks too."""
    cache = torch.randn(3, 2, 32, 2 * 64).bfloat16()
    keys, values = (each.clone() for each in untiled(*kv_views(cache, "amx")))
    for mover in movers_of(row_views(cache, "amx")):
        mover(torch.tensor([[30, 31, 64, 65, 66]]), torch.tensor([[0, 3, 4, -1]]).int())
    for to, source in ((31, 65), (64, 66)):
        keys[to // 32, :, :, to % 32] = keys[source // 32, :, :, source % 32]
        values[to // 32, :, to % 32] = values[source // 32, :, source % 32]
    moved = untiled(*kv_views(cache, "amx"))
    assert all(map(torch.equal, moved, (keys, values)))


@pytest.mark.skipif(not HAS_AMX, reason="the CPU has no AMX")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "isa"), [(9, 3, "amx"), (71, 1, "vec"), (64, 1, "amx")]
)
def test_the_engines_amx_kernels_are_kept(heads: int, kv_heads: int, isa: str) -> None:
    """Unless a node has rows for part of a tile."""
    assert isa_of("amx", heads, kv_heads, 64, PAGE, torch.bfloat16) == isa


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "stock"), KERNELS[1:])
def test_rows_differ_if_keys_are_shared_otherwise(dtype: torch.dtype, stock: str) -> None:
    """What is tested above can be seen: rounding depends on the order of summation."""
    torch.set_num_threads(2)
    shape = Shape(9, 3, 64, dtype, stock)
    texts, order = Texts(shape, [500]), shape.order()
    assert texts.differences(order) == 0
    assert texts.differences(replace(order, least_share=0)) > 0
    assert texts.differences(replace(order, tile=64)) > 0
