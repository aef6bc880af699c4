"""Dynamic draft trees, expanded level by level as in EAGLE-2 (arXiv 2406.16858, section 4.1).

The candidates of a node come from the adjacency matrix, the bigram table and the n-gram index (see
`candidates.py`). The acceptance probability of a candidate is estimated by its source, from the
acceptance statistics of `source_stats.py`. A node's score is the product of these probabilities
along its path, the probability that the node is accepted, and each level keeps the nodes of highest
score. The trees of Token Recycling (arXiv 2408.08696) are static.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._ranking import best_of_rows, count_better
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.candidates import ALONE, NUM_SOURCES, TOP, find_candidates, node_candidates
from tree_kernels.ngrams import GRAMS, LONGEST, NgramIndex

_EXPAND = CppFunction("expansion.cpp", "expand_trees", "pipiipippippp" + "iiii" + "pppp")
_LANES = next_power_of_2(2 * TOP + 1)


@dataclass(frozen=True)
class ExpandedTrees:
    """Expanded trees: one level after another, each in the order of its parents.

    Attributes:
        tokens: Int32 `[B, F]`, the root first; -1 where there is no node.
        parents: Int32 `[B, F]`, the column of a node's parent; -1 for the root and where there is
            no node.
        sources: Int32 `[B, F]`, the source of each candidate; 0 for the root.
        scores: Float32 `[B, F]`, the probability that a node is accepted; 1 for the root, 0 where
            there is no node.
    """

    tokens: Tensor
    parents: Tensor
    sources: Tensor
    scores: Tensor


def columns_of(width: int, depth: int) -> int:
    """The number of columns of a tree with `depth` levels of up to `width` nodes below the root."""
    return 1 + min(TOP, width) + (depth - 1) * width


def _slot_stride(bigrams: Tensor) -> int:
    return bigrams.stride(0) if len(bigrams) > 1 else 0


@jit
def _ending(text: tl.tensor, place: tl.tensor, node: tl.tensor) -> tl.tensor:
    """The token at `place` of the text for node 0; -1 for other nodes and before the text."""
    return tl.where(node == 0, tl.load(text + place, mask=place >= 0, other=-1), -1)


# The roots may be a slice of another tensor, and the results are slices of one tensor: how their
# addresses are aligned depends on the batch.
@jit(do_not_specialize=["roots", "tokens", "parents", "sources"])
def _expand_kernel(
    matrix: tl.tensor,
    bigrams: tl.tensor,
    history: tl.tensor,
    lengths: tl.tensor,
    index: tl.tensor,
    priors: tl.tensor,
    slots: tl.tensor,
    roots: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    sources: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    bigram_cells: tl.tensor,
    bigram_stride: tl.tensor,
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
    """Expand a tree; one program per request. The current level is in registers."""
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
    tl.store(sources + line, 0)
    tl.store(scores + line, 1.0)
    score = tl.where(node == 0, 1.0, 0.0)
    # The last LONGEST tokens of each node's path; the root is the last token of the text.
    fifth = _ending(text, end - 6, node)
    fourth = _ending(text, end - 5, node)
    third = _ending(text, end - 4, node)
    second = _ending(text, end - 3, node)
    previous = _ending(text, end - 2, node)
    token = tl.where(node == 0, root, -1)
    above = 0
    first = 1
    room = FIRST
    for _ in range(depth):
        offered, source = node_candidates(
            matrix,
            bigrams + slot * bigram_stride,
            text,
            index + slot * cells,
            vocab,
            bigram_cells,
            cells,
            (fifth, fourth, third, second, previous, token),
            lane,
            LONGEST,
            GRAMS,
            TOP,
            ALONE,
        )
        prior = tl.load(priors + source, mask=offered >= 0, other=0.0)
        offered, source, value = best_of_rows(offered, source, score[:, None] * prior, lane, W, TOP)
        chosen = (tl.reshape(value, [W * TOP]) > 0.0) & (count_better(value, W, TOP) < WIDTH)
        count = tl.sum(chosen.to(tl.int32), 0)
        here = line + first + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(tokens + here, tl.reshape(offered, [W * TOP]), mask=chosen)
        tl.store(parents + here, above + child // TOP, mask=chosen)
        tl.store(sources + here, tl.reshape(source, [W * TOP]), mask=chosen)
        tl.store(scores + here, tl.reshape(value, [W * TOP]), mask=chosen)
        here = line + first + node
        gap = (node >= count) & (node < room)
        tl.store(tokens + here, -1, mask=gap)
        tl.store(parents + here, -1, mask=gap)
        tl.store(sources + here, 0, mask=gap)
        tl.store(scores + here, 0.0, mask=gap)
        # The loads below read what other threads of the program have stored.
        tl.debug_barrier()
        parent = tl.load(parents + here, mask=node < room, other=-1)
        parent = tl.maximum(parent - above, 0)
        fifth = tl.gather(fourth, parent, 0)
        fourth = tl.gather(third, parent, 0)
        third = tl.gather(second, parent, 0)
        second = tl.gather(previous, parent, 0)
        previous = tl.gather(token, parent, 0)
        token = tl.load(tokens + here, mask=node < room, other=-1)
        score = tl.load(scores + here, mask=node < room, other=0.0)
        above = first
        first += room
        room = WIDTH


def _expand_triton(
    matrix: Tensor,
    bigrams: Tensor,
    ngrams: NgramIndex,
    priors: Tensor,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
) -> ExpandedTrees:
    columns = columns_of(width, depth)
    shape = (3, len(roots), columns)
    tokens, parents, sources = torch.empty(shape, dtype=torch.int32, device=matrix.device).unbind()
    scores = torch.empty(len(roots), columns, device=matrix.device)
    if len(roots):
        lanes = max(16, next_power_of_2(width))
        _expand_kernel[(len(roots),)](
            matrix,
            bigrams,
            ngrams.history,
            ngrams.lengths,
            ngrams.index,
            priors,
            slots,
            roots,
            tokens,
            parents,
            sources,
            scores,
            len(matrix),
            bigrams.shape[1],
            _slot_stride(bigrams),
            ngrams.history.shape[1],
            ngrams.index.shape[1],
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
    return ExpandedTrees(tokens, parents, sources, scores)


def _expand_reference(
    matrix: Tensor,
    bigrams: Tensor,
    ngrams: NgramIndex,
    priors: Tensor,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
) -> ExpandedTrees:
    batch, device = len(roots), matrix.device
    slots = slots.long()
    places = ngrams.lengths[slots].long()[:, None] + torch.arange(-LONGEST, 0, device=device)
    suffix = ngrams.history[slots[:, None], places.clamp(min=0)].masked_fill(places < 0, -1)
    suffix[:, -1] = roots
    suffix = suffix[:, None]
    tokens = [roots.int()[:, None]]
    parents = [torch.full_like(tokens[0], -1)]
    sources = [torch.zeros_like(tokens[0])]
    scores = [torch.ones(batch, 1, device=device)]
    first = 0
    for _ in range(depth):
        offered, source = find_candidates(matrix, bigrams, ngrams, slots, suffix)
        score = scores[-1][..., None] * priors[source]
        score = score.masked_fill(offered < 0, 0)
        order = score.sort(dim=-1, descending=True, stable=True).indices[..., :TOP]
        token, source, score = (each.gather(-1, order) for each in (offered, source, score))
        above = torch.arange(token.shape[1], device=device)[None, :, None].expand_as(token)
        token, source, score, above = (each.flatten(1) for each in (token, source, score, above))
        best = score.sort(dim=-1, descending=True, stable=True).indices[:, :width]
        # In the order of their parents, missing nodes last.
        best = best.sort(-1).values
        best = best.gather(1, (score.gather(1, best) <= 0).int().sort(dim=-1, stable=True).indices)
        token, source, score, above = (
            each.gather(1, best) for each in (token, source, score, above)
        )
        gone = score <= 0
        suffix = torch.cat(
            (suffix.gather(1, above[..., None].expand(-1, -1, LONGEST))[..., 1:], token[..., None]),
            -1,
        ).masked_fill(gone[..., None], -1)
        tokens.append(token.masked_fill(gone, -1).int())
        parents.append((above + first).masked_fill(gone, -1).int())
        sources.append(source.masked_fill(gone, 0).int())
        scores.append(score)
        first += tokens[-2].shape[1]
    return ExpandedTrees(*(torch.cat(each, 1) for each in (tokens, parents, sources, scores)))


def _expand_cpp(
    matrix: Tensor,
    bigrams: Tensor,
    ngrams: NgramIndex,
    priors: Tensor,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
) -> ExpandedTrees:
    columns = columns_of(width, depth)
    tokens, parents, sources = torch.empty(3, len(roots), columns, dtype=torch.int32).unbind()
    scores = torch.empty(len(roots), columns)
    _EXPAND.call(
        *(
            matrix.data_ptr(),
            len(matrix),
            bigrams.data_ptr(),
            bigrams.shape[1],
            _slot_stride(bigrams),
        ),
        *(ngrams.history.data_ptr(), ngrams.history.shape[1], ngrams.lengths.data_ptr()),
        *(ngrams.index.data_ptr(), ngrams.index.shape[1], priors.data_ptr()),
        *(slots.data_ptr(), roots.data_ptr(), len(roots), width, depth, columns),
        *(tokens.data_ptr(), parents.data_ptr(), sources.data_ptr(), scores.data_ptr()),
    )
    return ExpandedTrees(tokens, parents, sources, scores)


_EXPAND_TREES = Op(
    "expansion.expand_trees",
    _expand_reference,
    triton=_expand_triton,
    cpp=_expand_cpp,
    needs=_EXPAND,
)


def expand_trees(
    matrix: Tensor,
    bigrams: Tensor,
    ngrams: NgramIndex,
    priors: Tensor,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
) -> ExpandedTrees:
    """Expand a tree under each root, level by level.

    Ties within a level go to the earlier parent, then to the earlier candidate.

    Args:
        matrix: Int32 `[V, 8]`, contiguous, the adjacency matrix; -1 where there is no candidate.
        bigrams: Int32 `[P, S, 10]`, contiguous, S a power of two: the bigram tables, one for each
            slot, or one for all if P = 1. A cell contains two tokens and their candidates. If the
            first token is `ALONE`, the candidates replace the matrix's row of the second.
        ngrams: The texts of the requests, each of which ends with its root.
        priors: Float32 `[NUM_SOURCES]`, the acceptance probability of each source, in [0, 1].
        slots: Int64 `[B]`, the slots of the requests.
        roots: Int32 `[B]`, the root tokens.
        width: Maximum number of nodes of a level.
        depth: Number of levels below the root.

    Returns:
        Trees of `columns_of(width, depth)` columns.

    Raises:
        ValueError: Shapes do not fit.
    """
    if matrix.shape[1] != TOP or not matrix.is_contiguous():
        raise ValueError(f"matrix must be [V, {TOP}] and contiguous, not {[*matrix.shape]}")
    cells = bigrams.shape[1]
    power = cells > 0 and cells & (cells - 1) == 0
    if bigrams.shape[2] != TOP + 2 or not bigrams.is_contiguous() or not power:
        raise ValueError(f"bigrams must be [P, 2^n, {TOP + 2}], contiguous, not {[*bigrams.shape]}")
    if priors.shape != (NUM_SOURCES,) or slots.shape != roots.shape:
        raise ValueError(
            f"priors {[*priors.shape]} must be [{NUM_SOURCES}], slots {[*slots.shape]} and roots "
            f"{[*roots.shape]} [B]"
        )
    slots, roots = slots.long().contiguous(), roots.int().contiguous()
    run = _EXPAND_TREES.on(matrix)
    return run(matrix, bigrams, ngrams, priors, slots, roots, width, depth)
