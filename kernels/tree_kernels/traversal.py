"""Traversal verification of sampled draft trees, from the leaves to the root (arXiv 2505.12398,
algorithm 2).

A node's children were drawn without replacement from the draft distribution p. The root has the
weight 1. Nodes are tried depth first, each after its descendants, children in the order in which
they were drawn. A child x of a node with weight w has the weight

    w_x = min(1, w q(x) / p(x)),

and when its turn comes, after its own children's, it is accepted with the probability of its weight
at that time. If it is rejected, its parent changes to

    r = max(w q - p, 0),    S = sum(r),    q <- r / S,    w <- S / (S + 1 - w),
    p <- norm(p without x).

With the first accepted node, its path is accepted, and the next token is drawn from the node's
last q. On a chain this is block verification (arXiv 2403.10444); on a tree of one level it is
recursive rejection sampling (`rejection.py`).

It is enough that each child, where there is one, is a draw without replacement given its earlier
siblings, however many nodes of a level there are. This holds for the trees of RSD-C and for the
beams of RSD-S, in which the descendants of siblings compete.

The reference and C++ sum distributions in double precision, so that they decide alike for the same
coins although they sum in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl

_TRAVERSE = CppFunction("traversal.cpp", "traverse", "pppppppiiipi")
_BLOCK = 2048


@dataclass(frozen=True)
class Trial:
    """One node's turn, after all nodes with a turn before it were rejected.

    Attributes:
        node: The node's column.
        weight: The probability that the node is accepted.
        residual: Weights `[V]` of the token that follows it; None if that is drawn from the
            target's own distribution.
    """

    node: int
    weight: float
    residual: Tensor | None


def trials(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Callable[[int], Tensor],
    draft: Callable[[int], Tensor],
) -> Iterator[Trial]:
    """The turns of a tree's nodes. The last is the root's, whose weight is 1.

    Descendants of a node without weight get no turn, as they have no weight either.

    Args:
        tokens: The nodes' tokens, the root's first and siblings in the order in which they were
            drawn; -1 where there is no node.
        parents: The columns of the nodes' parents; -1 for the root.
        target: The target's distribution after a node, `[V]`; leaves are not asked for.
        draft: The distribution that a node's children were drawn from, `[V]`; zeros if they were
            not drawn.
    """
    children: dict[int, list[int]] = {}
    for column in range(1, len(tokens)):
        if tokens[column] >= 0:
            children.setdefault(parents[column], []).append(column)

    def visit(node: int, weight: float) -> Iterator[Trial]:
        q: Tensor | None = None
        if weight > 0 and node in children:
            q, p = target(node), draft(node).clone()
            q_mass, p_mass = _mass(q), _mass(p) or 1.0
            # After a target without mass, or of NaN, nothing is accepted.
            for child in children[node] if q_mass > 0 else ():
                token = tokens[child]
                wanted, drawn = weight * float(q[token]) * p_mass, float(p[token]) * q_mass
                certain = wanted >= drawn and wanted > 0
                yield from visit(child, 1.0 if certain else wanted / drawn if drawn > 0 else 0.0)
                residual = (q * (weight / q_mass) - p / p_mass).clamp_min(0)
                residual[token], p[token] = 0.0, 0.0
                mass, p_mass = _mass(residual), _mass(p) or 1.0
                if mass > 0:
                    q, q_mass, weight = residual, mass, mass / (mass + (1.0 - weight))
                elif weight < 1:
                    # The draft distribution covers the rest of the target.
                    q, weight = residual, 0.0
                    break
                else:
                    # q equals p, so only rounding can have rejected the child.
                    q, q_mass = p.clone(), p_mass
        yield Trial(node, weight, q)

    return visit(0, 1.0)


def _mass(weights: Tensor) -> float:
    return float(weights.sum(dtype=torch.float64))


@jit
def _at(values: tl.tensor, nodes: tl.tensor, node: tl.tensor) -> tl.tensor:
    """The value of one node."""
    return tl.sum(tl.where(nodes == node, values, 0), 0)


@jit(do_not_specialize=["width"])
def _traverse_kernel(
    target: tl.tensor,
    draft: tl.tensor,
    target_rows: tl.tensor,
    draft_rows: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    coins: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Verify a tree; one program per request. Rows of `target` become residuals, in which rejected
    tokens have the value -1."""
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, PAD)
    inside = nodes < width
    line = request * width + nodes
    token = tl.load(tokens + line, mask=inside, other=-1)
    parent = tl.load(parents + line, mask=inside, other=-1)
    q_rows = tl.load(target_rows + line, mask=inside, other=0)
    p_rows = tl.load(draft_rows + line, mask=inside, other=-1)
    coin = tl.load(coins + line, mask=inside, other=0.0)
    weights = tl.where(nodes == 0, 1.0, 0.0)
    q_masses = tl.zeros([PAD], tl.float32)
    p_masses = tl.zeros([PAD], tl.float32)
    # The last child of each node that was tried; 0 if there is none, and PAD to try no more.
    tried = tl.zeros([PAD], tl.int32)
    node = 0
    found = -1
    while found < 0:
        last = _at(tried, nodes, node)
        is_next = (token >= 0) & (parent == node) & (nodes > node) & (nodes > last)
        child = tl.min(tl.where(is_next, nodes, PAD), 0)
        p_line = draft + _at(p_rows, nodes, node) * vocab
        q_line = target + _at(q_rows, nodes, node) * vocab
        weight = _at(weights, nodes, node)
        if (child < PAD) & (_at(p_rows, nodes, node) >= 0):
            if last == 0:
                q_mass = 0.0
                p_mass = 0.0
                for first in range(0, vocab, BLOCK):
                    columns = first + tl.arange(0, BLOCK)
                    q_mass += tl.sum(tl.load(q_line + columns, mask=columns < vocab, other=0.0), 0)
                    p_mass += tl.sum(tl.load(p_line + columns, mask=columns < vocab, other=0.0), 0)
                q_masses = tl.where(nodes == node, q_mass, q_masses)
                p_masses = tl.where(nodes == node, p_mass, p_masses)
            # After a target without mass, or of NaN, nothing is accepted.
            has_mass = _at(q_masses, nodes, node) > 0
            tried = tl.where(nodes == node, tl.where(has_mass, child, PAD), tried)
            child_token = _at(token, nodes, child)
            p_mass = _at(p_masses, nodes, node)
            wanted = weight * tl.load(q_line + child_token) * tl.where(p_mass > 0, p_mass, 1.0)
            drawn = tl.load(p_line + child_token) * _at(q_masses, nodes, node)
            ratio = tl.where(wanted >= drawn, 1.0, wanted / tl.where(drawn > 0, drawn, 1.0))
            ratio = tl.where(wanted > 0, ratio, 0.0)
            weights = tl.where(nodes == child, ratio, weights)
            # Below a node without weight nothing can be accepted.
            if ratio <= 0:
                tried = tl.where(nodes == child, PAD, tried)
            node = tl.where(has_mass, child, node)
            # The loads must come before other threads of the program store residuals.
            tl.debug_barrier()
        elif (node == 0) | (_at(coin, nodes, node) < weight):
            found = node
        else:
            rejected = _at(token, nodes, node)
            node = _at(parent, nodes, node)
            p_line = draft + _at(p_rows, nodes, node) * vocab
            q_line = target + _at(q_rows, nodes, node) * vocab
            weight = _at(weights, nodes, node)
            p_mass = _at(p_masses, nodes, node)
            q_scale = weight / _at(q_masses, nodes, node)
            p_scale = 1.0 / tl.where(p_mass > 0, p_mass, 1.0)
            q_mass = 0.0
            p_mass = 0.0
            for first in range(0, vocab, BLOCK):
                columns = first + tl.arange(0, BLOCK)
                q = tl.load(q_line + columns, mask=columns < vocab, other=-1.0)
                p = tl.load(p_line + columns, mask=columns < vocab, other=0.0)
                gone = (q < 0) | (columns == rejected)
                residual = tl.where(gone, 0.0, tl.maximum(q * q_scale - p * p_scale, 0.0))
                tl.store(q_line + columns, tl.where(gone, -1.0, residual), mask=columns < vocab)
                q_mass += tl.sum(residual, 0)
                p_mass += tl.sum(tl.where(gone, 0.0, p), 0)
            # The loads below read what other threads of the program have stored.
            tl.debug_barrier()
            if (q_mass <= 0) & (weight >= 1):
                # q equals p, so only rounding can have rejected the child.
                for first in range(0, vocab, BLOCK):
                    columns = first + tl.arange(0, BLOCK)
                    q = tl.load(q_line + columns, mask=columns < vocab, other=-1.0)
                    p = tl.load(p_line + columns, mask=columns < vocab, other=0.0)
                    tl.store(q_line + columns, tl.where(q < 0, q, p), mask=columns < vocab)
                tl.debug_barrier()
                q_mass = p_mass
            elif q_mass > 0:
                weight = q_mass / (q_mass + (1.0 - weight))
            else:
                weight = 0.0
            weights = tl.where(nodes == node, weight, weights)
            q_masses = tl.where(nodes == node, q_mass, q_masses)
            p_masses = tl.where(nodes == node, p_mass, p_masses)
            if weight <= 0:
                tried = tl.where(nodes == node, PAD, tried)
    q_line = target + _at(q_rows, nodes, found) * vocab
    mass = 0.0
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        q = tl.load(q_line + columns, mask=columns < vocab, other=0.0)
        mass += tl.sum(tl.maximum(q, 0.0), 0)
    wanted = _at(coin, nodes, 0) * mass
    before = 0.0
    drawn_token = -1
    last_token = -1
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        q = tl.load(q_line + columns, mask=columns < vocab, other=0.0)
        q = tl.maximum(q, 0.0)
        reached = (before + tl.cumsum(q, 0) > wanted) & (q > 0)
        hit = tl.min(tl.where(reached, columns, vocab), 0)
        if (drawn_token < 0) & (hit < vocab):
            drawn_token = hit
        last_token = tl.maximum(last_token, tl.max(tl.where(q > 0, columns, -1), 0))
        before += tl.sum(q, 0)
    # Due to rounding, the running sums may stay below the mass.
    if drawn_token < 0:
        drawn_token = last_token
    # Without mass, the first token that is no child's.
    if drawn_token < 0:
        drawn_token = 0
        while tl.max(((parent == found) & (token == drawn_token)).to(tl.int32), 0) > 0:
            drawn_token += 1
    emitted = tl.where(nodes == found, drawn_token, -1)
    while found > 0:
        above = _at(parent, nodes, found)
        emitted = tl.where(nodes == above, _at(token, nodes, found), emitted)
        found = above
    tl.store(out + line, emitted, mask=inside)


