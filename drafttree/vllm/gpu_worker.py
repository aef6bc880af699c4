"""vLLM's CUDA worker with verification of draft trees."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from drafttree.vllm.attention.triton import TritonTreeBackend
from drafttree.vllm.worker import TreeWorker


class TreeGPUWorker(TreeWorker, Worker):
    """Serves on CUDA GPUs."""

    stock_runner = GPUModelRunner
    # `plugin` selects it when it makes the configuration.
    stock_backend = AttentionBackendEnum.TRITON_ATTN
    tree_backend = TritonTreeBackend
