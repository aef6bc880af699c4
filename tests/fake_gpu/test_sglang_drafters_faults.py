"""The fake GPU finds faults that are planted in SGLang's steps of RSD and Lyanna."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu.planted import Fault, nothing
from fake_gpu.tensors import DeviceMismatchError, Gpu, HostWaitError

pytest.importorskip("sglang", reason="SGLang is not installed here")

from fake_gpu.sglang_cases import GREEDY, WEIGHTS, prompt
from fake_gpu.sglang_hosts import DRAFT_MODEL, HIDDEN_STATES
from fake_gpu.sglang_steps import Asked, Decoded, decode

from drafttree.sglang.drafters import draft_model, hidden_state
from drafttree.sglang.drafters.draft_layer import DraftLayer
from drafttree.sglang.drafters.draft_model import DraftModelWorker
from drafttree.sglang.drafters.hidden_state import HiddenStateWorker
from drafttree.sglang.layer_cache import LayerCache, LayerRows

RSD, LYANNA = "rsd", "lyanna"
HOSTS: dict[str, tuple[Any, dict[str, Any]]] = {
    RSD: (DRAFT_MODEL, {"tree": "beam:2x2"}),
    LYANNA: (HIDDEN_STATES, {"steps": 3, "width": 2, "nodes": 5, "resample": False}),
}


def served(name: str, gpu: Gpu | None) -> Decoded:
    host, options = HOSTS[name]
    requests = {"one": Asked(prompt(0, 4), 8, GREEDY), "other": Asked(prompt(1, 6), 9, GREEDY)}
    return decode(options, requests, WEIGHTS, gpu, host=host, overlap=name == LYANNA)


def seeds_on_the_host(self: Any, batch: Any) -> torch.Tensor:
    return torch.zeros(len(batch.reqs), dtype=torch.int64)


def as_drafted(trees: Any, num_draft_tokens: int) -> Any:
    """Keep the trees as they are, though the engine's attention takes them in one size."""
    return trees


def accepted_rows_alone(self: Any, step: Any, hidden: torch.Tensor, verified: Any) -> None:
    hidden[:, : verified.path.shape[1]][verified.path >= 0]


def one_by_one(self: Any, q: Any, rows: Any, lengths: Any, table: Any) -> Any:
    return self._attend_one_by_one(q, rows, lengths, table)


def outputs_on_the_host(
    self: Any, rows: LayerRows, slots: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor]:
    return (torch.zeros(len(slots), 3, 64),)


def read_on_the_host(batch: Any, sampled: torch.Tensor) -> torch.Tensor:
    return torch.tensor(sampled.tolist())


REFUSED = {
    "rsd: seeds on the host": Fault(
        RSD, DraftModelWorker, "_seeds_of", seeds_on_the_host, DeviceMismatchError
    ),
    "rsd: trees of several sizes": Fault(
        RSD, draft_model, "whole_trees", as_drafted, AssertionError
    ),
    "lyanna: accepted rows chosen by a mask": Fault(
        LYANNA, HiddenStateWorker, "_read_accepted", accepted_rows_alone, HostWaitError
    ),
    "lyanna: attention by request": Fault(LYANNA, LayerCache, "attend", one_by_one, HostWaitError),
    "lyanna: states on the host": Fault(
        LYANNA, DraftLayer, "unroll", outputs_on_the_host, DeviceMismatchError
    ),
    "lyanna: tokens after prompts read": Fault(
        LYANNA, hidden_state, "_after_prompts", read_on_the_host, HostWaitError
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_waits_and_host_tensors_are_refused(
    what: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    REFUSED[what].check_refused(lambda method: served(method, gpu), monkeypatch)


def positions_shifted(self: LayerRows, lengths: torch.Tensor) -> torch.Tensor:
    return (lengths[self.requests] - 2 - self.after).clamp(min=0)


OTHERWISE = {
    "lyanna: rows in other slots": Fault(LYANNA, LayerRows, "positions", positions_shifted),
    "lyanna: accepted rows that the layer has not read": Fault(
        LYANNA, HiddenStateWorker, "_read_accepted", nothing
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("what", OTHERWISE)
def test_other_faults_show_in_what_is_drafted(
    what: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = OTHERWISE[what]
    expected = served(fault.method, None)
    fault.plant(monkeypatch)
    assert served(fault.method, gpu).trees != expected.trees
