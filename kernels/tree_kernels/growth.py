"""Draft trees grown best first out of all that is known of what may follow.

Each node offers the candidates of its token's row, those of its token and the one before it, and
the token that came after the longest suffix of its path that stood in the request's text before.
What a candidate is worth depends on where it comes from, its origin: the probability with which
candidates of that origin were accepted so far. A node's score is the product along its path, the
probability that it is accepted, and the best nodes of all make the tree. Beyond the paper (arXiv
2408.08696), whose tree is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._ranking import best_of_rows, count_better
from tree_kernels._triton import jit, next_power_of_2, tl, use_triton
from tree_kernels.context import GRAMS, LONGEST, Contexts
from tree_kernels.offers import ALONE, ORIGINS, TOP, node_offers, offers

_GROW = NativeFunction("growth.cpp", "grow_trees", "pipiipippippp" + "iiii" + "pppp")
_LANES = next_power_of_2(2 * TOP + 1)


@dataclass(frozen=True)
class Grown:
    """Trees as they grew, level by level, each level in the order of its parents.

    Attributes:
        tokens: `int32 [B, F]`, the root first; -1 where there is no node.
        parents: `int32 [B, F]`, a column; -1 for the root and where there is no node.
        origins: `int32 [B, F]`, 0 for the root.
        scores: `float32 [B, F]`, the probability that a node is accepted: 1 for the root, 0 where
            there is none.
    """

    tokens: Tensor
    parents: Tensor
    origins: Tensor
    scores: Tensor


def columns_of(width: int, depth: int) -> int:
    """The columns of trees with at most `width` nodes a level, the root's included."""
    return 1 + min(TOP, width) + (depth - 1) * width


def _slot_stride(pairs: Tensor) -> int:
    return pairs.stride(0) if len(pairs) > 1 else 0


@jit
def _ending(text: tl.tensor, place: tl.tensor, node: tl.tensor) -> tl.tensor:
    """The token at a place of the text, -1 before its beginning, at the first node alone."""
    return tl.where(node == 0, tl.load(text + place, mask=place >= 0, other=-1), -1)


