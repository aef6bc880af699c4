"""Dynamic draft trees, expanded level by level as in EAGLE-2 (arXiv 2406.16858, section 4.1).

The candidates of a node come from the adjacency matrix, the bigram table, the request's text and
the memory (see `candidates.py`). The acceptance probability of a candidate is estimated by its
source, from the acceptance statistics of `source_stats.py`. A node's score is the product of these
probabilities along its path, the probability that the node is accepted, and each level keeps the
nodes of highest score. Nodes of a score below `LEAST_PARENT` have no children. Below the last
level, the best node whose path follows a match goes on as a spine: a chain of copies alone. The
trees of Token Recycling (arXiv 2408.08696) are static.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._ranking import best_of_rows, count_better
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.candidates import (
    ALONE,
    OFFERED,
    TOP,
    CandidateTables,
    find_candidates,
    find_rows,
    node_candidates,
    rows_of,
)
from tree_kernels.copies import (
    BUCKETS,
    COPIES,
    Pointers,
    find_copies,
    follow,
    node_copies,
)
from tree_kernels.ngrams import GRAMS, LONGEST
from tree_kernels.root_matches import MAX_MATCH, root_matches
from tree_kernels.spine import CAP, MIN_SCORE, extend_spine, spine_of

_EXPAND = CppFunction(
    "expansion.cpp", "expand_trees", "pipi" + "pii" + "pippi" + "pip" + "ppp" + "iiiii" + "ppppi"
)
_LANES = next_power_of_2(OFFERED)

LEAST_PARENT = 1 / 1024
"""Least score of a node that has children: those of less likely nodes are accepted in fewer than
one of a thousand steps, and looking them up takes time in the C++ version."""


@dataclass(frozen=True)
class ExpandedTrees:
    """Expanded trees: one level after another, each in the order of its parents, then the spine.

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

    @classmethod
    def empty(cls, requests: int, columns: int, device: torch.device) -> ExpandedTrees:
        """Memory for the trees of B = `requests` and F = `columns`."""
        # Each has memory of its own: a kernel is compiled again for tensors that begin elsewhere.
        tokens, parents, sources = (
            torch.empty(requests, columns, dtype=torch.int32, device=device) for _ in range(3)
        )
        return cls(tokens, parents, sources, torch.empty(requests, columns, device=device))


def columns_of(width: int, depth: int, spine: int = 0) -> int:
    """The number of columns of a tree with `depth` levels of up to `width` nodes below the root and
    a spine of up to `spine` nodes."""
    return 1 + min(TOP, width) + (depth - 1) * width + spine


@jit
def _ending(text: tl.tensor, place: tl.tensor, node: tl.tensor) -> tl.tensor:
    """The token at `place` of the text for node 0; -1 for other nodes and before the text."""
    return tl.where(node == 0, tl.load(text + place, mask=place >= 0, other=-1), -1)


