"""Forwards that drafttree makes itself in SGLang, outside of batches, leave no slots behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

WIDTH = 6
SLOTS = torch.arange(20, 30)


class _Runner:
    """As much of a model runner as these forwards read."""

    page_size = 1
    model_config = SimpleNamespace(model_is_mrope=False)

    def __init__(self, error: Exception | None) -> None:
        self.table = torch.zeros(4, 32, dtype=torch.int32)
        self.req_to_token_pool = SimpleNamespace(req_to_token=self.table)
        self.kv_index_translator = SimpleNamespace(bind_own_plan=self._bind)
        self.rows: list[list[int]] = []
        self._error = error

    def _bind(self, batch: Any) -> None:
        batch.kv_loc_plan = batch.out_cache_loc

    def forward(self, batch: Any) -> Any:
        """Note the slots of the first row, at least as many as are written for it."""
        assert torch.equal(batch.kv_loc_plan, batch.out_cache_loc)
        self.rows.append(self.table[0].tolist())
        if self._error is not None:
            raise self._error
        logits = torch.zeros(WIDTH, 8)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))


@pytest.fixture(params=[None, RuntimeError("out of memory")], ids=["done", "failed"])
def runner(request: pytest.FixtureRequest) -> _Runner:
    return _Runner(request.param)


def called(runner: _Runner, function: Any, *given: Any) -> None:
    """Call a function, which fails if the runner does."""
    if runner._error is None:
        function(runner, *given)
        return
    with pytest.raises(type(runner._error)):
        function(runner, *given)


def test_priming(runner: _Runner) -> None:
    from drafttree.sglang.priming import child_logits

    called(runner, child_logits, 3, torch.tensor([4, 5], dtype=torch.int32), SLOTS, WIDTH)
    assert runner.rows[0][:WIDTH] == SLOTS[:WIDTH].tolist()
    assert not runner.table.any()


def test_times_of_verifications(runner: _Runner) -> None:
    from drafttree.sglang.forward import verification_seconds

    called(runner, verification_seconds, 2, 3, 5)
    assert runner.rows[0][:8] == [*range(1, 9)]
    assert not runner.table.any()


def test_older_versions_have_no_plans_of_slots() -> None:
    from drafttree.sglang.kv_plan import plan_kv_writes

    plan_kv_writes(SimpleNamespace(), None)
    plan_kv_writes(SimpleNamespace(kv_index_translator=SimpleNamespace()), None)
