"""Trees of a batch that a host has laid out as chains, before it knew the trees.

The host schedules a number of rows for each request: the root's and one for each column of its
tree. Which columns are nodes, and under which parents, is known on the device alone, where
`kept_trees` has kept the trees. One launch lays a step out, and one reads its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.mask import depths, store_mask, tree_mask

_NONE = -1


class Layout(NamedTuple):
    """The trees of a step: B requests of up to N columns, and R rows that have logits.

    Attributes:
        requests: Int64 `[B]`, 0 to B - 1.
        sizes: Int32 `[B]`, the number of each request's rows.
        tree_sizes: Int32 `[B]`, the same; 0 after a chunk of a prompt, where nothing is verified.
        begun: Bool `[B]`, whether the root is a token that was sampled. If it belongs to a prompt,
            the columns behind it are placeholders, and there is no tree.
        partial: Bool `[B]`, whether the prompt goes on after the step.
        parents: Int32 `[B, N]`, the column of each node's parent; -1 where there is no node.
        masks: Bool `[B, N, N]`, the trees' attention masks; see `mask.tree_mask`.
        row_of_node: Int64 `[B, N]`, places among the R rows; padding repeats a request's last.
        place_of_node: Int64 `[B, N]`, the same among the step's tokens.
        request_of_row: Int64 `[R]`.
    """

    requests: Tensor
    sizes: Tensor
    tree_sizes: Tensor
    begun: Tensor
    partial: Tensor
    parents: Tensor
    masks: Tensor
    row_of_node: Tensor
    place_of_node: Tensor
    request_of_row: Tensor

    @classmethod
    def empty(cls, requests: int, width: int, rows: int, device: torch.device) -> Layout:
        """Memory for the layout of a step of B = `requests`, N = `width` and R = `rows`."""

        def of(dtype: torch.dtype, *shape: int) -> Tensor:
            # Each has memory of its own: a kernel is compiled again for tensors that begin
            # elsewhere.
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            requests=of(torch.int64, requests),
            sizes=of(torch.int32, requests),
            tree_sizes=of(torch.int32, requests),
            begun=of(torch.bool, requests),
            partial=of(torch.bool, requests),
            parents=of(torch.int32, requests, width),
            masks=of(torch.bool, requests, width, width),
            row_of_node=of(torch.int64, requests, width),
            place_of_node=of(torch.int64, requests, width),
            request_of_row=of(torch.int64, rows),
        )

    @property
    def width(self) -> int:
        """Number of columns N."""
        return self.parents.shape[1]

    def by_row(self, nodes: Tensor, columns: Tensor) -> Tensor:
        """Gather values of nodes, `[B, N]`, into `[R]`; `columns [R]` are the rows' columns."""
        return nodes[self.request_of_row, columns.long()]


class NodeTokens(NamedTuple):
    """The input tokens of a step's trees.

    Attributes:
        nodes: Int32 `[B, N]`; -1 where there is no node.
        rows: `[R]`, the input token of each row that has logits, in the type of the input.
        observed: Int32 `[R]`, the same with -1 where there is no node.
        previous: Int32 `[R]`, the token before that of each node; -1 where it is not known.
    """

    nodes: Tensor
    rows: Tensor
    observed: Tensor
    previous: Tensor