# The texts' last tokens may be part of more, the results are rows of one tensor: where they begin
# depends on the batch.
@jit(do_not_specialize=["roots", "tokens", "parents", "origins"])
def _grow_kernel(
    matrix: tl.tensor,
    pairs: tl.tensor,
    history: tl.tensor,
    lengths: tl.tensor,
    index: tl.tensor,
    priors: tl.tensor,
    slots: tl.tensor,
    roots: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    origins: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    pair_cells: tl.tensor,
    pair_stride: tl.tensor,
    length: tl.tensor,
    cells: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
    TOP: tl.constexpr,
    ALONE: tl.constexpr,
    LANES: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
) -> None:
    """One program a request; the level that grows is in registers, one node a lane."""
    line = tl.program_id(0).to(tl.int64) * columns
    slot = tl.load(slots + tl.program_id(0))
    text = history + slot * length
    end = tl.load(lengths + slot)
    root = tl.load(roots + tl.program_id(0))
    node = tl.arange(0, W)
    lane = tl.arange(0, LANES)[None, :]
    child = tl.arange(0, W * TOP)
    tl.store(tokens + line, root)
    tl.store(parents + line, -1)
    tl.store(origins + line, 0)
    tl.store(scores + line, 1.0)
    score = tl.where(node == 0, 1.0, 0.0)
    # The last LONGEST tokens up to each node; the root is the text's last.
    fifth = _ending(text, end - 6, node)
    fourth = _ending(text, end - 5, node)
    third = _ending(text, end - 4, node)
    second = _ending(text, end - 3, node)
    before = _ending(text, end - 2, node)
    token = tl.where(node == 0, root, -1)
    above = 0
    first = 1
    room = FIRST
    for _ in range(depth):
        offered, origin = node_offers(
            matrix,
            pairs + slot * pair_stride,
            text,
            index + slot * cells,
            vocab,
            pair_cells,
            cells,
            (fifth, fourth, third, second, before, token),
            lane,
            LONGEST,
            GRAMS,
            TOP,
            ALONE,
        )
        prior = tl.load(priors + origin, mask=offered >= 0, other=0.0)
        offered, origin, value = best_of_rows(offered, origin, score[:, None] * prior, lane, W, TOP)
        chosen = (tl.reshape(value, [W * TOP]) > 0.0) & (count_better(value, W, TOP) < WIDTH)
        count = tl.sum(chosen.to(tl.int32), 0)
        here = line + first + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(tokens + here, tl.reshape(offered, [W * TOP]), mask=chosen)
        tl.store(parents + here, above + child // TOP, mask=chosen)
        tl.store(origins + here, tl.reshape(origin, [W * TOP]), mask=chosen)
        tl.store(scores + here, tl.reshape(value, [W * TOP]), mask=chosen)
        here = line + first + node
        gap = (node >= count) & (node < room)
        tl.store(tokens + here, -1, mask=gap)
        tl.store(parents + here, -1, mask=gap)
        tl.store(origins + here, 0, mask=gap)
        tl.store(scores + here, 0.0, mask=gap)
        # What other threads of the program wrote is read below.
        tl.debug_barrier()
        parent = tl.load(parents + here, mask=node < room, other=-1)
        parent = tl.maximum(parent - above, 0)
        fifth = tl.gather(fourth, parent, 0)
        fourth = tl.gather(third, parent, 0)
        third = tl.gather(second, parent, 0)
        second = tl.gather(before, parent, 0)
        before = tl.gather(token, parent, 0)
        token = tl.load(tokens + here, mask=node < room, other=-1)
        score = tl.load(scores + here, mask=node < room, other=0.0)
        above = first
        first += room
        room = WIDTH


def _grow_triton(
    matrix: Tensor,
    pairs: Tensor,
    contexts: Contexts,
    priors: Tensor,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
) -> Grown:
    columns = columns_of(width, depth)
    shape = (3, len(roots), columns)
    tokens, parents, origins = torch.empty(shape, dtype=torch.int32, device=matrix.device).unbind()
    scores = torch.empty(len(roots), columns, device=matrix.device)
    if len(roots):
        lanes = max(16, next_power_of_2(width))
        _grow_kernel[(len(roots),)](
            matrix,
            pairs,
            contexts.history,
            contexts.lengths,
            contexts.index,
            priors,
            slots,
            roots,
            tokens,
            parents,
            origins,
            scores,
            len(matrix),
            pairs.shape[1],
            _slot_stride(pairs),
            contexts.history.shape[1],
            contexts.index.shape[1],
            columns,
            depth,
            LONGEST=LONGEST,
            GRAMS=GRAMS,
            TOP=TOP,
            ALONE=ALONE,
            LANES=_LANES,
            FIRST=min(TOP, width),
            WIDTH=width,
            W=lanes,
            num_warps=min(16, lanes // 4),
        )
    return Grown(tokens, parents, origins, scores)


def _grow_reference(
    matrix: Tensor,
    pairs: Tensor,
    contexts: Contexts,
    priors: Tensor,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
) -> Grown:
    batch = len(roots)
    slots = slots.long()
    places = contexts.lengths[slots].long()[:, None] + torch.arange(-LONGEST, 0)
    suffix = contexts.history[slots[:, None], places.clamp(min=0)].masked_fill(places < 0, -1)
    suffix[:, -1] = roots
    suffix = suffix[:, None]
    tokens, parents = [roots.int()[:, None]], [torch.full((batch, 1), -1, dtype=torch.int32)]
    origins, scores = [torch.zeros(batch, 1, dtype=torch.int32)], [torch.ones(batch, 1)]
    first = 0
    for _ in range(depth):
        offered, origin = offers(matrix, pairs, contexts, slots, suffix)
        score = scores[-1][..., None] * priors[origin]
        score = score.masked_fill(offered < 0, 0)
        order = score.sort(dim=-1, descending=True, stable=True).indices[..., :TOP]
        token, origin, score = (each.gather(-1, order) for each in (offered, origin, score))
        above = torch.arange(token.shape[1])[None, :, None].expand_as(token)
        token, origin, score, above = (each.flatten(1) for each in (token, origin, score, above))
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, :width]
        # In the order of their parents, and gaps after all nodes.
        best = best.sort(-1).values
        best = best.gather(1, (score.gather(1, best) <= 0).int().sort(dim=-1, stable=True).indices)
        token, origin, score, above = (
            each.gather(1, best) for each in (token, origin, score, above)
        )
        gone = score <= 0
        suffix = torch.cat(
            (suffix.gather(1, above[..., None].expand(-1, -1, LONGEST))[..., 1:], token[..., None]),
            -1,
        ).masked_fill(gone[..., None], -1)
        tokens.append(token.masked_fill(gone, -1).int())
        parents.append((above + first).masked_fill(gone, -1).int())
        origins.append(origin.masked_fill(gone, 0).int())
        scores.append(score)
        first += tokens[-2].shape[1]
    return Grown(*(torch.cat(each, 1) for each in (tokens, parents, origins, scores)))


def grow(
    matrix: Tensor,
    pairs: Tensor,
    contexts: Contexts,
    priors: Tensor,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
) -> Grown:
    """Grow a tree under each root, level by level, at most `width` nodes each.

    Args:
        matrix: int32 [V, 8], contiguous, what may follow a token; -1 for nothing.
        pairs: int32 [P, S, 10], contiguous, S a power of two: two tokens, and what may follow them;
            a table for each slot, or with P = 1 one for all. After `ALONE` and a token stands what
            a request knows of that token alone, in place of the matrix's row.
        contexts: the requests' texts, each of which ends with its root.
        priors: float32 [ORIGINS], in [0, 1].
        slots: int64 [B], the requests' places in `contexts`.
        roots: int32 [B].

    Equal scores: what is offered first, by the earlier parent, comes first. Raises ValueError on
    shapes that do not fit.
    """
    if matrix.shape[1] != TOP or not matrix.is_contiguous():
        raise ValueError(f"matrix must be [V, {TOP}] and contiguous, not {[*matrix.shape]}")
    cells = pairs.shape[1]
    power = cells > 0 and cells & (cells - 1) == 0
    if pairs.shape[2] != TOP + 2 or not pairs.is_contiguous() or not power:
        raise ValueError(f"pairs must be [P, 2^n, {TOP + 2}], contiguous, not {[*pairs.shape]}")
    if priors.shape != (ORIGINS,) or slots.shape != roots.shape:
        raise ValueError(f"priors {[*priors.shape]}, slots {[*slots.shape]}, {[*roots.shape]}")
    slots, roots = slots.long().contiguous(), roots.int().contiguous()
    if use_triton(matrix):
        return _grow_triton(matrix, pairs, contexts, priors, slots, roots, width, depth)
    run = _GROW.on(matrix)
    if run is None:
        return _grow_reference(matrix, pairs, contexts, priors, slots, roots, width, depth)
    columns = columns_of(width, depth)
    tokens, parents, origins = torch.empty(3, len(roots), columns, dtype=torch.int32).unbind()
    scores = torch.empty(len(roots), columns)
    run(
        *(matrix.data_ptr(), len(matrix), pairs.data_ptr(), cells, _slot_stride(pairs)),
        *(contexts.history.data_ptr(), contexts.history.shape[1], contexts.lengths.data_ptr()),
        *(contexts.index.data_ptr(), contexts.index.shape[1], priors.data_ptr()),
        *(slots.data_ptr(), roots.data_ptr(), len(roots), width, depth, columns),
        *(tokens.data_ptr(), parents.data_ptr(), origins.data_ptr(), scores.data_ptr()),
    )
    return Grown(tokens, parents, origins, scores)
