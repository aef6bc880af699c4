"""Trees that wait on the device for the step that verifies them, by the request's row in the host's
state.

One launch finds the roots of the next trees, and one keeps these. `scheduled_trees` lays them out
in the step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tree_kernels._dispatch import Op
from tree_kernels._triton import jit, next_power_of_2, tl

_NONE = -1


@jit
def _roots_kernel(
    sampled: tl.tensor, rows: tl.tensor, counts: tl.tensor, last: tl.tensor, roots: tl.tensor
) -> None:
    request = tl.program_id(0).to(tl.int64)
    token = tl.load(sampled + tl.load(rows + request).to(tl.int64)).to(tl.int32)
    tl.store(last + request, token)
    tl.store(roots + request, tl.where(tl.load(counts + request) == 0, -1, token))


def _roots_triton(sampled: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    count = rows.shape[0]
    last = torch.empty(count, dtype=torch.int32, device=rows.device)
    roots = torch.empty_like(last)
    if count:
        _roots_kernel[(count,)](sampled.contiguous(), rows, counts, last, roots)
    return last, roots


def _roots_reference(sampled: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    last = sampled.view(-1)[rows].int()
    return last, last.masked_fill(counts == 0, _NONE)


@jit(do_not_specialize=["width", "kept_width"])
def _keep_kernel(
    kept: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    parents: tl.tensor,
    last: tl.tensor,
    drafts: tl.tensor,
    width: tl.tensor,
    kept_width: tl.tensor,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < kept_width
    given = column < width
    line = request * width + column
    parent = tl.load(parents + line, mask=given, other=-1)
    token = tl.load(tokens + line, mask=given, other=-1)
    tl.store(kept + row * kept_width + column, parent, mask=inside)
    token = tl.where(token < 0, tl.load(last + request), token).to(tl.int64)
    at = drafts + request * (kept_width - 1) + column - 1
    tl.store(at, token, mask=inside & (column > 0))


def _keep_triton(
    kept: Tensor, rows: Tensor, tokens: Tensor, parents: Tensor, last: Tensor
) -> Tensor:
    count = rows.shape[0]
    drafts = torch.empty(count, kept.shape[1] - 1, dtype=torch.int64, device=rows.device)
    if count:
        _keep_kernel[(count,)](
            *(kept, rows, tokens.contiguous(), parents.contiguous(), last.contiguous(), drafts),
            *(tokens.shape[1], kept.shape[1]),
            PAD=next_power_of_2(kept.shape[1]),
        )
    return drafts


def _keep_reference(
    kept: Tensor, rows: Tensor, tokens: Tensor, parents: Tensor, last: Tensor
) -> Tensor:
    missing = (0, kept.shape[1] - tokens.shape[1])
    kept[rows] = pad(parents, missing, value=_NONE)
    drafts = pad(tokens, missing, value=_NONE)[:, 1:]
    return torch.where(drafts < 0, last[:, None], drafts).long()


_ROOTS = Op("kept_trees.next_roots", _roots_reference, triton=_roots_triton)
_KEEP = Op("kept_trees.keep_trees", _keep_reference, triton=_keep_triton)


def next_roots(sampled: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The roots of the next trees.

    Args:
        sampled: Integers `[M]` or `[M, 1]`, the last token of each text, by row of the host's
            state.
        rows: Integers `[B]`, the requests' rows there.
        counts: Integers `[B]`, how many tokens each request emitted.

    Returns:
        The last tokens, int32 `[B]`; and the same with -1 where nothing was emitted.
    """
    return _ROOTS.on(sampled)(sampled, rows, counts)


def keep_trees(kept: Tensor, rows: Tensor, tokens: Tensor, parents: Tensor, last: Tensor) -> Tensor:
    """Keep drafted trees until they are verified.

    Args:
        kept: Int32 `[M, 1 + K]`, contiguous, where the parents are written; -1 for roots and where
            there is no node.
        rows: Integers `[B]`, the requests' rows there.
        tokens: Int32 `[B, N]`, N at most 1 + K, the trees; -1 where there is no node.
        parents: Int32 `[B, N]`.
        last: Int32 `[B]`, what stands where there is no node, as a target embeds all columns.

    Returns:
        Int64 `[B, K]`, the draft tokens.

    Raises:
        ValueError: Shapes do not fit.
    """
    if tokens.shape != parents.shape or tokens.shape[1] > kept.shape[1]:
        raise ValueError(
            f"tokens {[*tokens.shape]} and parents {[*parents.shape]} must both be [B, N], N at "
            f"most {kept.shape[1]}"
        )
    return _KEEP.on(kept)(kept, rows, tokens, parents, last)