def _traverse_triton(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    tokens: Tensor,
    parents: Tensor,
    coins: Tensor,
) -> Tensor:
    requests, width = tokens.shape
    out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    if requests:
        _traverse_kernel[(requests,)](
            *(target, draft.contiguous(), target_rows.contiguous(), draft_rows.contiguous()),
            *(tokens.contiguous(), parents.contiguous(), coins.contiguous(), out),
            *(width, target.shape[1]),
            BLOCK=_BLOCK,
            PAD=next_power_of_2(width),
        )
    return out


def _traverse_reference(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    tokens: Tensor,
    parents: Tensor,
    coins: Tensor,
) -> Tensor:
    out = torch.full_like(tokens, -1)
    for row in range(len(tokens)):
        q_rows, p_rows = target_rows[row], draft_rows[row]
        has_no_children = p_rows < 0
        of_tree = tokens[row].tolist()
        above = parents[row].tolist()
        for column in range(1, len(of_tree)):
            if has_no_children[above[column]]:
                of_tree[column] = -1

        def target_after(node: int, q_rows: Tensor = q_rows) -> Tensor:
            return target[q_rows[node]]

        def draft_after(node: int, p_rows: Tensor = p_rows) -> Tensor:
            return draft[p_rows[node]]

        for trial in trials(of_tree, above, target_after, draft_after):
            if trial.node == 0 or float(coins[row, trial.node]) < trial.weight:
                break
        left = target_after(trial.node) if trial.residual is None else trial.residual
        below = tokens[row][parents[row] == trial.node].tolist()
        out[row, trial.node] = _drawn(left, coins[row, 0], below)
        node = trial.node
        while node > 0:
            out[row, above[node]] = of_tree[node]
            node = above[node]
    return out


