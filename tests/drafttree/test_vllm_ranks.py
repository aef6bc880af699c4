"""What all tensor-parallel ranks of vLLM must know alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from drafttree.vllm.drafters import model_free


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_give_their_schedulers_the_same_proposals(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `external_launcher` each rank has a scheduler, and only the first one drafts."""
    group = SimpleNamespace(
        rank_in_group=rank, world_size=2, broadcast=lambda tensor: tensor.fill_(1)
    )
    monkeypatch.setattr(model_free, "get_tp_group", lambda: group)
    drafter = SimpleNamespace(shares_texts=True, allocate=lambda *sizes: None)
    method: Any = SimpleNamespace(
        parse=lambda options: SimpleNamespace(depth=4), drafter=lambda options, target: drafter
    )
    runner: Any = model_free.ModelFreeRunner.__new__(model_free.ModelFreeRunner)
    runner.device = torch.device("cpu")
    runner.max_num_reqs, runner.max_model_len = 2, 64
    monkeypatch.setattr(runner, "_target", lambda: None)
    runner._set_up_drafter(method, {})
    assert runner._drafter.shares_texts is True
