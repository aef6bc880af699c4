"""The nodes of grown trees that are most likely to be accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, tl, use_triton
from tree_kernels.growth import Grown

_BEST = NativeFunction("selection.cpp", "best_nodes", "ppppiiipppp")
_BLOCK = 32


# Rows of one tensor, where each begins depends on the batch.
_MOVING = ("tokens", "parents", "origins", "out_tokens", "out_parents", "out_origins")


@jit(do_not_specialize=(*_MOVING, "kept"))
def _best_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    origins: tl.tensor,
    scores: tl.tensor,
    out_tokens: tl.tensor,
    out_parents: tl.tensor,
    out_origins: tl.tensor,
    counts: tl.tensor,
    columns: tl.tensor,
    kept: tl.tensor,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a request; the root stays whatever it scores."""
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
    chosen = (score > 0.0) & (ahead < kept)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    count = tl.sum(chosen.to(tl.int32), 0)
    token = tl.load(tokens + line + node, mask=chosen, other=-1)
    parent = tl.load(parents + line + node, mask=chosen, other=-1)
    parent = tl.where(parent < 0, -1, tl.gather(place, tl.maximum(parent, 0), 0))
    origin = tl.load(origins + line + node, mask=chosen, other=0)
    # What lies past the chosen nodes is filled by the others: every cell has one writer.
    place = tl.where(chosen, place, count + node - place - 1)
    here = request * kept + place
    inside = inside & (place < kept)
    tl.store(out_tokens + here, token, mask=inside)
    tl.store(out_parents + here, parent, mask=inside)
    tl.store(out_origins + here, origin, mask=inside)
    tl.store(counts + request, count)


def _best_triton(grown: Grown, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, columns = grown.tokens.shape
    device = grown.tokens.device
    out = torch.empty(3, batch, nodes + 1, dtype=torch.int32, device=device)
    tokens, parents, origins = out.unbind()
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    if batch:
        _best_kernel[(batch,)](
            grown.tokens,
            grown.parents,
            grown.origins,
            grown.scores,
            tokens,
            parents,
            origins,
            counts,
            columns,
            nodes + 1,
            PAD=next_power_of_2(columns),
            BLOCK=_BLOCK,
            num_warps=4 if columns <= 256 else 8,
        )
    return tokens, parents, origins, counts


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
    if use_triton(grown.tokens):
        return _best_triton(grown, nodes)
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
