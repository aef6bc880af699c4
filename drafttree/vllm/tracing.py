"""Records the steps of a request on vLLM's V1 model runner; see `drafttree.trace`."""

from __future__ import annotations

from typing import Any

from drafttree.trace import StepTracer, column_sources
from drafttree.tree import Verified
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.step import StepState


class TracingRunner:
    """Mixin listed before a model runner that verifies trees, while its steps are recorded.

    Attributes:
        tracer: Receives them.
    """

    tracer: StepTracer

    _drafter: Any
    _batch_slots: Any

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target; its logits are computed after `_model_forward`."""
        stock: Any = super()
        try:
            return stock.execute_model(*args, **kwargs)
        finally:
            self.tracer.enter("rest")

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.tracer.enter("forward")
        stock: Any = super()
        return stock._model_forward(*args, **kwargs)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        self.tracer.enter("verify")
        stock: Any = super()
        try:
            return stock._sample(*args, **kwargs)
        finally:
            self.tracer.enter("rest")

    def _step_verified(self, step: StepState, verified: Verified) -> None:
        stock: Any = super()
        stock._step_verified(step, verified)
        if not step.trees.counted.all():
            self.tracer.prompt_read()
            return
        trees = step.trees
        columns = None if trees.columns is None else trees.columns[0].tolist()
        width = step.drafts.tokens.shape[1] if columns is None else 1 + max(columns)
        (proposed,) = self._drafter.sources(self._batch_slots(), width)
        forced = None if trees.forced is None else trees.forced[0].tolist()
        self.tracer.verified(step.drafts, verified, column_sources(proposed, columns, forced))
        self.tracer.enter("verify")

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
        """Draft the next step's trees, with which that step begins."""
        self.tracer.begin("draft")
        stock: Any = super()
        try:
            return stock.propose_draft_token_ids(*args, **kwargs)
        finally:
            self.tracer.enter("rest")

    def take_draft_token_ids(self) -> Any:
        """Hand the trees to the scheduler."""
        self.tracer.enter("draft")
        stock: Any = super()
        try:
            return stock.take_draft_token_ids()
        finally:
            self.tracer.enter("rest")


def start_tracing(worker: Any) -> None:
    """Record the steps of a worker's model runner from now on.

    Raises:
        TypeError: The runner is not drafttree's V1 runner.
    """
    runner = worker.model_runner
    if not isinstance(runner, TreeModelRunner):
        raise TypeError(f"{type(runner).__name__} records no steps: use vLLM's V1 model runner")
    tracer = {"tracer": StepTracer(runner.device)}
    runner.__class__ = type(type(runner).__name__, (TracingRunner, type(runner)), tracer)


def stop_tracing(worker: Any) -> StepTracer:
    """Record no more; returns what was recorded since `start_tracing`."""
    runner = worker.model_runner
    tracer: StepTracer = runner.tracer
    tracer.enter(None)
    runner.__class__ = type(runner).__bases__[1]
    return tracer
