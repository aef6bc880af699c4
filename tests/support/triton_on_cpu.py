"""Lets vLLM use the attention backend for CUDA on a CPU, with kernels in Triton's interpreter.

On a CPU the engine has no Triton kernels, so the one that writes the KV cache is replaced.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from typing import Any

import torch
import v2_on_cpu

VARIABLE = "TESTS_TRITON_ON_CPU"

ENVIRONMENT = {VARIABLE: "1", "TRITON_INTERPRET": "1"}

SERVED = "trees were served by Triton's interpreter"
"""Line in the log of an engine that did."""


def enable() -> None:
    """Let this process's engine verify trees as on CUDA."""
    from tree_kernels import kv_move, mask_rows, tree_attention
    from vllm.v1.attention.backends import triton_attn

    from drafttree.vllm.attention.triton import TritonTreeBackend, TritonTreeMetadataBuilder
    from drafttree.vllm.cpu_worker import TreeCPUWorker

    TreeCPUWorker.tree_backend = TritonTreeBackend
    if os.environ.get(v2_on_cpu.VARIABLE):
        from drafttree.vllm.v2.cpu_worker import TreeCPUWorkerV2

        TreeCPUWorkerV2.tree_backend = TritonTreeBackend
    triton_attn.triton_reshape_and_cache_flash = _write
    for op in (kv_move._KV_MOVE, mask_rows._MASK_ROWS, tree_attention._TREE_ATTENTION):
        op.on_cpu = op.triton
    launch = mask_rows._mask_rows_triton

    def launch_and_log(*tensors: Any) -> None:
        launch(*tensors)
        print(SERVED)

    mask_rows._MASK_ROWS.on_cpu = launch_and_log
    build, places = TritonTreeMetadataBuilder.build, dict[int, tuple[int, int]]()

    def build_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        # A captured graph reads these buffers at the same addresses in every step.
        place = metadata.tree_starts.data_ptr(), metadata.masks.data_ptr()
        assert places.setdefault(id(self), place) == place
        return metadata

    TritonTreeMetadataBuilder.build = build_in_place


def use_for_all_operations() -> None:
    """Let all operations of this process launch the kernels that a GPU would run."""
    import tree_kernels
    from tree_kernels._dispatch import Op

    for module in pkgutil.iter_modules(tree_kernels.__path__):
        for op in vars(importlib.import_module(f"tree_kernels.{module.name}")).values():
            if isinstance(op, Op) and op.triton is not None:
                op.on_cpu = op.triton


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: object,
) -> None:
    """Write keys and values as the engine's kernel does; rows with slot -1 are not written."""
    size = key_cache.shape[1]
    slots = slots[: len(key)]
    there = slots >= 0
    block, offset = slots[there] // size, slots[there] % size
    key_cache[block, offset] = key[: len(slots)][there]
    value_cache[block, offset] = value[: len(slots)][there]