@jit(do_not_specialize=["width", "kept_width"])
def _lay_out_kernel(
    rows: tl.tensor,
    ends: tl.tensor,
    lengths: tl.tensor,
    prompts: tl.tensor,
    kept: tl.tensor,
    indices: tl.tensor,
    positions: tl.tensor,
    requests: tl.tensor,
    sizes: tl.tensor,
    tree_sizes: tl.tensor,
    begun: tl.tensor,
    partial: tl.tensor,
    parents: tl.tensor,
    masks: tl.tensor,
    row_of_node: tl.tensor,
    place_of_node: tl.tensor,
    request_of_row: tl.tensor,
    width: tl.tensor,
    kept_width: tl.tensor,
    ROUNDS: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Lay out a request; one program for each 32 columns of its mask, the first for the rest."""
    request = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    row = tl.load(rows + request).to(tl.int64)
    first = tl.load(ends + request).to(tl.int64)
    size = (tl.load(ends + request + 1) - first).to(tl.int32)
    length = tl.load(lengths + request)
    prompt = tl.load(prompts + row)
    is_begun = length - size >= prompt
    column = tl.arange(0, PAD)
    inside = column < width
    verified = inside & (column < tl.where(is_begun, size, 1))
    parent = tl.load(kept + row * kept_width + column, mask=verified, other=-1)
    scheduled = inside & (column < size)
    jump = tl.where(parent >= 0, parent, column)
    if word == 0:
        is_partial = length < prompt
        tl.store(requests + request, request)
        tl.store(sizes + request, size)
        tl.store(tree_sizes + request, tl.where(is_partial, 0, size))
        tl.store(begun + request, is_begun.to(tl.int8))
        tl.store(partial + request, is_partial.to(tl.int8))
        out = request * width + column
        tl.store(parents + out, parent, mask=inside)
        node_row = first + tl.minimum(column, size - 1)
        place = tl.load(indices + node_row, mask=inside, other=0).to(tl.int64)
        tl.store(row_of_node + out, node_row, mask=inside)
        tl.store(place_of_node + out, place, mask=inside)
        of_row = tl.zeros([PAD], tl.int64) + request
        tl.store(request_of_row + first + column, of_row, mask=scheduled)
        depth = (parent >= 0).to(tl.int32)
        higher = jump
        for _ in range(ROUNDS):
            depth += tl.gather(depth, higher, 0)
            higher = tl.gather(higher, higher, 0)
        position = tl.load(positions + place, mask=scheduled, other=0)
        tl.store(positions + place, position + (depth - column), mask=scheduled)
    store_mask(masks + request * width * width, jump, scheduled, word, width, ROUNDS, PAD)


def _lay_out_triton(
    rows: Tensor,
    ends: Tensor,
    lengths: Tensor,
    prompts: Tensor,
    kept: Tensor,
    indices: Tensor,
    positions: Tensor,
    layout: Layout,
) -> None:
    count, width = layout.parents.shape
    if count:
        _lay_out_kernel[(count, -(-width // 32))](
            *(rows, ends, lengths, prompts, kept, indices, positions),
            *(each.view(torch.int8) if each.dtype == torch.bool else each for each in layout),
            *(width, kept.stride(0)),
            ROUNDS=max(width - 1, 0).bit_length(),
            PAD=next_power_of_2(width),
        )


def _lay_out_reference(
    rows: Tensor,
    ends: Tensor,
    lengths: Tensor,
    prompts: Tensor,
    kept: Tensor,
    indices: Tensor,
    positions: Tensor,
    layout: Layout,
) -> None:
    width = layout.width
    sizes = (ends[1:] - ends[:-1]).int()
    begun = lengths - sizes >= prompts[rows]
    column = torch.arange(width, device=rows.device)
    verified = torch.where(begun, sizes, 1)
    parents = kept[rows, :width].masked_fill(column >= verified[:, None], _NONE)
    row_of_node = ends[:-1, None].long() + torch.minimum(column, sizes[:, None].long() - 1)
    requests = torch.arange(rows.shape[0], device=rows.device)
    request_of_row = torch.repeat_interleave(requests, sizes.long(), output_size=indices.shape[0])
    place_of_node = indices[row_of_node].long()
    column_of_row = torch.arange(indices.shape[0], device=rows.device) - ends[request_of_row]
    depth = depths(parents, sizes)[request_of_row, column_of_row]
    positions.index_add_(0, indices.long(), (depth - column_of_row).to(positions.dtype))
    partial = lengths < prompts[rows]
    found = Layout(
        requests=requests,
        sizes=sizes,
        tree_sizes=sizes.masked_fill(partial, 0),
        begun=begun,
        partial=partial,
        parents=parents,
        masks=tree_mask(parents, sizes),
        row_of_node=row_of_node,
        place_of_node=place_of_node,
        request_of_row=request_of_row,
    )
    for part, value in zip(layout, found, strict=True):
        part.copy_(value)


@jit(do_not_specialize=["width"])
def _tokens_kernel(
    inputs: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    parents: tl.tensor,
    before_roots: tl.tensor,
    partial: tl.tensor,
    nodes: tl.tensor,
    rows: tl.tensor,
    observed: tl.tensor,
    previous: tl.tensor,
    width: tl.tensor,
    PAD: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < width
    first = tl.load(ends + request).to(tl.int64)
    size = (tl.load(ends + request + 1) - first).to(tl.int32)
    line = request * width + column
    parent = tl.load(parents + line, mask=inside, other=-1)
    token = tl.load(inputs + tl.load(places + line, mask=inside, other=0), mask=inside, other=-1)
    node = tl.where((column == 0) | (parent >= 0), token.to(tl.int32), -1)
    tl.store(nodes + line, node, mask=inside)
    above = tl.gather(node, tl.maximum(parent, 0), 0)
    is_known = tl.load(partial + request) == 0
    before = tl.where(is_known, tl.load(before_roots + request), -1)
    above = tl.where(column == 0, before, tl.where(parent >= 0, above, -1))
    row = first + column
    scheduled = inside & (column < size)
    tl.store(rows + row, token, mask=scheduled)
    tl.store(observed + row, node, mask=scheduled)
    tl.store(previous + row, above, mask=scheduled)


def _tokens_triton(
    inputs: Tensor, ends: Tensor, layout: Layout, parents: Tensor, before_roots: Tensor
) -> NodeTokens:
    count, width = parents.shape
    nodes = torch.empty(count, width, dtype=torch.int32, device=inputs.device)
    rows = inputs.new_empty(layout.request_of_row.shape[0])
    observed = torch.empty(rows.shape[0], dtype=torch.int32, device=inputs.device)
    previous = torch.empty_like(observed)
    if count:
        _tokens_kernel[(count,)](
            *(inputs, layout.place_of_node, ends, parents, before_roots.contiguous()),
            *(layout.partial.view(torch.int8), nodes, rows, observed, previous, width),
            PAD=next_power_of_2(width),
        )
    return NodeTokens(nodes, rows, observed, previous)


def _tokens_reference(
    inputs: Tensor, ends: Tensor, layout: Layout, parents: Tensor, before_roots: Tensor
) -> NodeTokens:
    of_nodes = inputs[layout.place_of_node]
    nodes = of_nodes.int().masked_fill(parents < 0, _NONE)
    nodes[:, 0] = of_nodes[:, 0]
    above = nodes.gather(1, parents.clamp(min=0).long()).masked_fill(parents < 0, _NONE)
    above[:, 0] = before_roots.int().masked_fill(layout.partial, _NONE)
    request = layout.request_of_row
    column = torch.arange(len(request), device=inputs.device) - ends[request]
    return NodeTokens(
        nodes, of_nodes[request, column], nodes[request, column], above[request, column]
    )


_LAY_OUT = Op("scheduled_trees.lay_out", _lay_out_reference, triton=_lay_out_triton)
_TOKENS = Op("scheduled_trees.node_tokens", _tokens_reference, triton=_tokens_triton)


def lay_out(
    rows: Tensor,
    ends: Tensor,
    lengths: Tensor,
    prompts: Tensor,
    kept: Tensor,
    indices: Tensor,
    positions: Tensor,
    width: int,
    into: Layout | None = None,
) -> Layout:
    """Lay out a step's trees, and move its positions from those of chains to those of trees.

    Args:
        rows: Integers `[B]`, the requests' rows in the host's state.
        ends: Integers `[B + 1]`: the rows of request b that have logits are `ends[b]` to
            `ends[b + 1] - 1`.
        lengths: Integers `[B]`, the number of tokens of each text at the end of the step, all
            columns counted.
        prompts: Integers `[M]`, the number of tokens of each prompt, by row of the host's state.
        kept: Int32 `[M, 1 + K]`, contiguous, the parents; see `kept_trees.keep_trees`. A
            step may schedule fewer columns than there are, which cuts the trees.
        indices: Integers `[R]`, the places of the rows that have logits among the step's tokens.
        positions: Integers `[T]`, changed in place: a node's is its root's and its depth. That of a
            column without a node becomes the root's.
        width: Greatest number of a request's rows.
        into: Memory for the layout, which is overwritten; by default new memory.

    Raises:
        ValueError: Shapes do not fit.
    """
    if ends.shape != (rows.shape[0] + 1,) or lengths.shape != rows.shape:
        raise ValueError(
            f"{rows.shape[0]} requests have ends {[*ends.shape]} and lengths {[*lengths.shape]}"
        )
    if not 1 <= width <= kept.shape[1] or not kept.is_contiguous():
        raise ValueError(f"width={width} must be 1 to {kept.shape[1]}, of contiguous trees")
    layout = into or Layout.empty(rows.shape[0], width, indices.shape[0], rows.device)
    if layout.parents.shape != (rows.shape[0], width) or layout[-1].shape != indices.shape:
        raise ValueError(
            f"the layout's memory is for trees {[*layout.parents.shape]} of {len(layout[-1])} rows,"
            f" not {[rows.shape[0], width]} of {len(indices)}"
        )
    _LAY_OUT.on(rows)(rows, ends, lengths, prompts, kept, indices, positions, layout)
    return layout


def node_tokens(
    inputs: Tensor, ends: Tensor, layout: Layout, parents: Tensor, before_roots: Tensor
) -> NodeTokens:
    """Read the tokens of a step's trees from its input.

    Args:
        inputs: Integers `[T]`, the input tokens of the step.
        ends: As in `lay_out`.
        layout: The step's layout.
        parents: Int32 `[B, N]`, the trees' parents: those of the layout, or of trees that were
            drafted since.
        before_roots: Integers `[B]`, the token before each root; -1 where it is not known. That of
            a partial prompt is not used.
    """
    return _TOKENS.on(inputs)(inputs, ends, layout, parents.contiguous(), before_roots)
