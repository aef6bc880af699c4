"""Selection of the nodes of dynamic trees that are most likely to be accepted (EAGLE-2, arXiv
2406.16858, section 4.2: reranking).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.expansion import ExpandedTrees

_BEST = CppFunction("selection.cpp", "best_nodes", "ppppiiiifi" + "ppppip")
_BLOCK = 32
_MOST = 1024
"""The most columns of the kernel, which has those of a tree in registers; beyond it, trees are
sorted."""


# Slices of one tensor: the alignment of their addresses depends on the batch.
_SLICES = ("tokens", "parents", "sources", "out_tokens", "out_parents", "out_sources")


@jit(do_not_specialize=(*_SLICES, "kept", "most", "min_score"))
def _best_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    sources: tl.tensor,
    scores: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_sources: tl.tensor,
    out_tree_size: tl.tensor,
    lines: tl.tensor,
    columns: tl.tensor,
    kept: tl.tensor,
    most: tl.tensor,
    line_columns: tl.tensor,
    min_score: tl.tensor,
    BY_LINE: tl.constexpr,
    BY_SCORE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Select the nodes of a tree; one program per request. The root is always kept."""
    request = tl.program_id(0).to(tl.int64)
    line = request * columns
    node = tl.arange(0, PAD)
    inside = node < columns
    score = tl.load(scores + line + node, mask=inside, other=0.0)
    score = tl.where(node == 0, float("inf"), score)
    ahead = tl.zeros([PAD], tl.int32)
    for start in range(0, columns, BLOCK):
        other = start + tl.arange(0, BLOCK)
        rival = tl.load(scores + line + other, mask=other < columns, other=0.0)
        rival = tl.where(other == 0, float("inf"), rival)[None, :]
        equal = (rival == score[:, None]) & (other[None, :] < node[:, None])
        ahead += tl.sum(((rival > score[:, None]) | equal).to(tl.int32), 1)
    chosen = (score > 0.0) & ((ahead < kept) | ((ahead < most) & (score >= min_score)))
    count = tl.sum(chosen.to(tl.int32), 0)
    place = ahead if BY_SCORE else tl.cumsum(chosen.to(tl.int32), 0) - 1
    token = tl.load(tokens + line + node, mask=chosen, other=-1)
    parent = tl.load(parents + line + node, mask=chosen, other=-1)
    parent = tl.where(parent < 0, -1, tl.gather(place, tl.maximum(parent, 0), 0))
    source = tl.load(sources + line + node, mask=chosen, other=0)
    # The other nodes fill the cells after the chosen ones, so every cell is written exactly once.
    if not BY_SCORE:
        place = tl.where(chosen, place, count + node - place - 1)
    here = request * most + place
    inside = inside & (place < most)
    tl.store(out_tokens + here, token, mask=inside)
    tl.store(out_parents + here, parent, mask=inside)
    if BY_LINE:
        here = tl.load(lines + request).to(tl.int64) * line_columns + place
    tl.store(out_sources + here, source, mask=inside)
    tl.store(out_tree_size + request, count)


