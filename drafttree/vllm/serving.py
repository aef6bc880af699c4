"""How vLLM serves a method: on which device, with which of its model runners, trees or chains."""

from __future__ import annotations

from typing import NamedTuple

from drafttree.chains import Chains

WORKERS = {
    "cpu": "drafttree.vllm.cpu_worker.TreeCPUWorker",
    "cuda": "drafttree.vllm.gpu_worker.TreeGPUWorker",
}
"""Worker classes by type of device."""

WORKERS_V2 = {
    "cpu": "drafttree.vllm.v2.cpu_worker.TreeCPUWorkerV2",
    "cuda": "drafttree.vllm.v2.gpu_worker.TreeGPUWorkerV2",
}
"""Worker classes for the V2 model runner by type of device."""

CHAIN_WORKERS = {
    "cpu": "drafttree.vllm.chains.cpu_worker.ChainCPUWorker",
    "cuda": "drafttree.vllm.chains.gpu_worker.ChainGPUWorker",
}
"""Worker classes for chains of draft tokens by type of device."""


class Serving(NamedTuple):
    """How an engine is going to serve a method.

    Attributes:
        device: Type of the device.
        uses_v2: Whether it runs vLLM's V2 model runner.
        chains: The chains that are drafted in place of trees; None for trees.
    """

    device: str
    uses_v2: bool
    chains: Chains | None = None

    @property
    def worker(self) -> str:
        """The path of the worker class."""
        if self.chains is not None:
            return CHAIN_WORKERS[self.device]
        return (WORKERS_V2 if self.uses_v2 else WORKERS)[self.device]
