"""vLLM's CPU worker with verification of draft trees on the V2 model runner."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from drafttree.vllm.attention.cpu import CpuTreeBackend
from drafttree.vllm.v2.worker import TreeWorkerV2


class TreeCPUWorkerV2(TreeWorkerV2, CPUWorker):
    """Serves on CPUs with a build of vLLM that has Triton."""

    stock_runner = CPUModelRunner
    stock_backend = AttentionBackendEnum.CPU_ATTN
    tree_backend = CpuTreeBackend