def _drawn(weights: Tensor, coin: Tensor, children: Sequence[int]) -> int:
    """The token at which the running sum exceeds the coin's share of the mass.

    Without mass, or of NaN, it is the first that is none of the children's.
    """
    with_mass = (weights > 0).nonzero()[:, 0]
    if not len(with_mass):
        return next(token for token in range(len(weights)) if token not in children)
    sums = weights.double().cumsum(0)
    place = torch.searchsorted(sums, coin.double() * sums[-1:], right=True)
    # The last token with mass: due to rounding, the running sums may stay below the mass.
    return int(torch.minimum(place[0], with_mass[-1]))


def _traverse_cpp(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    tokens: Tensor,
    parents: Tensor,
    coins: Tensor,
) -> Tensor:
    given = (
        *(target.float(), draft.float().contiguous()),
        *(target_rows.long().contiguous(), draft_rows.long().contiguous()),
        *(tokens.int().contiguous(), parents.int().contiguous(), coins.float().contiguous()),
    )
    out = torch.empty_like(given[4])
    _TRAVERSE.call(
        *(tensor.data_ptr() for tensor in given),
        *(*tokens.shape, target.shape[1], out.data_ptr(), torch.get_num_threads()),
    )
    return out


_TRAVERSE_TREES = Op(
    "traversal.traverse_trees",
    _traverse_reference,
    triton=_traverse_triton,
    cpp=_traverse_cpp,
    needs=_TRAVERSE,
)


