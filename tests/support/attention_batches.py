"""Batches of attention over paged KV: prompts, single tokens and trees, and what they attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from tree_kernels.attention_variant import PLAIN, AttentionVariant
from tree_kernels.mask import tree_mask
from tree_kernels.mask_rows import mask_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Request:
    """A request: its context, its causal rows and the parents of its tree's nodes.

    The first `read` nodes are in the cache already and have no row.
    """

    context: int
    chunk: int = 0
    parents: tuple[int, ...] = ()
    read: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.chunk + len(self.parents) - self.read


def chain(tree_size: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(-1, tree_size - 1))


def star(tree_size: int) -> tuple[int, ...]:
    """The parents of a tree of depth 1."""
    return (-1,) + (0,) * (tree_size - 1)


def bush(tree_size: int, seed: int = 0) -> tuple[int, ...]:
    """The parents of a random tree in breadth-first order."""
    draws = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 6, (tree_size,), generator=draws)
    above = (torch.arange(tree_size) - steps).clamp(min=0).cummax(0).values
    return (-1, *above[1:].tolist())


@dataclass(frozen=True)
class Batch:
    """A batch.

    Attributes:
        requests: Its requests.
        arguments: Those of `tree_attention` up to the masks.
        max_query: Greatest number of rows of a request.
        scale: Factor of the scores.
        variant: How attention differs from softmax attention.
    """

    requests: tuple[Request, ...]
    arguments: tuple[torch.Tensor, ...]
    max_query: int
    scale: float = 0.3
    variant: AttentionVariant = PLAIN


def make_batch(
    requests: Sequence[Request],
    heads: tuple[int, int] = (4, 2),
    head_size: int = 64,
    dtype: torch.dtype = torch.float32,
    page: int = 16,
    layout: str = "apart",
    spare_words: int = 0,
    spare_rows: int = 2,
    seed: int = 0,
) -> Batch:
    """A batch with scattered pages in a cache that is NaN wherever there is no token."""
    torch.manual_seed(seed)
    rows = [request.rows for request in requests]
    lengths = [request.context + request.read + request.rows for request in requests]
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages) + 3).int()
    table = order[-1].repeat(len(requests), max(pages) + 2)
    shape = len(order), page, heads[1]
    if layout == "side_by_side":
        cache = torch.full((*shape, 2 * head_size), torch.nan, dtype=dtype)
        keys, values = cache[..., :head_size], cache[..., head_size:]
    elif layout == "heads_first":
        cache = torch.full((2, shape[0], shape[2], page, head_size), torch.nan, dtype=dtype)
        keys, values = (each.transpose(1, 2) for each in cache)
    else:
        keys, values = torch.full((2, *shape, head_size), torch.nan, dtype=dtype)
    most = max(len(request.parents) for request in requests)
    total = sum(rows) + spare_rows
    # The masks of causal rows must not be read.
    masks = torch.full((total, -(-most // 32) + spare_words), -1, dtype=torch.int32)
    starts = [sum(rows[:at]) for at in range(len(rows) + 1)]
    for at, request in enumerate(requests):
        table[at, : pages[at]] = order[sum(pages[:at]) :][: pages[at]]
        token = torch.arange(lengths[at])
        where = table[at, token // page].long(), token % page
        keys[where] = torch.randn(lengths[at], heads[1], head_size).to(dtype)
        values[where] = torch.randn(lengths[at], heads[1], head_size).to(dtype)
        if request.parents:
            parents = torch.tensor([request.parents], dtype=torch.int32)
            count, read = (torch.tensor([n]) for n in (len(request.parents), request.read))
            root = torch.tensor([starts[at] + request.chunk - request.read])
            mask_rows(tree_mask(parents, count), root, count, masks, read)
    query = (2 * torch.randn(total, heads[0], head_size)).to(dtype)
    integers = (starts, lengths, [request.chunk - request.read for request in requests])
    arguments = (query, keys, values, table, *(torch.tensor(x).int() for x in integers), masks)
    return Batch(tuple(requests), arguments, max(rows))


def attended(batch: Batch, at: int, line: int, view: Sequence[int]) -> torch.Tensor:
    """Attention of a row of request `at` to the tokens that it attends to, in float64."""
    query, keys, values, table, *_ = batch.arguments
    token, page = torch.tensor(view), keys.shape[1]
    seen = table[at, token // page].long(), token % page
    group = query.shape[1] // keys.shape[2]
    key, value = (x[seen].double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("hd,thd->ht", query[line].double(), key) * batch.scale
    if cap := batch.variant.soft_cap:
        scores = cap * (scores / cap).tanh()
    if (sinks := batch.variant.sinks) is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), 1)
    weights = scores.softmax(1)[:, : len(view)]
    return torch.einsum("ht,thd->hd", weights, value)[None].to(query.dtype)


def defined(batch: Batch) -> torch.Tensor:
    """The definition, row by row: causal rows, and nodes that attend by the ancestor mask."""
    out = torch.full_like(batch.arguments[0], UNTOUCHED)
    line = 0
    for at, request in enumerate(batch.requests):
        root = request.context + request.chunk
        window = batch.variant.window or 10**6
        views = [
            [*range(max(position + 1 - window, 0), position + 1)]
            for position in range(request.context, root)
        ]
        for node in range(request.read, len(request.parents)):
            path = []
            while node >= 0:
                path.append(root + node)
                node = request.parents[node]
            views.append([*range(root), *reversed(path)][-window:])
        for view in views:
            out[line] = attended(batch, at, line, view)
            line += 1
    return out


def assert_near(found: torch.Tensor, expected: torch.Tensor, times: float = 1.0) -> None:
    """Compare with the tolerance of the type, or some times it."""
    tolerance = times * TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


MIXED = (
    Request(30, chunk=21),
    Request(47, chunk=1),
    Request(57, parents=bush(9)),
    Request(0, chunk=18),
    Request(16, parents=chain(1)),
    Request(79, parents=star(6)),
    Request(40, chunk=3, parents=bush(5)),
    Request(0, parents=chain(4)),
)


@st.composite
def batches(draw: Callable[..., Any]) -> Batch:
    """Any batch in any layout."""

    def request() -> Request:
        context, chunk = draw(st.integers(0, 90)), draw(st.sampled_from([0, 0, 1, 2, 17]))
        tree_size = draw(st.integers(0 if chunk else 1, 40))
        shapes = st.sampled_from([chain, star, bush])
        parents = draw(shapes)(tree_size) if tree_size else ()
        read = 0 if chunk else draw(st.integers(0, tree_size - 1))
        return Request(context, chunk, parents, read)

    return make_batch(
        [request() for _ in range(draw(st.integers(1, 3)))],
        heads=draw(st.sampled_from([(1, 1), (3, 1), (4, 2)])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        page=draw(st.sampled_from([1, 8, 16, 48])),
        layout=draw(st.sampled_from(["apart", "side_by_side", "heads_first"])),
        spare_words=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 99)),
    )
