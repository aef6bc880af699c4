"""Records the steps of a request in SGLang's workers; see `drafttree.trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drafttree.sglang.state import Step
from drafttree.sglang.worker import TreeWorker
from drafttree.trace import StepTracer, column_sources
from drafttree.tree import Verified

if TYPE_CHECKING:
    from sglang.srt.managers.utils import GenerationBatchResult


class TracingWorker(TreeWorker):
    """Listed before a method's worker while its steps are recorded.

    It has the base class of those, as an object can only become one of a class of the same layout.

    Attributes:
        tracer: Receives the steps.
    """

    tracer: StepTracer

    def _prefill(self, *args: Any) -> GenerationBatchResult:
        self.tracer.prompt_read()
        return super()._prefill(*args)

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        self.tracer.enter("forward")
        result = super()._forward_prompt(batch)
        self.tracer.enter("rest")
        return result

    def _decode(self, *args: Any) -> GenerationBatchResult:
        self.tracer.begin()
        result = super()._decode(*args)
        self.tracer.enter("rest")
        return result

    def _draft(self, batch: Any) -> Step:
        self.tracer.enter("draft")
        step = super()._draft(batch)
        self.tracer.enter("rest")
        return step

    def _forward_verify(self, batch: Any) -> GenerationBatchResult:
        self.tracer.enter("forward")
        result = super()._forward_verify(batch)
        # What follows in `_decode` is verification, down to moving the KV.
        self.tracer.enter("verify")
        return result

    def _learn_outcome(self, step: Step, verified: Verified) -> None:
        bound, slots = step.bound, step.batch.req_pool_indices
        columns = forced = None
        width = step.trees.tokens.shape[1]
        if bound is not None and bound.columns is not None:
            columns = bound.columns[0].tolist()
            width = 1 + max(columns)
            forced = None if bound.forced is None else bound.forced[0].tolist()
        (proposed,) = self.drafter.sources(slots, width)
        self.tracer.verified(step.trees, verified, column_sources(proposed, columns, forced))
        self.tracer.enter("verify")
        super()._learn_outcome(step, verified)


def start_tracing(worker: Any) -> None:
    """Record the steps of a worker for draft trees from now on."""
    tracer = {"tracer": StepTracer(worker._device)}
    worker.__class__ = type(type(worker).__name__, (TracingWorker, type(worker)), tracer)


def stop_tracing(worker: Any) -> StepTracer:
    """Record no more; returns what was recorded since `start_tracing`."""
    tracer: StepTracer = worker.tracer
    tracer.enter(None)
    worker.__class__ = type(worker).__bases__[1]
    return tracer