def _best_triton(
    expanded: ExpandedTrees,
    num_draft_tokens: int,
    spine: int,
    min_score: float,
    by_score: bool = False,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, columns = expanded.tokens.shape
    if columns > _MOST:
        return _best_reference(expanded, num_draft_tokens, spine, min_score, by_score, into)
    device = expanded.tokens.device
    shape = (batch, num_draft_tokens + spine + 1)
    # Each has memory of its own: a kernel is compiled again for tensors that begin elsewhere.
    tokens = torch.empty(shape, dtype=torch.int32, device=device)
    parents = torch.empty_like(tokens)
    if into is None:
        sources = lines = torch.empty(shape, dtype=torch.int32, device=device)
    else:
        sources, lines = into
    tree_size = torch.empty(batch, dtype=torch.int32, device=device)
    if batch:
        _best_kernel[(batch,)](
            expanded.tokens,
            expanded.parents,
            expanded.sources,
            expanded.scores,
            tokens,
            parents,
            sources,
            tree_size,
            lines,
            columns,
            num_draft_tokens + 1,
            num_draft_tokens + spine + 1,
            sources.shape[1],
            min_score,
            BY_LINE=into is not None,
            BY_SCORE=by_score,
            PAD=next_power_of_2(columns),
            BLOCK=_BLOCK,
            num_warps=4 if columns <= 256 else 8,
        )
    return tokens, parents, sources, tree_size


def _best_reference(
    expanded: ExpandedTrees,
    num_draft_tokens: int,
    spine: int,
    min_score: float,
    by_score: bool = False,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = torch.where(expanded.scores > 0, expanded.scores, 0.0)  # drops NaN too
    scores[:, 0] = torch.inf  # the root is always kept
    best = scores.sort(dim=1, descending=True, stable=True).indices
    best = best[:, : num_draft_tokens + spine + 1]
    rank = torch.arange(best.shape[1], device=best.device)
    # Scores that are left out sort last, as scores of 0 do.
    kept = (rank <= num_draft_tokens) | (scores.gather(1, best) >= min_score)
    scores.scatter_(1, best, scores.gather(1, best).masked_fill(~kept, 0))
    if not by_score:
        best = best.sort(1).values
    gone = scores.gather(1, best) <= 0
    best = best.gather(1, gone.int().sort(dim=1, stable=True).indices)
    gone = gone.sort(dim=1, stable=True).values
    place = torch.full_like(expanded.parents, -1)
    place.scatter_(1, best, rank.int().expand_as(best))
    above = expanded.parents.gather(1, best).long()
    parents = place.gather(1, above.clamp(min=0)).masked_fill(gone | (above < 0), -1)
    tokens = expanded.tokens.gather(1, best).masked_fill(gone, -1)
    sources = expanded.sources.gather(1, best).masked_fill(gone, 0)
    if into is not None:
        table, lines = into
        table[lines, : sources.shape[1]] = sources
        sources = table
    return tokens, parents, sources, (~gone).sum(1, dtype=torch.int32)


def _best_cpp(
    expanded: ExpandedTrees,
    num_draft_tokens: int,
    spine: int,
    min_score: float,
    by_score: bool = False,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, columns = expanded.tokens.shape
    most = num_draft_tokens + spine + 1
    tokens, parents = torch.empty(2, batch, most, dtype=torch.int32).unbind()
    tree_size = torch.empty(batch, dtype=torch.int32)
    sources, lines = (torch.empty_like(tokens), None) if into is None else into
    lines = None if lines is None else lines.long().contiguous()
    _BEST.call(
        *(expanded.tokens.data_ptr(), expanded.parents.data_ptr(), expanded.sources.data_ptr()),
        *(expanded.scores.data_ptr(), batch, columns, num_draft_tokens, spine),
        *(min_score, int(by_score)),
        *(tokens.data_ptr(), parents.data_ptr(), sources.data_ptr()),
        *(None if lines is None else lines.data_ptr(), sources.shape[1], tree_size.data_ptr()),
    )
    return tokens, parents, sources, tree_size


_BEST_NODES = Op(
    "selection.best_nodes", _best_reference, triton=_best_triton, cpp=_best_cpp, needs=_BEST
)


def best_nodes(
    expanded: ExpandedTrees,
    num_draft_tokens: int,
    spine: int = 0,
    min_score: float = 0.0,
    *,
    by_score: bool = False,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The draft tokens of highest score of each tree.

    A child never scores above its parent, so the selected nodes form a tree. On ties the earlier
    nodes are kept.

    Args:
        expanded: The expanded trees.
        num_draft_tokens: Number N of nodes to select, excluding the root.
        spine: Number S of further nodes to select if their score is at least `min_score`.
        min_score: Least score of the nodes beyond N.
        by_score: Whether the nodes are returned from the highest score to the lowest, so that a
            tree that is cut keeps its best nodes, and not in the order of the expanded trees. A
            parent comes before its children either way.
        into: A table, int32 `[P, M]` of N + S + 1 columns or more, and its line for each tree,
            int64 `[B]`: the sources are written there, in place of a tensor of their own.

    Returns:
        Tokens, parents and sources, int32 `[B, N + S + 1]`, which are -1, -1 and 0 where there is
        no node, and the size of each tree, int32 `[B]`, including the root. With `into` the table
        is returned for the sources.

    Raises:
        ValueError: The trees have N + S columns or fewer, or the table has.
    """
    columns = expanded.tokens.shape[1]
    if num_draft_tokens < 0 or spine < 0 or num_draft_tokens + spine >= columns:
        raise ValueError(
            f"num_draft_tokens={num_draft_tokens} and spine={spine} must not be negative, and "
            f"{columns - 1} at most together"
        )
    if into is not None and into[0].shape[1] <= num_draft_tokens + spine:
        raise ValueError(
            f"a table of {into[0].shape[1]} columns is too narrow for {num_draft_tokens} + {spine} "
            "draft tokens"
        )
    run = _BEST_NODES.on(expanded.tokens)
    return run(expanded, num_draft_tokens, spine, min_score, by_score, into)
