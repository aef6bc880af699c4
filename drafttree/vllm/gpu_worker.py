"""vLLM's worker for CUDA, verifying draft trees."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from drafttree.vllm.triton_attention import TritonTreeBackend
from drafttree.vllm.worker import TreeWorker


class TreeGPUWorker(TreeWorker, Worker):
    """Serves on CUDA GPUs."""

    stock_runner = GPUModelRunner
    # Asked for when the engine's configuration is made.
    backend = AttentionBackendEnum.TRITON_ATTN
    ours = TritonTreeBackend