def traverse_trees(
    target: Tensor,
    draft: Tensor,
    target_rows: Tensor,
    draft_rows: Tensor,
    tokens: Tensor,
    parents: Tensor,
    coins: Tensor,
) -> Tensor:
    """Choose the path that is accepted of each request's tree, and the token that follows it.

    Args:
        target: Float32 `[R, V]`, contiguous: distributions of the target after all filters; each
            row sums to 1, or is zeros or NaN where no token is allowed. The rows of inner nodes may
            be overwritten.
        draft: Float32 `[S, V]`, the distributions that children were drawn from, after the same
            filters. A row of zeros means that the children were not drawn; the target's
            distribution after such a node must be one-hot.
        target_rows: Int64 `[B, N]`, the row of `target` of each node, a row of its own.
        draft_rows: Int64 `[B, N]`, the row of `draft` of each node; -1 for a node whose children
            are not tried.
        tokens: Int32 `[B, N]`, the trees in breadth-first order, siblings in the order in which
            they were drawn; -1 where there is no node. The root's is not read.
        parents: Int32 `[B, N]`, the columns of the nodes' parents, -1 for a root.
        coins: Float32 `[B, N]`, uniform in [0, 1): the root's for the draw, and one for each node.

    Returns:
        Int32 `[B, N]`: the token after each node of the accepted path, -1 for all other nodes. The
        last node's token is drawn, and is none of its children's; where no token is allowed, it is
        the first of the others.

    Raises:
        ValueError: Shapes do not fit, or `target` is not contiguous.
    """
    given = (target_rows, draft_rows, parents, coins)
    if (
        target.dim() != 2
        or draft.dim() != 2
        or draft.shape[1] != target.shape[1]
        or tokens.dim() != 2
        or tokens.shape[1] == 0
        or any(each.shape != tokens.shape for each in given)
    ):
        shapes = [[*t.shape] for t in (target, draft, tokens, *given)]
        raise ValueError(f"expected [R, V], [S, V] and five times [B, N], not {shapes}")
    if not target.is_contiguous():
        raise ValueError("target must be contiguous, as its rows are overwritten")
    run = _TRAVERSE_TREES.on(target)
    return run(target, draft, target_rows, draft_rows, tokens, parents, coins)
