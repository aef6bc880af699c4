"""When vLLM's V1 model runners ask drafters with a model for the shape of the next trees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from drafttree.budget import TreeShape
from drafttree.tree import DraftTree
from drafttree.vllm.drafters import draft_model, hidden_state, in_step
from drafttree.vllm.drafters.draft_model import DraftModelRunner
from drafttree.vllm.drafters.hidden_state import HiddenStateRunner

PLAIN = TreeShape(0, 0, 0)
ONE_RANK = SimpleNamespace(world_size=1, rank_in_group=0)


@pytest.mark.parametrize("kind", [DraftModelRunner, HiddenStateRunner])
def test_nothing_is_planned_while_all_prompts_are_unread(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that reads prompts alone must not be taken for one that tries drafts."""
    for module in (draft_model, hidden_state, in_step):
        monkeypatch.setattr(module, "get_tp_group", lambda: ONE_RANK)
    planned: list[list[int]] = []

    def plan(slots: torch.Tensor, drafted: int, *unread: Any) -> TreeShape:
        planned.append(slots.tolist())
        return PLAIN

    runner = kind.__new__(kind)
    runner.device, runner.num_spec_tokens = torch.device("cpu"), 3
    runner.input_batch = SimpleNamespace(
        req_ids=["a", "b"],
        num_tokens_no_spec=np.array([9, 9]),
        num_computed_tokens_cpu=np.array([0, 8]),
    )
    runner.query_start_loc = SimpleNamespace(np=np.array([0, 8, 9]))
    runner._unread = runner._deferred = SimpleNamespace()
    runner._batch_slots = lambda: torch.tensor([4, 2])
    runner._drafter = SimpleNamespace(
        plan=plan, propose_without_model=lambda _, roots: DraftTree.of_roots(roots)
    )
    assert not runner._propose(np.array([-1, -1], np.int32)).drafted
    assert not planned
    assert not runner._propose(np.array([-1, 7], np.int32)).drafted
    assert planned == [[4, 2]]


def test_what_is_not_read_yet_of_a_prompt_is_not_to_be_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request has drafts of which one was accepted, the second reads a part of 90."""
    for module in (draft_model, in_step):
        monkeypatch.setattr(module, "get_tp_group", lambda: ONE_RANK)
    counted: list[list[tuple[int, int]]] = []

    def plan(slots: torch.Tensor, drafted: int, unread: Callable[[], int]) -> TreeShape:
        assert drafted == 2
        unread()
        return PLAIN

    runner: Any = DraftModelRunner.__new__(DraftModelRunner)
    runner.device, runner.num_spec_tokens = torch.device("cpu"), 3
    runner.input_batch = SimpleNamespace(
        req_ids=["a", "b", "c"],
        num_tokens_no_spec=np.array([43, 90, 31]),
        num_computed_tokens_cpu=np.array([40, 16, 0]),
    )
    runner.query_start_loc = SimpleNamespace(np=np.array([0, 4, 20, 50, 50]))
    runner._unread = SimpleNamespace(count=counted.append)
    runner._batch_slots = lambda: torch.tensor([0, 1, 2])
    runner._drafter = SimpleNamespace(
        plan=plan, propose_without_model=lambda _, roots: DraftTree.of_roots(roots)
    )
    runner._propose(np.array([7, -1, 7], np.int32))
    assert counted == [[(0, 42), (1, 32), (2, 30)]]
