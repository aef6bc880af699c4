"""Mixin that gives vLLM's workers a V2 model runner that verifies draft trees."""

from __future__ import annotations

from typing import Any

from drafttree.method import load
from drafttree.vllm import patches
from drafttree.vllm.drafting_worker import DraftingWorker
from drafttree.vllm.v2.runner import TreeRunnerV2
from drafttree.vllm.v2.warm_up import serve_dummy_requests


class TreeWorkerV2(DraftingWorker):
    """The worker with the V2 model runner."""

    def init_device(self) -> None:
        """Build the stock runner, and turn it into one that verifies trees."""
        self._check_runner(uses_v2=True)
        stock: Any = super()
        stock.init_device()
        method, options = self._requested()
        path = method.kind.vllm.runs_v2
        assert path is not None
        ours: type[TreeRunnerV2] = load(path)
        patches.adopt(self.model_runner, self.stock_runner, ours).set_up(method, options)

    def compile_drafting(self) -> bool:
        """Serve dummy requests with trees, from which the drafter learns nothing.

        Returns:
            Whether requests were served.
        """
        runner = self.model_runner
        runner.warmed_up()
        with runner.preserved():
            return serve_dummy_requests(self, runner.draft_sizes)
