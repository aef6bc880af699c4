"""Whole steps of SGLang's scheduler with draft trees on the fake GPU give what the CPU gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_gpu.comparison import assert_within_budget
from fake_gpu.tensors import DeviceTensor, Gpu
from structured_answers import PATTERN
from tiny_models import add_byte_tokenizer

pytest.importorskip("sglang", reason="SGLang is not installed here")

from fake_gpu.sglang_cases import GREEDY, WEIGHTS, asked, both, prompt, random_target
from fake_gpu.sglang_steps import Asked, decode

from drafttree.sglang import sampling

BYTES = 512
"""Size of the vocabulary of grammars, whose tokens are bytes."""
DRAFTERS: dict[str, dict[str, Any]] = {
    "static": {"tree": "branch:3-2-1"},
    "dynamic": {"nodes": 7},
}
# The interpreter takes seconds for each dynamic tree.
SLOW = [pytest.param("static"), pytest.param("dynamic", marks=pytest.mark.full)]


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_greedy_requests(gpu: Gpu, overlap: bool) -> None:
    requests = asked(GREEDY, GREEDY, GREEDY)
    found = both(DRAFTERS["static"], requests, gpu, overlap=overlap)
    for name, each in requests.items():
        assert found.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)
    # SGLang captures graphs for trees of one size.
    assert found.widths == {16}
    for record in (*found.steps, *found.starts):
        assert not record.waits, record.report()


@pytest.mark.full
def test_requests_that_sample_from_a_softmax(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "draws_ahead", lambda logits: True)
    # So cold that the noise, which follows from a row's number, does not matter.
    cold = {"temperature": 0.01}
    requests = asked(cold, cold, cold)
    found = both(DRAFTERS["static"], requests, gpu)
    for name, each in requests.items():
        assert found.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)
    for record in found.steps:
        assert record.kernels["_draw_kernel"], record.report()
        # The greatest depth is on its way, but nobody waits for it.
        assert not record.waits


def test_requests_with_top_p_penalties_and_seeds(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    # All nodes are sampled at once there, and level by level on the CPU.
    monkeypatch.setattr(sampling, "draws_ahead", lambda logits: isinstance(logits, DeviceTensor))
    nucleus = {"temperature": 0.8, "top_p": 0.6, "sampling_seed": 3}
    penalised = {"temperature": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.1}
    penalised["sampling_seed"] = 7
    requests = asked(nucleus, penalised, GREEDY)
    found = both(DRAFTERS["static"], requests, gpu, seeded=True)
    for record in found.steps:
        assert not record.waits, record.report()


@pytest.mark.full
def test_requests_with_a_grammar(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "draws_ahead", lambda logits: isinstance(logits, DeviceTensor))
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(add_byte_tokenizer(tmp_path))
    made = XGrammarGrammarBackend(tokenizer, BYTES, [1]).dispatch_regex(PATTERN)
    eos = {"eos_token_ids": {1}}
    requests = {
        "bound": Asked(prompt(0, 9), 40, GREEDY, 0, made.copy, eos),
        "free": Asked(prompt(1, 6), 18, GREEDY),
        "bound too": Asked(prompt(2, 6), 40, GREEDY, 4, made.copy, eos),
    }
    weights = random_target(BYTES)
    expected = decode(DRAFTERS["static"], requests, weights, None)
    found = decode(DRAFTERS["static"], requests, weights, gpu, waits=True)
    assert found.texts == expected.texts
    assert found.trees == expected.trees
    assert found.counts == expected.counts
    assert found.acceptance == expected.acceptance
    assert found.texts["free"] == weights.plain_text(requests["free"].prompt, 18)
    for name in ("bound", "bound too"):
        text = tokenizer.decode(found.texts[name], skip_special_tokens=True)
        assert re.fullmatch(PATTERN, text), text
    assert found.counts["accepted_tokens"] > 0
    # The trees are read on the host.
    for record in found.steps:
        assert len(record.waits) <= 1
        assert all("transfer.py" in wait.where for wait in record.waits), record.report()
        assert record.copies_in.total() <= 2, record.report()


BUDGETS = {"static": (12, 42, 0, 0), "dynamic": (18, 41, 0, 0)}
"""Most kernels, operations of PyTorch, copies in and copies out of a greedy step with drafts."""


@pytest.mark.parametrize("drafter", SLOW)
def test_a_drafted_step_stays_within_its_budget(gpu: Gpu, drafter: str) -> None:
    requests = {"one": Asked(prompt(0, 8), 8, GREEDY), "other": Asked(prompt(1, 6), 8, GREEDY)}
    found = decode(DRAFTERS[drafter], requests, WEIGHTS, gpu)
    steps = [each for each, trees in zip(found.steps, found.trees, strict=True) if len(trees) == 2]
    assert len(steps) > 1
    for name, each in requests.items():
        assert found.texts[name] == WEIGHTS.plain_text(each.prompt, each.length)
    for step in steps:
        assert_within_budget(step, BUDGETS[drafter])
        assert not step.waits
