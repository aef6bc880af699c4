"""vLLM's CPU worker with verification of draft trees."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from drafttree.vllm.attention.cpu import CpuTreeBackend
from drafttree.vllm.worker import TreeWorker


class TreeCPUWorker(TreeWorker, CPUWorker):
    """Serves on CPUs."""

    stock_runner = CPUModelRunner
    # On a CPU the engine always chooses this backend.
    stock_backend = AttentionBackendEnum.CPU_ATTN
    tree_backend = CpuTreeBackend
