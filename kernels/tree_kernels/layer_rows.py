"""What a layer reads of a step that the target has verified.

A layer that continues the target's hidden states reads each token with the hidden state before it.
Along an accepted path the rows of a step are read as if they came right after the root: each takes
the place of the column in which a chain would have its token. Rows behind the path are read too:
to leave them out, the host would have to wait for their number. Their KV is written again before it
is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._triton import jit, tl

_BLOCK = 256


class LayerRows(NamedTuple):
    """The T rows that a layer reads.

    Attributes:
        sources: Int64 `[T]`, the row of the step with the hidden state before each token.
        tokens: `[T]`, the tokens, in the type of the input.
        positions: `[T]`, the positions of the rows, in the type of the step's.
        last: Int64 `[B]`, the row of each request's last accepted token.
    """

    sources: Tensor
    tokens: Tensor
    positions: Tensor
    last: Tensor


# They may be slices of other tensors: the alignment of their addresses depends on the step.
_SLICES = ("input_ids", "positions", "starts", "sizes", "path", "following")


@jit(do_not_specialize=(*_SLICES, "requests", "count", "depth"))
def _rows_kernel(
    input_ids: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    sizes: tl.tensor,
    path: tl.tensor,
    following: tl.tensor,
    out_sources: tl.tensor,
    out_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_last: tl.tensor,
    requests: tl.tensor,
    count: tl.tensor,
    depth: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Find the rows of a request; one program for each BLOCK of them. The programs after those of
    the last request find the rows that belong to none."""
    request = tl.program_id(0).to(tl.int64)
    is_request = request < requests
    first = tl.load(starts + request).to(tl.int64)
    end = tl.load(starts + request + 1, mask=is_request, other=count).to(tl.int64)
    root = end - tl.load(sizes + request, mask=is_request, other=0).to(tl.int64)
    root_position = tl.load(positions + root, mask=is_request, other=0)
    line = request * depth
    rows = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < end
    column = rows - root
    on_tree = inside & (column >= 0)
    on_path = on_tree & (column < depth)
    node = tl.load(path + line + column, mask=on_path, other=-1)
    accepted = on_path & ((node >= 0) | (column == 0))
    # The token after the last row is not known, and nobody reads it.
    later = tl.load(input_ids + (rows + 1) % count, mask=inside, other=0)
    given = tl.load(following + line + column, mask=accepted, other=0)
    tl.store(out_tokens + rows, tl.where(accepted, given.to(later.dtype), later), mask=inside)
    source = tl.where(accepted, root + tl.maximum(node, 0), rows)
    tl.store(out_sources + rows, source, mask=inside)
    position = tl.load(positions + rows, mask=inside, other=0)
    position = tl.where(on_tree, root_position + column, position)
    tl.store(out_positions + rows, position, mask=inside)
    if is_request & (tl.program_id(1) == 0):
        last = root
        for start in range(1, depth, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            nodes = tl.load(path + line + columns, mask=columns < depth, other=-1)
            last += tl.sum((nodes >= 0).to(tl.int64), 0)
        tl.store(out_last + request, last)


def _rows_triton(
    input_ids: Tensor,
    positions: Tensor,
    starts: Tensor,
    sizes: Tensor,
    path: Tensor,
    following: Tensor,
) -> LayerRows:
    count, (requests, depth) = len(input_ids), path.shape
    # Each has memory of its own: a kernel is compiled again for tensors that begin elsewhere.
    found = LayerRows(
        sources=torch.empty(count, dtype=torch.int64, device=path.device),
        tokens=torch.empty_like(input_ids),
        positions=torch.empty_like(positions),
        last=torch.empty(requests, dtype=torch.int64, device=path.device),
    )
    if count:
        _rows_kernel[(requests + 1, -(-count // _BLOCK))](
            *(input_ids, positions, starts, sizes, path, following),
            *found,
            *(requests, count, depth),
            BLOCK=_BLOCK,
        )
    return found


def _rows_reference(
    input_ids: Tensor,
    positions: Tensor,
    starts: Tensor,
    sizes: Tensor,
    path: Tensor,
    following: Tensor,
) -> LayerRows:
    requests, depth = path.shape
    rows = torch.arange(len(input_ids), device=path.device)
    ends = starts[1:].long()
    request = torch.searchsorted(ends, rows, right=True).clamp(max=requests - 1)
    root = ends - sizes
    columns = rows - root[request]
    on_tree = (columns >= 0) & (rows < ends[-1])
    column = columns.clamp(0, depth - 1)
    node = path[request, column].long()
    accepted = on_tree & (columns == column) & ((node >= 0) | (columns == 0))
    given = following[request, column].to(input_ids.dtype)
    moved = (positions[root][request] + columns).to(positions.dtype)
    return LayerRows(
        sources=torch.where(accepted, root[request] + node.clamp(min=0), rows),
        tokens=torch.where(accepted, given, input_ids.roll(-1)),
        positions=torch.where(on_tree, moved, positions),
        last=root + (path[:, 1:] >= 0).sum(1),
    )


_ROWS_TO_READ = Op("layer_rows.rows_to_read", _rows_reference, triton=_rows_triton)


def rows_to_read(
    input_ids: Tensor,
    positions: Tensor,
    starts: Tensor,
    sizes: Tensor,
    path: Tensor,
    following: Tensor,
) -> LayerRows:
    """The rows of a step, each with the token after it.

    The rows of each request are consecutive, and those of its tree the last of them. Other rows, of
    prompts and of no request, are read as they are.

    Args:
        input_ids: Int `[T]`, the step's input tokens.
        positions: Int `[T]`, their positions.
        starts: Int32 `[B + 1]`, the first row of each request, and the one after the last.
        sizes: Int32 `[B]`, the number of rows of each tree, at least 1.
        path: Int32 `[B, D + 1]` as in `accept.accept_walk`; after a chunk of a prompt there may be
            no path, and its last row is read all the same.
        following: Int32 `[B, D + 1]`, the token after each node of the path.

    Raises:
        ValueError: Shapes or types do not fit.
    """
    requests = path.shape[:1]
    if (
        positions.shape != input_ids.shape
        or path.dim() != 2
        or not path.shape[1]
        or path.shape != following.shape
        or sizes.shape != requests
        or starts.shape != (len(path) + 1,)
        or {each.dtype for each in (starts, sizes, path, following)} != {torch.int32}
    ):
        given = [
            (each.dtype, [*each.shape])
            for each in (input_ids, positions, starts, sizes, path, following)
        ]
        raise ValueError(
            f"expected [T], [T] and int32 [B + 1], [B], [B, D + 1] and [B, D + 1], not {given}"
        )
    run = _ROWS_TO_READ.on(path)
    return run(
        *(input_ids.contiguous(), positions.contiguous(), starts.contiguous()),
        *(sizes.contiguous(), path.contiguous(), following.contiguous()),
    )
