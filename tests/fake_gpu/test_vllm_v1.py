"""Whole steps of vLLM's V1 model runner on the fake GPU give what they give on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu.comparison import assert_within_budget
from fake_gpu.tensors import Gpu

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fake_gpu.vllm_v1 import Asked, Decoded, decode
from fake_gpu.vllm_v1_cases import GREEDY, WEIGHTS, asked, both, prompt
from fake_gpu.vllm_v1_hosts import ModelFreeHost

from drafttree.tree import DraftTree, Verified
from drafttree.vllm import sampling

DRAFTERS: dict[str, dict[str, Any]] = {
    "static": {"tree": "branch:4-2-1"},
    "dynamic": {"nodes": 7},
}
# The interpreter takes seconds for each dynamic tree.
SLOW = [pytest.param("static"), pytest.param("dynamic", marks=pytest.mark.full)]
# One arrives while others decode, with a prompt that is read in parts.
SIZES = ((9, 20, 0), (6, 18, 0), (13, 6, 8))


def compared(drafter: str, *parameters: dict[str, Any], gpu: Gpu, waits: bool = False) -> Decoded:
    """Decode three requests on the CPU and on the fake GPU, and compare."""
    return both(ModelFreeHost, DRAFTERS[drafter], asked(SIZES, parameters), gpu, waits=waits)


@pytest.mark.parametrize("drafter", SLOW)
def test_greedy_requests(gpu: Gpu, drafter: str) -> None:
    found = compared(drafter, GREEDY, GREEDY, GREEDY, gpu=gpu)
    for record in found.steps:
        assert {wait.what for wait in record.waits} <= {"an event"}
        assert len(record.waits) <= 1


def test_requests_that_sample_from_a_softmax(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "draws_ahead", lambda logits: True)
    warm = {"temperature": 0.7}
    compared("static", warm, GREEDY, warm, gpu=gpu)


def test_requests_with_top_p_penalties_and_seeds(gpu: Gpu) -> None:
    nucleus = {"temperature": 0.8, "top_p": 0.6, "seed": 3}
    penalised = {"temperature": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.1, "seed": 7}
    found = compared("static", nucleus, penalised, GREEDY, gpu=gpu, waits=True)
    # Their tokens are needed on the host before the next level is sampled.
    where = {wait.where.partition(":")[0] for each in found.steps for wait in each.waits}
    files = "vllm/sampling.py", "verify.py", "transfer.py"
    assert where <= {f"drafttree/{file}" for file in files}


def test_top_p_alone_waits_for_nothing(gpu: Gpu) -> None:
    # So cold that the noise, which differs, does not matter.
    cold = {"temperature": 0.01, "top_p": 0.9}
    compared("static", cold, GREEDY, cold, gpu=gpu)


@pytest.mark.usefixtures("gpu")
def test_steps_that_read_prompts_are_told_to_the_drafter() -> None:
    """Also the last part of a prompt, whose request was in the step before and gets a token."""
    told: list[tuple[bool, bool, int]] = []

    class Host(ModelFreeHost):
        def set_up_host(self, options: dict[str, Any]) -> None:
            super().set_up_host(options)
            on_verified = self._drafter.on_verified

            def note(slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
                unread = [
                    each.num_computed_tokens < each.num_prompt_tokens
                    for each in self.requests.values()
                ]
                emitted = int((verified.emitted >= 0).any(1).sum())
                told.append((verified.reads_prompts, any(unread), emitted - len(unread)))
                on_verified(slots, trees, verified)

            self._drafter.on_verified = note  # type: ignore[method-assign]

    requests = asked(SIZES, [GREEDY] * len(SIZES))
    found = decode(Host, DRAFTERS["static"], requests, WEIGHTS, None)
    assert found.mixed > 0
    assert (True, True, 0) in told
    assert (False, False, 0) in told
    assert all(reads == unread for reads, unread, _ in told)


BUDGETS = {"static": (10, 16, 2, 1), "dynamic": (16, 15, 2, 1)}
"""Most kernels, operations of PyTorch, copies in and copies out of a greedy step with drafts."""


@pytest.mark.parametrize("drafter", SLOW)
def test_a_drafted_step_stays_within_its_budget(gpu: Gpu, drafter: str) -> None:
    requests = {"one": Asked(prompt(0, 9), 30), "other": Asked(prompt(1, 6), 30)}
    requests = {name: replace(each, parameters=GREEDY) for name, each in requests.items()}
    found = decode(ModelFreeHost, DRAFTERS[drafter], requests, WEIGHTS, gpu, chunk=16)
    steps = [each for each, trees in zip(found.steps, found.trees, strict=False) if len(trees) == 2]
    assert len(steps) > 1
    for step in steps:
        assert_within_budget(step, BUDGETS[drafter])
        assert {wait.what for wait in step.waits} <= {"an event"}
        assert len(step.waits) <= 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rows", [3, 1000])
def test_nans_are_counted_in_the_logits_of_roots(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the logits of a step are computed in several parts too."""
    checked = []

    class Host(ModelFreeHost):
        @property
        def _max_logits_rows(self) -> int:
            return rows

        def _verify(self, step: Any, logits: Any) -> Any:
            verified = super()._verify(step, logits)
            with_logits = step.trees.rows
            step.hidden[with_logits] = torch.nan
            for request, start in enumerate(step.trees.starts.tolist()):
                step.hidden[with_logits[start]] = 0
                step.hidden[with_logits[start], :request] = torch.nan
            logits.first.copy_(step.hidden[with_logits[: len(logits.first)]])
            return verified

        def _sample(self, logits: torch.Tensor, metadata: Any) -> Any:
            sampled = super()._sample(logits, metadata)
            names = self.input_batch.req_ids
            expected = {name: request for request, name in enumerate(names)}
            assert self._get_nans_in_logits(logits) == expected
            checked.append((len(names), len(logits)))
            return sampled

    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    decode(Host, DRAFTERS["static"], asked(SIZES, [GREEDY] * 3), WEIGHTS, None)
    requests, computed = map(max, zip(*checked, strict=True))
    assert requests > 1
    assert computed == rows if rows == 3 else computed > 3
