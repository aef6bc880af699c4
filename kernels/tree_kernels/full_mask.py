"""The custom mask of SGLang's tree attention: the masks of all requests in one flat tensor. The row
of a node covers the tokens of its context and then the nodes of its tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._triton import jit, tl

_BLOCK = 1024


@jit
def _full_mask_kernel(
    masks: tl.tensor,
    contexts: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the row of a node; one program per node."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts + request)
    before = tl.load(ends + request) - context
    start = width * (before + request * width) + node * (context + width)
    for first in range(0, context + width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        in_tree = (columns >= context) & (columns < context + width)
        line = masks + (request * width + node) * width
        sees = tl.load(line + (columns - context), mask=in_tree, other=1)
        tl.store(out + start + columns, sees, mask=columns < context + width)


def _full_mask_triton(masks: Tensor, contexts: Tensor, size: int) -> Tensor:
    requests, width, _ = masks.shape
    out = torch.empty(size, dtype=torch.int8, device=masks.device)
    if masks.numel():
        _full_mask_kernel[(requests, width)](
            masks.contiguous().view(torch.int8),
            contexts,
            contexts.cumsum(0),
            out,
            width,
            BLOCK=_BLOCK,
        )
    return out.view(torch.bool)


def _full_mask_reference(masks: Tensor, contexts: Tensor, size: int) -> Tensor:
    width = masks.shape[1]
    out = torch.ones(size, dtype=torch.bool, device=masks.device)
    spans = (contexts + width).repeat_interleave(width)
    starts = spans.cumsum(0) - spans
    columns = torch.arange(width, device=masks.device)
    places = (starts + spans - width)[:, None] + columns
    out[places.flatten()] = masks.flatten()
    return out


_FULL_MASK = Op("full_mask.full_mask", _full_mask_reference, triton=_full_mask_triton)


def full_mask(masks: Tensor, contexts: Tensor, size: int) -> Tensor:
    """The flat custom mask of a batch; every node attends to its whole context.

    Args:
        masks: Bool `[B, N, N]`, whether node i attends to node j.
        contexts: Int64 `[B]`, the number of tokens before each tree.
        size: Number of elements of the result, B * N * N + N * sum(contexts). Computing it here
            would wait for the device.

    Returns:
        Bool `[size]`: for each request N rows of `contexts[b] + N` elements.

    Raises:
        ValueError: Shapes do not fit.
    """
    if masks.dim() != 3 or masks.shape[1] != masks.shape[2] or contexts.shape != masks.shape[:1]:
        raise ValueError(
            f"masks {[*masks.shape]} must be [B, N, N], contexts {[*contexts.shape]} [B]"
        )
    return _FULL_MASK.on(masks)(masks, contexts, size)
