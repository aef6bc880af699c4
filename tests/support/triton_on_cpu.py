"""vLLM's attention for CUDA, served on a CPU: its kernels run in Triton's interpreter.

On a CPU the engine does without Triton, so what writes its KV cache is stood in for.
"""

from __future__ import annotations

from typing import Any

import torch

VARIABLE = "TESTS_TRITON_ON_CPU"

ENVIRONMENT = {VARIABLE: "1", "TRITON_INTERPRET": "1"}

SERVED = "trees were served by Triton's interpreter"
"""In the log of an engine that did."""


def serve_so() -> None:
    """Let this process's engine serve trees as on CUDA."""
    from tree_kernels import kv_move, mask_rows, tree_attention
    from vllm.v1.attention.backends import triton_attn

    from drafttree.vllm.attention.triton import TritonTreeBackend, TritonTreeMetadataBuilder
    from drafttree.vllm.cpu_worker import TreeCPUWorker

    TreeCPUWorker.ours = TritonTreeBackend
    triton_attn.triton_reshape_and_cache_flash = _write
    for op in (kv_move._KV_MOVE, mask_rows._MASK_ROWS, tree_attention._TREE_ATTENTION):
        op.on_cpu = op.triton
    launch = mask_rows._mask_rows_triton

    def launch_and_say(*tensors: Any) -> None:
        launch(*tensors)
        print(SERVED)

    mask_rows._MASK_ROWS.on_cpu = launch_and_say
    build, places = TritonTreeMetadataBuilder.build, dict[int, tuple[int, int]]()

    def build_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        # Where a captured graph reads them, whatever the step.
        place = metadata.tree_starts.data_ptr(), metadata.masks.data_ptr()
        assert places.setdefault(id(self), place) == place
        return metadata

    TritonTreeMetadataBuilder.build = build_in_place


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: object,
) -> None:
    """What the engine's kernel does: rows of -1 are written nowhere."""
    size = key_cache.shape[1]
    slots = slots[: len(key)]
    there = slots >= 0
    block, offset = slots[there] // size, slots[there] % size
    key_cache[block, offset] = key[: len(slots)][there]
    value_cache[block, offset] = value[: len(slots)][there]
