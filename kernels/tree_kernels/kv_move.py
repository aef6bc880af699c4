"""Moving the accepted path's rows of a paged KV cache to where they would lie without a tree.
The moves of one request overlap, so all its rows are read before any is written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tree_kernels._native import NativeFunction
from tree_kernels._triton import jit, next_power_of_2, path_pad, tl, use_triton

# Rows move as bits: any element type, NaN included, comes out as it went in.
_MOVE = {size: NativeFunction("kv_move.cpp", f"move_{size}", "pipppiii") for size in (1, 2, 4, 8)}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@jit
def _move_kernel(
    cache: tl.tensor,
    addresses: tl.tensor,
    slots: tl.tensor,
    path: tl.tensor,
    nodes: tl.tensor,
    length: tl.tensor,
    block_size: tl.tensor,
    head_dim: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    offset_stride: tl.tensor,
    dim_stride: tl.tensor,
    PATH_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
) -> None:
    """One program a request, head and cache, which alone touches these rows.

    cache: any one, for the type of its elements.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(addresses + tl.program_id(2)).to(cache.dtype)
    steps = tl.arange(0, PATH_PAD)
    dims = tl.arange(0, DIM_PAD)
    node = tl.load(path + request * length + steps, mask=steps < length, other=-1)
    valid = (node > 0) & (node != steps)
    come = tl.load(slots + request * nodes + node, mask=valid, other=0)
    go = tl.load(slots + request * nodes + steps, mask=valid, other=0)
    mask = valid[:, None] & (dims < head_dim)[None, :]
    columns = start + head * head_stride + dims.to(tl.int64)[None, :] * dim_stride
    read = (come // block_size) * block_stride + (come % block_size) * offset_stride
    write = (go // block_size) * block_stride + (go % block_size) * offset_stride
    rows = tl.load(columns + read[:, None], mask=mask)
    # The warps of a program do not run in step: without this one could store before another loads.
    tl.debug_barrier()
    tl.store(columns + write[:, None], rows, mask=mask)


def _move_triton(cache: Tensor, addresses: Tensor, slots: Tensor, path: Tensor) -> None:
    """addresses: int64 [L], those of all caches, on their device; cache: any one of them."""
    _, heads, block_size, head_dim = cache.shape
    requests, length = path.shape
    if path.numel() == 0 or cache.numel() == 0:
        return
    _move_kernel[(requests, heads, len(addresses))](
        cache.view(_BITS[cache.element_size()]),
        addresses,
        slots,
        path,
        slots.shape[1],
        length,
        block_size,
        head_dim,
        *cache.stride(),
        PATH_PAD=path_pad(length),
        DIM_PAD=next_power_of_2(head_dim),
    )


def _move_reference(cache: Tensor, slots: Tensor, path: Tensor) -> None:
    # Selecting by mask waits for the device; this path runs on the CPU, where nothing waits.
    request, place = torch.nonzero(_moves(path), as_tuple=True)
    come, go = slots[request, path[request, place].long()], slots[request, place]
    block_size = cache.shape[2]
    bits = cache.view(_BITS[cache.element_size()])
    rows = bits[come // block_size, :, come % block_size]
    bits[go // block_size, :, go % block_size] = rows


def _moves(path: Tensor) -> Tensor:
    """Which nodes of a path do not lie where they would without a tree, bool [B, D]."""
    return (path > 0) & (path != torch.arange(path.shape[1]))


class _Layout(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("heads", "block_size", "head_dim"),
            *("block_stride", "head_stride", "offset_stride", "dim_stride"),
        )
    )


def _kind(cache: Tensor) -> tuple[object, ...]:
    return cache.shape, cache.stride(), cache.dtype, cache.device


class KvMover:
    """Moves rows in all caches of a group of layers, which stay where they are.

    Args:
        caches: `[num_blocks, heads, block_size, head_dim]` each, of any element type and strides,
            but all the same.

    Raises:
        ValueError: there is none, or they differ.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        if len(set(map(_kind, caches))) != 1 or caches[0].dim() != 4:
            shapes = sorted({str([*cache.shape]) for cache in caches})
            raise ValueError(f"caches must be alike and have four dimensions, not {shapes}")
        self._caches = list(caches)
        cache = self._caches[0]
        addresses = [cache.data_ptr() for cache in self._caches]
        self._addresses = torch.tensor(addresses, device=cache.device)
        self._layout = _Layout(*cache.shape[1:], *cache.stride())

    def __call__(self, slots: Tensor, path: Tensor) -> None:
        """Move the rows of accepted nodes up to right behind the root's.

        slots: int64 [B, N], where each node's row lies: block * block_size + offset.
        path: int32 [B, D], the root and the nodes accepted below it, -1 for none. The row of node
        path[b, d] goes to where node d's lies, all heads, as if all reads came first. No other
        request may touch a request's slots. Raises ValueError on shapes that do not fit.
        """
        if slots.dim() != 2 or path.dim() != 2 or len(slots) != len(path):
            raise ValueError(f"slots {[*slots.shape]} and path {[*path.shape]}: not [B, N], [B, D]")
        slots, path = slots.contiguous(), path.int().contiguous()
        cache = self._caches[0]
        if use_triton(cache):
            _move_triton(cache, self._addresses, slots, path)
        elif (move := _MOVE[cache.element_size()].on(cache)) is not None:
            move(
                *(self._addresses.data_ptr(), len(self._caches), ctypes.addressof(self._layout)),
                *(slots.data_ptr(), path.data_ptr(), *slots.shape, path.shape[1]),
            )
        else:
            for cache in self._caches:
                _move_reference(cache, slots, path)


def movers_of(caches: Iterable[Tensor]) -> list[KvMover]:
    """As few movers as caches of a group of layers take, keys and values; see `KvMover`."""
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for cache in caches:
        alike.setdefault(_kind(cache), []).append(cache)
    return [KvMover(each) for each in alike.values()]
