"""KV compaction: the rows of the accepted nodes move to the slots right after the root's.

They would be there without a tree. The moves of a request overlap, so all its rows are read before
any is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels._triton import jit, next_power_of_2, path_pad, tl

# Rows are copied as integers, so that all element types and NaN are copied bit by bit.
_MOVE = {size: CppFunction("kv_move.cpp", f"move_{size}", "pipppiii") for size in (1, 2, 4, 8)}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit
def _move_kernel(
    cache: tl.tensor,
    addresses: tl.tensor,
    slots: tl.tensor,
    places: tl.tensor,
    path: tl.tensor,
    width: tl.tensor,
    length: tl.tensor,
    block_size: tl.tensor,
    head_dim: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    offset_stride: tl.tensor,
    dim_stride: tl.tensor,
    BY_PLACE: tl.constexpr,
    PATH_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    """Move rows; one program per request, head and cache.

    `addresses` are the addresses of all caches; `cache` is one of them and gives the type.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(addresses + tl.program_id(2)).to(cache.dtype)
    steps = tl.arange(0, PATH_PAD)
    dims = tl.arange(0, DIM_PAD)
    node = tl.load(path + request * length + steps, mask=steps < length, other=-1)
    valid = (node > 0) & (node != steps)
    old = request * width + node
    new = request * width + steps
    if BY_PLACE:
        old = tl.load(places + old, mask=valid, other=0)
        new = tl.load(places + new, mask=valid, other=0)
    old_slots = tl.load(slots + old, mask=valid, other=0)
    new_slots = tl.load(slots + new, mask=valid, other=0)
    mask = valid[:, None] & (dims < head_dim)[None, :]
    columns = start + head * head_stride + dims.to(tl.int64)[None, :] * dim_stride
    read = (old_slots // block_size) * block_stride + (old_slots % block_size) * offset_stride
    write = (new_slots // block_size) * block_stride + (new_slots % block_size) * offset_stride
    rows = tl.load(columns + read[:, None], mask=mask)
    # Without a barrier one warp of the program could store before another has loaded.
    tl.debug_barrier()
    tl.store(columns + write[:, None], rows, mask=mask)


def _move_triton(mover: KvMover, slots: Tensor, path: Tensor, places: Tensor | None = None) -> None:
    cache, addresses = mover.caches[0], mover.addresses
    _, heads, block_size, head_dim = cache.shape
    requests, length = path.shape
    if path.numel() == 0 or cache.numel() == 0:
        return
    _move_kernel[(requests, heads, addresses.shape[0])](
        cache.view(_BITS[cache.element_size()]),
        addresses,
        slots,
        slots if places is None else places,
        path,
        (slots if places is None else places).shape[1],
        length,
        block_size,
        head_dim,
        *cache.stride(),
        BY_PLACE=places is not None,
        PATH_PAD=path_pad(length),
        DIM_PAD=next_power_of_2(head_dim),
        num_warps=4 if length <= 16 else 8,
    )


def _move_reference(
    mover: KvMover, slots: Tensor, path: Tensor, places: Tensor | None = None
) -> None:
    slots = slots if places is None else slots[places]
    # On a GPU, nonzero waits for the device; decode steps there use the Triton kernel.
    request, place = torch.nonzero(_moves(path), as_tuple=True)
    old, new = slots[request, path[request, place].long()], slots[request, place]
    for cache in mover.caches:
        bits = cache.view(_BITS[cache.element_size()])
        rows = bits[*_place(cache, old)]
        bits[*_place(cache, new)] = rows


def _place(cache: Tensor, slots: Tensor) -> tuple[Tensor | slice, ...]:
    """The index of slots in a cache."""
    tokens = 1 if cache.dim() == 4 else cache.shape[3]
    block_size = cache.shape[2] * tokens
    block, offset = slots // block_size, slots % block_size
    if cache.dim() == 4:
        return block, slice(None), offset
    return block, slice(None), offset // tokens, offset % tokens


def _moves(path: Tensor) -> Tensor:
    """Whether the row of each node of a path has to move, bool `[B, D]`."""
    return (path > 0) & (path != torch.arange(path.shape[1], device=path.device))


def _move_cpp(mover: KvMover, slots: Tensor, path: Tensor, places: Tensor | None = None) -> None:
    slots = slots if places is None else slots[places]
    _MOVE[mover.caches[0].element_size()].call(
        *(mover.addresses.data_ptr(), len(mover.caches), ctypes.addressof(mover.layout)),
        *(slots.data_ptr(), path.data_ptr(), *slots.shape, path.shape[1]),
    )


_KV_MOVE = Op(
    "kv_move.KvMover", _move_reference, triton=_move_triton, cpp=_move_cpp, needs=_MOVE[1]
)


class _Layout(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("heads", "block_size", "tokens", "parts", "dims"),
            *("block_stride", "head_stride", "group_stride"),
            *("token_stride", "part_stride", "dim_stride"),
        )
    )


def _kind(cache: Tensor) -> tuple[object, ...]:
    return cache.shape, cache.stride(), cache.dtype, cache.device


class KvMover:
    """Moves rows in all KV caches of a group of layers, which must not be reallocated afterwards.

    Args:
        caches: At least one tensor `[num_blocks, heads, block_size, head_dim]`, all of the same
            shape, strides, element type and device. On a CPU also `[num_blocks, heads, groups,
            tokens, parts, dims]`, if the tokens of a block, and the elements of a row, cannot be
            one dimension of a view.

    Raises:
        ValueError: There is no cache, or the caches differ.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        if len(set(map(_kind, caches))) != 1 or caches[0].dim() not in (4, 6):
            shapes = sorted({str([*cache.shape]) for cache in caches})
            raise ValueError(
                f"caches must have the same layout and four or six dimensions, not {shapes}"
            )
        self.caches = list(caches)
        cache = self.caches[0]
        addresses = [cache.data_ptr() for cache in self.caches]
        self.addresses = torch.tensor(addresses, device=cache.device)
        one = cache if cache.dim() == 6 else cache.unsqueeze(3).unsqueeze(4)
        _, heads, groups, tokens, parts, dims = one.shape
        self.layout = _Layout(heads, groups * tokens, tokens, parts, dims, *one.stride())

    def __call__(self, slots: Tensor, path: Tensor, places: Tensor | None = None) -> None:
        """Move the row of node `path[b, d]` to the slot of node d, for all heads.

        Args:
            slots: Int64 `[B, N]`, the slot of each node's row: block * block_size + offset; or
                `[T]` if there are `places`. The slots of different requests must differ.
            path: Int32 `[B, D]`, the accepted nodes, the root first; padded with -1.
            places: Int64 `[B, N]`, the place of each node in `slots`.

        Raises:
            ValueError: Shapes do not fit.
        """
        of_nodes = slots if places is None else places
        if of_nodes.dim() != 2 or path.dim() != 2 or of_nodes.shape[0] != path.shape[0]:
            name = "slots" if places is None else "places"
            raise ValueError(
                f"{name} {[*of_nodes.shape]} and path {[*path.shape]} must be [B, N] and [B, D]"
            )
        slots, path = slots.contiguous(), path.int().contiguous()
        _KV_MOVE.on(self.caches[0])(self, slots, path, places)


def movers_of(caches: Iterable[Tensor]) -> list[KvMover]:
    """One `KvMover` for each set of caches with the same layout; keys and values may share one."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for cache in caches:
        alike.setdefault(_kind(cache), []).append(cache)
    return [KvMover(each) for each in alike.values()]
