"""What vLLM's worker does besides serving requests."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from drafttree.vllm.drafting_worker import DraftingWorker


class Runner:
    """Notes what it is told."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def forget(self) -> None:
        self._calls.append("forget")


class StockWorker:
    """The calls of vLLM's worker that change the weights."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.model_runner = Runner(self.calls)

    def reload_weights(self) -> None:
        self.calls.append("new weights")

    def finish_weight_update(self) -> None:
        self.calls.append("new weights")


class Worker(DraftingWorker, StockWorker):
    """As the workers are made."""


@pytest.mark.parametrize("name", ["reload_weights", "finish_weight_update"])
def test_what_was_learned_from_old_weights_is_forgotten(name: str) -> None:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    assert hasattr(VllmWorker, name)
    worker = Worker()
    getattr(worker, name)()
    assert worker.calls == ["new weights", "forget"]
