"""When vLLM's V1 model runners ask drafters with a model for the shape of the next trees."""

from __future__ import annotations

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

    def plan(slots: torch.Tensor, *unread: Any) -> TreeShape:
        planned.append(slots.tolist())
        return PLAIN

    runner = kind.__new__(kind)
    runner.device, runner.num_spec_tokens = torch.device("cpu"), 3
    runner.input_batch = SimpleNamespace(req_ids=["a", "b"], num_tokens_no_spec=np.array([9, 9]))
    runner._unread = runner._deferred = SimpleNamespace()
    runner._batch_slots = lambda: torch.tensor([4, 2])
    runner._drafter = SimpleNamespace(
        plan=plan, propose_without_model=lambda _, roots: DraftTree.of_roots(roots)
    )
    assert not runner._propose(np.array([-1, -1], np.int32)).drafted
    assert not planned
    assert not runner._propose(np.array([-1, 7], np.int32)).drafted
    assert planned == [[4, 2]]
