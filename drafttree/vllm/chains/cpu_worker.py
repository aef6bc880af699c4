"""vLLM's CPU worker with chains of draft tokens."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from drafttree.vllm import patches
from drafttree.vllm.chains.worker import ChainWorker


class ChainCPUWorker(ChainWorker, CPUWorker):
    """Serves on CPUs."""

    stock_runner = CPUModelRunner

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model, with layers that can verify any number of drafts."""
        if self.model_config.is_hybrid:
            patches.keep_convolutions()
        super().load_model(load_dummy_weights=load_dummy_weights)
