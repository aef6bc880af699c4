"""Mixin that gives vLLM's workers a V1 model runner that verifies chains."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drafttree.method import Method
from drafttree.vllm.worker import TreeWorker


class ChainWorker(TreeWorker):
    """The worker with the V1 model runner and the engine's own attention."""

    def _attention_of_drafts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _runner_of(self, method: Method[Any]) -> str:
        path = method.kind.vllm.runs_chains
        assert path is not None
        return path
