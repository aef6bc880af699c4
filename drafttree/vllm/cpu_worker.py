"""vLLM's CPU worker, verifying draft trees."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from drafttree.vllm.cpu_attention import CpuTreeBackend
from drafttree.vllm.worker import TreeWorker


class TreeCPUWorker(TreeWorker, CPUWorker):
    """Serves on CPUs."""

    stock_runner = CPUModelRunner
    # The engine picks it whatever is asked for.
    backend = AttentionBackendEnum.CPU_ATTN
    ours = CpuTreeBackend
