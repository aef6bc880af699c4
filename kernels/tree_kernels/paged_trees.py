"""The trees of a step over a paged KV cache, as attention on a CPU takes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedTrees:
    """The T trees of a step of R requests and the KV blocks of the trees' requests.

    Attributes:
        starts: Int64 `[T]`, the row of each tree's root in the batch.
        tree_sizes: Int64 `[T]`, the number of nodes of each tree, including the root. The nodes of
            a tree are adjacent in the batch.
        lengths: Int64 `[T]`, the number of tokens of each context plus its tree.
        blocks: Int32 `[T, P]`, the KV blocks of each request in the order of its tokens.
        masks: Bool `[M, N, N]`, whether node i of each of the first M trees attends to node j. No
            tree has more than N nodes. The trees after the first M have one node.
        first_nodes: Int64 `[T]`, the first node of each tree that has a row in the batch, or the
            tree's size, but not for all trees: the keys and values of those before it are in the
            cache. `starts` is then where the root's row would be, and may be negative. None for the
            roots.
        requests: Int64 `[T]`, the places of the trees' requests in `step_lengths`. None if the step
            has no other requests.
        step_lengths: Int64 `[R]`, the number of tokens of each request of the step, of a tree up to
            its root. Only a `DecodeOrder` needs them.

    Raises:
        ValueError: A tensor has another type or shape or is not contiguous.
    """

    starts: Tensor
    tree_sizes: Tensor
    lengths: Tensor
    blocks: Tensor
    masks: Tensor
    first_nodes: Tensor | None = None
    requests: Tensor | None = None
    step_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        for name, dtype, dims in (
            ("starts", torch.int64, 1),
            ("tree_sizes", torch.int64, 1),
            ("lengths", torch.int64, 1),
            ("blocks", torch.int32, 2),
            ("masks", torch.bool, 3),
            ("first_nodes", torch.int64, 1),
            ("requests", torch.int64, 1),
        ):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None and name in ("first_nodes", "requests"):
                continue
            assert tensor is not None
            fits = len(tensor) == len(self.starts) or (
                name == "masks" and len(tensor) < len(self.starts)
            )
            if tensor.dtype != dtype or tensor.dim() != dims or not fits:
                raise ValueError(
                    f"{name} must be {dtype} with {dims} dimensions, one row for each tree"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
        lengths = self.step_lengths
        if (self.requests is None) != (lengths is None):
            raise ValueError("requests and step_lengths must be given together")
        if lengths is not None and not (lengths.dtype == torch.int64 and lengths.is_contiguous()):
            raise ValueError("step_lengths must be contiguous and torch.int64")


class TreePointers(ctypes.Structure):
    """Paged trees as the C++ kernel reads them; their tensors must outlive it."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("tree_sizes", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("blocks_stride", ctypes.c_int64),
        ("num_masks", ctypes.c_int64),
        ("masks", ctypes.c_void_p),
        ("max_tree_size", ctypes.c_int64),
        ("first_nodes", ctypes.c_void_p),
        ("requests", ctypes.c_void_p),
        ("num_requests", ctypes.c_int64),
        ("step_lengths", ctypes.c_void_p),
    )


def pointers_of(trees: PagedTrees, requests: Tensor, step_lengths: Tensor) -> TreePointers:
    """Pointers to the tensors of paged trees.

    Args:
        trees: The trees.
        requests: `PagedTrees.requests`, or the trees' own numbers.
        step_lengths: `PagedTrees.step_lengths`, or those of the trees.
    """
    return TreePointers(
        count=len(trees.starts),
        starts=trees.starts.data_ptr(),
        tree_sizes=trees.tree_sizes.data_ptr(),
        lengths=trees.lengths.data_ptr(),
        blocks=trees.blocks.data_ptr(),
        blocks_stride=trees.blocks.shape[1],
        num_masks=len(trees.masks),
        masks=trees.masks.data_ptr(),
        max_tree_size=trees.masks.shape[2],
        first_nodes=None if trees.first_nodes is None else trees.first_nodes.data_ptr(),
        requests=requests.data_ptr(),
        num_requests=len(step_lengths),
        step_lengths=step_lengths.data_ptr(),
    )
