"""Mixin that gives vLLM's workers a V1 model runner that verifies draft trees."""

from __future__ import annotations

from typing import Any

from drafttree.method import Method, load
from drafttree.vllm import patches
from drafttree.vllm.drafting_worker import DraftingWorker
from drafttree.vllm.runner import TreeModelRunner


class TreeWorker(DraftingWorker):
    """The worker with the V1 model runner."""

    def init_device(self) -> None:
        """Build the stock runner, and turn it into one that verifies trees."""
        self._check_runner(uses_v2=False)
        stock: Any = super()
        with patches.without_logits_processors(self.model_config) as processors:
            stock.init_device()
        method, options = self._requested()
        ours: type[TreeModelRunner[Any]] = load(self._runner_of(method))
        runner = patches.adopt(self.model_runner, self.stock_runner, ours)
        runner.set_up(method, options, processors)

    def _runner_of(self, method: Method[Any]) -> str:
        """The path of the model runner's class."""
        return method.kind.vllm.runs
