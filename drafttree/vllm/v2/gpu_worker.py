"""vLLM's CUDA worker with verification of draft trees on the V2 model runner."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from drafttree.vllm.attention.triton import TritonTreeBackend
from drafttree.vllm.v2.worker import TreeWorkerV2


class TreeGPUWorkerV2(TreeWorkerV2, Worker):
    """Serves on CUDA GPUs."""

    stock_runner = GPUModelRunner
    # `plugin` selects it when it makes the configuration.
    stock_backend = AttentionBackendEnum.TRITON_ATTN
    tree_backend = TritonTreeBackend

    def _maybe_activate_jit_monitor(self) -> None:
        """Compile what serves trees, before the engine warns of compilations while serving."""
        if self.vllm_config.kernel_config.enable_jit_warmup:
            self.compile_drafting()
        super()._maybe_activate_jit_monitor()
