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
from tree_kernels.context import LONGEST, Contexts, ngram_cells

TOP = 8
"""Candidates of a row, and children that are kept of a node."""

PAIR_STATES = TOP + 2
ROW_STATES = TOP + 1
ORIGINS = (2 * LONGEST + 1) * PAIR_STATES * ROW_STATES
"""An origin is (copy x PAIR_STATES + pair) x ROW_STATES + row.

copy: 0 where no suffix was found; its length if the candidate is the copy; that and LONGEST if
another candidate is. pair: its rank from 1 on in the pair's row, 0 if it is not there, TOP + 1 if
there is no such row. row: its rank from 1 on in the token's row, 0 if it is not in there."""

_GROW = NativeFunction("growth.cpp", "grow_trees", "pipipippippp" + "iiii" + "pppp")
_BEST = NativeFunction("growth.cpp", "best_nodes", "ppppiiipppp")
_TALLY = NativeFunction("growth.cpp", "count_trees", "ppppiiiippppi")


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


def pair_cells(before: Tensor, tokens: Tensor, cells: int) -> Tensor:
    """Where pairs of tokens stand in a table of `cells` rows, int64 like `tokens`."""
    return ngram_cells(torch.stack((before, tokens), -1), cells)


def _copied(contexts: Contexts, slots: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens after the longest suffixes found, and their lengths; `[B, W]` both."""
    token = torch.full(suffix.shape[:2], -1, dtype=torch.int32)
    matched = torch.zeros_like(token)
    texts = slots[:, None].expand(suffix.shape[:2])
    for n in range(LONGEST, 0, -1):
        gram = suffix[..., LONGEST - n :]
        cell = ngram_cells(gram, contexts.index.shape[1])
        place = contexts.index[texts, cell].long()
        before = (place[..., None] + torch.arange(-n, 0)).clamp(min=0)
        same = (contexts.history[texts[..., None], before] == gram).all(-1)
        found = (matched == 0) & (gram[..., 0] >= 0) & (place >= n) & same
        token = torch.where(found, contexts.history[texts, place.clamp(min=0)], token)
        matched = torch.where(found, n, matched)
    return token, matched


def _rank(row: Tensor, tokens: Tensor) -> Tensor:
    """The rank from 1 on of `tokens [..., C]` in `row [..., TOP]`; 0 where they are not in it."""
    same = row[..., None, :] == tokens[..., :, None]
    return torch.where(same.any(-1), same.int().argmax(-1) + 1, 0)


def _children(
    matrix: Tensor, pairs: Tensor, contexts: Contexts, slots: Tensor, suffix: Tensor
) -> tuple[Tensor, Tensor]:
    """What nodes offer: tokens `[B, W, C]`, -1 for none, and their origins."""
    token = suffix[..., -1].long()
    copy, matched = _copied(contexts, slots, suffix)
    known = (token >= 0) & (token < matrix.shape[0])
    row = matrix[token.clamp(0, matrix.shape[0] - 1)].masked_fill(~known[..., None], -1)
    pair = pairs[pair_cells(suffix[..., -2], suffix[..., -1], pairs.shape[0])]
    paired = (suffix[..., -2:] == pair[..., :2]).all(-1) & (suffix[..., -2] >= 0)
    likely = pair[..., 2:].masked_fill(~paired[..., None], -1)
    offered = torch.cat((copy[..., None], likely, row), -1)
    earlier = (offered[..., :, None] == offered[..., None, :]).tril(-1).any(-1)
    is_copy = offered == copy[..., None]
    state = torch.where(is_copy, matched[..., None], LONGEST + matched[..., None])
    state = state.masked_fill(matched[..., None] == 0, 0)
    in_pair = torch.where(paired[..., None], _rank(likely, offered), TOP + 1)
    origins = (state * PAIR_STATES + in_pair) * ROW_STATES + _rank(row, offered)
    return offered.masked_fill(earlier, -1), origins


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
        offered, origin = _children(matrix, pairs, contexts, slots, suffix)
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
        pairs: int32 [S, 10], contiguous, S a power of two: two tokens, and what may follow them.
        contexts: the requests' texts, each of which ends with its root.
        priors: float32 [ORIGINS], in [0, 1].
        slots: int64 [B], the requests' places in `contexts`.
        roots: int32 [B].

    Equal scores: what is offered first, by the earlier parent, comes first. Raises ValueError on
    shapes that do not fit.
    """
    if matrix.shape[1] != TOP or not matrix.is_contiguous():
        raise ValueError(f"matrix must be [V, {TOP}] and contiguous, not {[*matrix.shape]}")
    if pairs.shape[1] != TOP + 2 or not pairs.is_contiguous() or len(pairs) & (len(pairs) - 1):
        raise ValueError(f"pairs must be [2^n, {TOP + 2}] and contiguous, not {[*pairs.shape]}")
    if priors.shape != (ORIGINS,) or slots.shape != roots.shape:
        raise ValueError(f"priors {[*priors.shape]}, slots {[*slots.shape]}, {[*roots.shape]}")
    run = _GROW.on(matrix)
    if run is None:
        return _grow_reference(matrix, pairs, contexts, priors, slots, roots, width, depth)
    slots, roots = slots.long().contiguous(), roots.int().contiguous()
    columns = columns_of(width, depth)
    tokens, parents, origins = torch.empty(3, len(roots), columns, dtype=torch.int32).unbind()
    scores = torch.empty(len(roots), columns)
    run(
        *(matrix.data_ptr(), len(matrix), pairs.data_ptr(), len(pairs)),
        *(contexts.history.data_ptr(), contexts.history.shape[1], contexts.lengths.data_ptr()),
        *(contexts.index.data_ptr(), contexts.index.shape[1], priors.data_ptr()),
        *(slots.data_ptr(), roots.data_ptr(), len(roots), width, depth, columns),
        *(tokens.data_ptr(), parents.data_ptr(), origins.data_ptr(), scores.data_ptr()),
    )
    return Grown(tokens, parents, origins, scores)


def _best_reference(grown: Grown, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = grown.scores.clone()
    scores[:, 0] = torch.inf  # the root stays whatever it scores
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes + 1]
    best = best.sort(1).values
    gone = scores.gather(1, best) <= 0
    best = best.gather(1, gone.int().sort(dim=1, stable=True).indices)
    gone = gone.sort(dim=1, stable=True).values
    place = torch.full_like(grown.parents, -1)
    place.scatter_(1, best, torch.arange(nodes + 1, dtype=torch.int32).expand_as(best))
    above = grown.parents.gather(1, best).long()
    parents = place.gather(1, above.clamp(min=0)).masked_fill(gone | (above < 0), -1)
    tokens = grown.tokens.gather(1, best).masked_fill(gone, -1)
    origins = grown.origins.gather(1, best).masked_fill(gone, 0)
    return tokens, parents, origins, (~gone).sum(1, dtype=torch.int32)


def best_nodes(grown: Grown, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `nodes` nodes of highest score of each tree, breadth-first.

    A child never scores above its parent, so they are a tree. Of equal scores the first stay.
    Returns int32 tokens [B, nodes + 1], parents and origins, and the number of nodes [B], the root
    included; -1, -1 and 0 where there is no node. Raises ValueError unless the trees have so many
    columns.
    """
    batch, columns = grown.tokens.shape
    if not 0 <= nodes < columns:
        raise ValueError(f"nodes={nodes} is not between 0 and {columns - 1}")
    run = _BEST.on(grown.tokens)
    if run is None:
        return _best_reference(grown, nodes)
    tokens, parents, origins = torch.empty(3, batch, nodes + 1, dtype=torch.int32).unbind()
    counts = torch.empty(batch, dtype=torch.int32)
    run(
        *(grown.tokens.data_ptr(), grown.parents.data_ptr(), grown.origins.data_ptr()),
        *(grown.scores.data_ptr(), batch, columns, nodes),
        *(tokens.data_ptr(), parents.data_ptr(), origins.data_ptr(), counts.data_ptr()),
    )
    return tokens, parents, origins, counts


@dataclass(frozen=True)
class Tally:
    """What became of the candidates of each origin, and what they are worth after it.

    Attributes:
        expected: `float32 [ORIGINS]`, what they were thought to be worth before any was tried.
        tried: `int32 [ORIGINS]`, those whose parent was accepted.
        hit: `int32 [ORIGINS]`, those that were accepted too.
        priors: `float32 [ORIGINS]`: `hit` of `tried`, and `expected` as if of `WEIGHT` more.
    """

    expected: Tensor
    tried: Tensor
    hit: Tensor
    priors: Tensor

    WEIGHT = 32

    @classmethod
    def of(cls, expected: Tensor) -> Tally:
        """Nothing tried yet."""
        tried = torch.zeros(ORIGINS, dtype=torch.int32, device=expected.device)
        return cls(expected, tried, tried.clone(), expected.clone())

    def reset(self) -> None:
        """Forget what was tried."""
        self.tried.zero_()
        self.hit.zero_()
        self.priors.copy_(self.expected)

    def refresh(self) -> None:
        """Set `priors` by what is counted."""
        counted = self.expected * self.WEIGHT + self.hit
        torch.div(counted, self.tried + self.WEIGHT, out=self.priors)


def count(tally: Tally, tokens: Tensor, parents: Tensor, origins: Tensor, path: Tensor) -> None:
    """Count a verification in, in place.

    tokens, parents: int32 [B, N] of the trees as they were verified; origins: int32 [B, N' >= N];
    path: int32 [B, D], the accepted nodes, the root among them, -1 for none.
    """
    batch, nodes = tokens.shape
    run = _TALLY.on(tokens)
    if run is not None:
        tokens, parents = tokens.contiguous(), parents.contiguous()
        origins, path = origins.contiguous(), path.int().contiguous()
        run(
            *(tokens.data_ptr(), parents.data_ptr(), origins.data_ptr(), path.data_ptr()),
            *(batch, nodes, path.shape[1], origins.shape[1]),
            *(tally.tried.data_ptr(), tally.hit.data_ptr(), tally.expected.data_ptr()),
            *(tally.priors.data_ptr(), tally.WEIGHT),
        )
        return
    on = torch.zeros(batch, nodes + 1, dtype=torch.int32, device=tokens.device)
    on.scatter_(1, torch.where(path < 0, nodes, path).long(), 1)
    above = torch.where(parents < 0, nodes, parents).long()
    on[:, nodes] = 0
    tried = on.gather(1, above) * (tokens >= 0)
    where = origins[:, :nodes].flatten().long()
    tally.tried.scatter_add_(0, where, tried.flatten())
    tally.hit.scatter_add_(0, where, (tried * on[:, :nodes]).flatten())
    tally.refresh()