# The roots may be a slice of another tensor, and the results are slices of one tensor: how their
# addresses are aligned depends on the batch.
@jit(do_not_specialize=["roots", "matches", "tokens", "parents", "sources"])
def _expand_kernel(
    matrix: tl.tensor,
    bigrams: tl.tensor,
    own: tl.tensor,
    history: tl.tensor,
    lengths: tl.tensor,
    index: tl.tensor,
    memory: tl.tensor,
    priors: tl.tensor,
    slots: tl.tensor,
    roots: tl.tensor,
    matches: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    sources: tl.tensor,
    scores: tl.tensor,
    pointers: tl.tensor,
    vocab: tl.tensor,
    bigram_cells: tl.tensor,
    own_cells: tl.tensor,
    own_stride: tl.tensor,
    length: tl.tensor,
    cells: tl.tensor,
    places: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    spine: tl.tensor,
    LONGEST: tl.constexpr,
    GRAMS: tl.constexpr,
    COPIES: tl.constexpr,
    BUCKETS: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    TOP: tl.constexpr,
    ALONE: tl.constexpr,
    MIN_SCORE: tl.constexpr,
    CAP: tl.constexpr,
    LEAST_PARENT: tl.constexpr,
    LANES: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    W: tl.constexpr,
    SPINE_PAD: tl.constexpr,
) -> None:
    """Expand a tree; one program per request. The current level is in registers.

    `pointers [4, B, W]` keeps those of the current level while its children are chosen.
    """
    request = tl.program_id(0).to(tl.int64)
    line = request * columns
    slot = tl.load(slots + request)
    text = history + slot * length
    ours = own + slot * own_stride
    end = tl.load(lengths + slot)
    root = tl.load(roots + request)
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
    at_root = tl.where(node == 0, root, -1) >= 0
    match = matches + request * 4
    own_place = tl.load(match + tl.zeros_like(node), mask=at_root, other=0)
    own_length = tl.load(match + 1 + tl.zeros_like(node), mask=at_root, other=0)
    memory_place = tl.load(match + 2 + tl.zeros_like(node), mask=at_root, other=0)
    memory_length = tl.load(match + 3 + tl.zeros_like(node), mask=at_root, other=0)
    stored = pointers + request * W
    stride = tl.num_programs(0).to(tl.int64) * W
    above = 0
    first = 1
    room = FIRST
    for level in range(depth):
        copied, states, own_places, own_lengths, rest, remembered = node_copies(
            text,
            end,
            index + slot * cells,
            cells,
            memory,
            (fifth, fourth, third, second, previous, token),
            (own_place, own_length, memory_place, memory_length),
            level,
            LONGEST,
            GRAMS,
            BUCKETS,
        )
        rows = rows_of(
            matrix, bigrams, ours, vocab, bigram_cells, own_cells, previous, token, TOP, ALONE
        )
        offered, source = node_candidates(rows, copied, states, rest, lane, COPIES, TOP)
        has_children = (score >= LEAST_PARENT)[:, None]
        prior = tl.load(priors + source, mask=(offered >= 0) & has_children, other=0.0)
        offered, source, value = best_of_rows(
            offered, source, score[:, None] * prior, lane, W, TOP, LANES
        )
        chosen = (tl.reshape(value, [W * TOP]) > 0.0) & (count_better(value, W, TOP) < WIDTH)
        count = tl.sum(chosen.to(tl.int32), 0)
        at = tl.cumsum(chosen.to(tl.int32), 0) - 1
        here = line + first + at
        tl.store(tokens + here, tl.reshape(offered, [W * TOP]), mask=chosen)
        tl.store(parents + here, above + child // TOP, mask=chosen)
        tl.store(sources + here, tl.reshape(source, [W * TOP]), mask=chosen)
        tl.store(scores + here, tl.reshape(value, [W * TOP]), mask=chosen)
        # A child that is a copy is followed from the place of its match.
        goes_on = tl.zeros_like(offered)
        longer = tl.zeros_like(offered)
        for copy in tl.static_range(COPIES):
            same = (offered == copied[copy][:, None]) & (own_lengths[copy] > 0)[:, None]
            goes_on = tl.where(same, own_places[copy][:, None] + 1, goes_on)
            longer = tl.where(same, own_lengths[copy][:, None] + 1, longer)
        tl.store(stored + at, tl.reshape(goes_on, [W * TOP]), mask=chosen)
        longer = tl.minimum(longer, MAX_MATCH)
        tl.store(stored + stride + at, tl.reshape(longer, [W * TOP]), mask=chosen)
        same = offered == remembered[:, None]
        goes_on = tl.where(same, ((memory_place + 1) & (places - 1))[:, None], 0)
        longer = tl.where(same, tl.minimum(memory_length + 1, MAX_MATCH)[:, None], 0)
        tl.store(stored + 2 * stride + at, tl.reshape(goes_on, [W * TOP]), mask=chosen)
        tl.store(stored + 3 * stride + at, tl.reshape(longer, [W * TOP]), mask=chosen)
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
        there = node < count
        own_place = tl.load(stored + node, mask=there, other=0)
        own_length = tl.load(stored + stride + node, mask=there, other=0)
        memory_place = tl.load(stored + 2 * stride + node, mask=there, other=0)
        memory_length = tl.load(stored + 3 * stride + node, mask=there, other=0)
        # The next level's stores must not overtake these loads.
        tl.debug_barrier()
        above = first
        first += room
        room = WIDTH
    if SPINE_PAD > 1:
        follows = (own_length > 0) | (memory_length > 0)
        following = tl.where(follows, score, 0.0)
        best = tl.max(following, 0)
        at = tl.min(tl.where((following > 0.0) & (following == best), node, W), 0)
        here = node == at
        step = tl.arange(0, SPINE_PAD)
        offered, source, value = spine_of(
            text,
            end,
            memory,
            places,
            matrix,
            bigrams,
            ours,
            vocab,
            bigram_cells,
            own_cells,
            priors,
            (_at(previous, here), _at(token, here), tl.sum(tl.where(here, score, 0.0), 0)),
            (
                _at(own_place, here),
                _at(own_length, here),
                _at(memory_place, here),
                _at(memory_length, here),
            ),
            depth,
            spine,
            SPINE_PAD,
            TOP,
            ALONE,
            BUCKETS,
            MAX_MATCH,
            MIN_SCORE,
            CAP,
        )
        inside = step < spine
        here = line + first + step
        parent = tl.where(step == 0, above + at, first + step - 1)
        tl.store(tokens + here, offered, mask=inside)
        tl.store(parents + here, tl.where(offered >= 0, parent, -1), mask=inside)
        tl.store(sources + here, source, mask=inside)
        tl.store(scores + here, value, mask=inside)


@jit
def _at(values: tl.tensor, here: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(here, values, 0), 0)


def _expand_triton(
    tables: CandidateTables,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
    spine: int,
    trees: ExpandedTrees,
) -> None:
    matches = root_matches(tables.ngrams, tables.memory, slots)
    count, columns = trees.tokens.shape
    if count:
        lanes = max(16, next_power_of_2(width))
        ngrams = tables.ngrams
        _expand_kernel[(count,)](
            tables.matrix,
            tables.bigrams,
            tables.own,
            ngrams.history,
            ngrams.lengths,
            ngrams.index,
            tables.memory.tokens,
            tables.priors,
            slots,
            roots,
            matches,
            trees.tokens,
            trees.parents,
            trees.sources,
            trees.scores,
            torch.empty(4, count, lanes, dtype=torch.int32, device=roots.device),
            tables.matrix.shape[0],
            tables.bigrams.shape[0],
            tables.own.shape[1],
            tables.own_stride,
            ngrams.history.shape[1],
            ngrams.index.shape[1],
            tables.memory.tokens.shape[0],
            columns,
            depth,
            spine,
            LONGEST=LONGEST,
            GRAMS=GRAMS,
            COPIES=COPIES,
            BUCKETS=BUCKETS,
            MAX_MATCH=MAX_MATCH,
            TOP=TOP,
            ALONE=ALONE,
            MIN_SCORE=MIN_SCORE,
            CAP=CAP,
            LEAST_PARENT=LEAST_PARENT,
            LANES=_LANES,
            FIRST=min(TOP, width),
            WIDTH=width,
            W=lanes,
            SPINE_PAD=next_power_of_2(spine),
            num_warps=min(16, lanes // 4),
        )


def _expand_reference(
    tables: CandidateTables,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
    spine: int,
    trees: ExpandedTrees,
) -> None:
    batch, device = roots.shape[0], roots.device
    ngrams, memory = tables.ngrams, tables.memory
    places = ngrams.lengths[slots].long()[:, None] + torch.arange(-LONGEST, 0, device=device)
    suffix = ngrams.history[slots[:, None], places.clamp(min=0)].masked_fill(places < 0, -1)
    suffix[:, -1] = roots
    suffix = suffix[:, None]
    matches = root_matches(ngrams, memory, slots).masked_fill(roots[:, None] < 0, 0)
    pointers = Pointers(*matches[:, None].unbind(-1))
    tokens = [roots[:, None]]
    parents = [torch.full_like(tokens[0], -1)]
    sources = [torch.zeros_like(tokens[0])]
    scores = [torch.ones(batch, 1, device=device)]
    first = 0
    for level in range(depth):
        copies = find_copies(ngrams, memory, slots, suffix, pointers, level)
        offered, source = find_candidates(find_rows(tables, slots, suffix), copies)
        score = scores[-1][..., None] * tables.priors[source]
        score = score.masked_fill((offered < 0) | (scores[-1] < LEAST_PARENT)[..., None], 0)
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
        token = token.masked_fill(gone, -1)
        suffix = torch.cat(
            (suffix.gather(1, above[..., None].expand(-1, -1, LONGEST))[..., 1:], token[..., None]),
            -1,
        ).masked_fill(gone[..., None], -1)
        pointers = follow(copies, pointers, above, token, len(memory.tokens))
        tokens.append(token.int())
        parents.append((above + first).masked_fill(gone, -1).int())
        sources.append(source.masked_fill(gone, 0).int())
        scores.append(score)
        first += tokens[-2].shape[1]
    if spine:
        follows = (pointers.own_length > 0) | (pointers.memory_length > 0)
        following = scores[-1].masked_fill(~follows, 0)
        ranked = following.sort(dim=1, descending=True, stable=True)
        at, rows = ranked.indices[:, 0], torch.arange(batch, device=device)
        every = (pointers.own, pointers.own_length, pointers.memory, pointers.memory_length)
        chain, source, score = extend_spine(
            tables,
            slots,
            suffix[rows, at],
            ranked.values[:, 0],
            Pointers(*(each[rows, at] for each in every)),
            depth,
            spine,
        )
        above = first + tokens[-1].shape[1] - 1 + torch.arange(spine, device=device)
        above = above.repeat(batch, 1)
        above[:, 0] = first + at
        tokens.append(chain.int())
        parents.append(above.masked_fill(chain < 0, -1).int())
        sources.append(source.int())
        scores.append(score)
    for name, parts in (
        *(("tokens", tokens), ("parents", parents)),
        *(("sources", sources), ("scores", scores)),
    ):
        getattr(trees, name).copy_(torch.cat(parts, 1))


def _expand_cpp(
    tables: CandidateTables,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
    spine: int,
    trees: ExpandedTrees,
) -> None:
    ngrams, memory = tables.ngrams, tables.memory
    matches = root_matches(ngrams, memory, slots)
    _EXPAND.call(
        *(tables.matrix.data_ptr(), tables.matrix.shape[0]),
        *(tables.bigrams.data_ptr(), len(tables.bigrams)),
        *(tables.own.data_ptr(), tables.own.shape[1], tables.own_stride),
        *(ngrams.history.data_ptr(), ngrams.history.shape[1], ngrams.lengths.data_ptr()),
        *(ngrams.index.data_ptr(), ngrams.index.shape[1]),
        *(memory.tokens.data_ptr(), len(memory.tokens), tables.priors.data_ptr()),
        *(slots.data_ptr(), roots.data_ptr(), matches.data_ptr()),
        *(roots.shape[0], width, depth, spine, trees.tokens.shape[1]),
        *(trees.tokens.data_ptr(), trees.parents.data_ptr()),
        *(trees.sources.data_ptr(), trees.scores.data_ptr(), torch.get_num_threads()),
    )


_EXPAND_TREES = Op(
    "expansion.expand_trees",
    _expand_reference,
    triton=_expand_triton,
    cpp=_expand_cpp,
    needs=_EXPAND,
)


def expand_trees(
    tables: CandidateTables,
    slots: Tensor,
    roots: Tensor,
    width: int,
    depth: int,
    spine: int = 0,
    into: ExpandedTrees | None = None,
) -> ExpandedTrees:
    """Expand a tree under each root, level by level, and continue its best copy.

    Ties within a level go to the earlier parent, then to the earlier candidate. Nodes of a score
    below `LEAST_PARENT` have no children.

    Args:
        tables: What candidates are looked up in. Each request's text ends with its root.
        slots: Int64 `[B]`, the slots of the requests.
        roots: Int32 `[B]`, the root tokens.
        width: Maximum number of nodes of a level.
        depth: Number of levels below the root.
        spine: Maximum number of nodes that continue the best node of the last level.
        into: Memory for the trees, which is overwritten; by default new memory.

    Returns:
        Trees of `columns_of(width, depth, spine)` columns.

    Raises:
        ValueError: Shapes do not fit.
    """
    tables.check()
    if slots.shape != roots.shape:
        raise ValueError(f"slots {[*slots.shape]} and roots {[*roots.shape]} must be [B]")
    if width < 1 or depth < 1 or spine < 0:
        raise ValueError(
            f"width={width} and depth={depth} must be positive, and spine={spine} >= 0"
        )
    slots, roots = slots.long().contiguous(), roots.int().contiguous()
    shape = roots.shape[0], columns_of(width, depth, spine)
    trees = into or ExpandedTrees.empty(*shape, tables.matrix.device)
    if trees.tokens.shape != shape:
        raise ValueError(f"into has {[*trees.tokens.shape]} columns, and must be {[*shape]}")
    _EXPAND_TREES.on(tables.matrix)(tables, slots, roots, width, depth, spine, trees)
    return trees
