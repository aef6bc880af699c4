"""The fake GPU finds faults that are planted in the steps of RSD and Lyanna on vLLM's V1 runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu.planted import Fault, nothing
from fake_gpu.tensors import DeviceMismatchError, Gpu, HostWaitError

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fake_gpu.vllm_v1 import Asked, Decoded, decode
from fake_gpu.vllm_v1_cases import GREEDY, HOSTS, MAIN, WEIGHTS, prompt

from drafttree.vllm.attention.triton import TritonTreeMetadataBuilder
from drafttree.vllm.drafters.draft_model import DraftModelRunner
from drafttree.vllm.drafters.hidden_state import HiddenStateRunner
from drafttree.vllm.drafters.in_step import InStepRunner, InStepState
from drafttree.vllm.drafters.level_forwards import LevelForwards

RSD, LYANNA = MAIN


def served(name: str, gpu: Gpu | None, tokens: int) -> Decoded:
    host, options = HOSTS[name]
    requests = {
        "one": Asked(prompt(0, 4), tokens, GREEDY),
        "other": Asked(prompt(1, 6), tokens + 1, GREEDY),
    }
    return decode(host, options, requests, WEIGHTS, gpu)


def written_through_a_mask(self: Any, step: InStepState, tokens: torch.Tensor) -> None:
    there = tokens >= 0
    rows = step.rows[:, : tokens.shape[1]]
    step.input_ids[rows[there]] = tokens[there]


def level_written_through_a_mask(self: Any, tokens: torch.Tensor, places: torch.Tensor) -> None:
    there = tokens > 0
    self._rows.input_ids[places[there]] = tokens[there]


def sampled_on_the_host(self: Any, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.bool)


def depth_read_on_the_host(self: Any, step: InStepState) -> int:
    return int(step.drafts.tree_size.max()) - 1


def as_wide_as_the_widest(self: Any, roots: Any) -> Any:
    trees = STOCK_PROPOSAL(self, roots)
    return replace(trees, tokens=trees.tokens[:, : int(trees.tree_size.max())])


def prompts_on_the_host(self: Any, step: Any, verified: Any) -> torch.Tensor:
    given = torch.zeros(len(step.ends), 1, dtype=torch.int32)
    return torch.where(given >= 0, given, verified.emitted)


STOCK_PROPOSAL = HiddenStateRunner._propose

REFUSED = {
    "rsd: tokens written through a mask": Fault(
        RSD, LevelForwards, "_write", level_written_through_a_mask, HostWaitError
    ),
    "rsd: flags on the host": Fault(
        RSD, DraftModelRunner, "_sampled", sampled_on_the_host, DeviceMismatchError
    ),
    "lyanna: tokens written through a mask": Fault(
        LYANNA, InStepRunner, "_write_tokens", written_through_a_mask, HostWaitError
    ),
    "lyanna: a depth read on the host": Fault(
        LYANNA, HiddenStateRunner, "_max_depth", depth_read_on_the_host, HostWaitError
    ),
    "lyanna: sizes read on the host": Fault(
        LYANNA, HiddenStateRunner, "_propose", as_wide_as_the_widest, HostWaitError
    ),
    "lyanna: tokens of prompts on the host": Fault(
        LYANNA, HiddenStateRunner, "_following", prompts_on_the_host, DeviceMismatchError
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_waits_and_host_tensors_are_refused(
    what: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    REFUSED[what].check_refused(lambda method: served(method, gpu, 4), monkeypatch)


def shifted_rows(self: Any, tokens: torch.Tensor, places: torch.Tensor) -> None:
    STOCK_WRITE(self, tokens.roll(1), places)


def without_trees(self: Any, common: Any, masks: Any) -> Any:
    return STOCK_PART(self, common, None)


STOCK_WRITE = LevelForwards._write
STOCK_PART = TritonTreeMetadataBuilder.build_part

OTHERWISE = {
    "rsd: levels that are read as texts": Fault(
        RSD, TritonTreeMetadataBuilder, "build_part", without_trees
    ),
    "lyanna: masks that attention does not see": Fault(
        LYANNA, TritonTreeMetadataBuilder, "masks_changed", nothing
    ),
    "rsd: tokens in other rows": Fault(RSD, LevelForwards, "_write", shifted_rows),
    "lyanna: accepted rows that the layer has not read": Fault(
        LYANNA, HiddenStateRunner, "_read_accepted", nothing
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, id=what, marks=[] if row == 0 else pytest.mark.full)
        for row, what in enumerate(OTHERWISE)
    ],
)
def test_other_faults_show_in_what_is_drafted(
    what: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = OTHERWISE[what]
    tokens = 4 if fault.method == RSD else 9
    expected = served(fault.method, None, tokens)
    fault.plant(monkeypatch)
    try:
        found = served(fault.method, gpu, tokens)
    except AssertionError:  # what the cache holds is not what the texts say
        return
    assert (found.texts, found.trees) != (expected.texts, expected.trees)
