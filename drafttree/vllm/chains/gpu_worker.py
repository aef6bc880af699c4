"""vLLM's CUDA worker with chains of draft tokens."""

from __future__ import annotations

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from drafttree.vllm.chains.worker import ChainWorker


class ChainGPUWorker(ChainWorker, Worker):
    """Serves on CUDA GPUs."""

    stock_runner = GPUModelRunner
