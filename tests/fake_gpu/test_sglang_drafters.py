"""Whole steps of SGLang's scheduler with RSD and with Lyanna's trees on the fake GPU give what the
CPU gives."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpu.comparison import assert_within_budget
from fake_gpu.tensors import Gpu

pytest.importorskip("sglang", reason="SGLang is not installed here")

from fake_gpu.sglang_cases import GREEDY, WEIGHTS, asked, both, prompt
from fake_gpu.sglang_hosts import DRAFT_MODEL, HIDDEN_STATES
from fake_gpu.sglang_steps import Asked, Decoded, decode

TREES = {"steps": 3, "width": 2, "nodes": 5, "resample_nodes": 3}
HOSTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rsd, beams": (DRAFT_MODEL, {"tree": "beam:2x3"}),
    "rsd, branches": (DRAFT_MODEL, {"tree": "branch:2-2-1"}),
    "rsd, traversal": (DRAFT_MODEL, {"tree": "branch:2-2-1", "verify": "traversal"}),
    "rsd with tables": (
        DRAFT_MODEL,
        {"tree": "beam:2x3", "tables": {"prime": False, "nodes": 5}},
    ),
    "lyanna": (HIDDEN_STATES, TREES),
    "lyanna, one tree at a time": (HIDDEN_STATES, {**TREES, "fusion": False}),
    "lyanna with tables": (HIDDEN_STATES, {**TREES, "tables": {"prime": False}}),
}
MAIN = ["rsd, beams", "lyanna"]
OTHERS = ["branches", "traversal"]
EVERY = [
    pytest.param(name, marks=[] if name in MAIN else pytest.mark.full, id=name) for name in HOSTS
]


def compared(name: str, *parameters: dict[str, Any], gpu: Gpu, **given: Any) -> Decoded:
    """Decode three requests on the CPU and on the fake GPU, and compare."""
    host, options = HOSTS[name]
    # SGLang's scheduler overlaps no steps of methods with a draft model.
    return both(options, asked(*parameters), gpu, host=host, overlap=host != DRAFT_MODEL, **given)


@pytest.mark.parametrize("name", EVERY)
def test_greedy_requests(gpu: Gpu, name: str) -> None:
    found = compared(name, GREEDY, GREEDY, GREEDY, gpu=gpu)
    for request, each in asked(GREEDY, GREEDY, GREEDY).items():
        assert found.texts[request] == WEIGHTS.plain_text(each.prompt, each.length)
    assert len(found.widths) == 1, "SGLang captures graphs for trees of one size"
    for record in (*found.steps, *found.starts):
        assert not record.waits, record.report()
    if "tables" in name:
        hits = {row["source"]: row["hit"] for row in found.acceptance["sources"]}
        assert hits["tables"] > 0
        assert hits["draft layer" if "lyanna" in name else "draft model"] > 0


NUCLEUS = {"temperature": 0.8, "top_p": 0.7, "top_k": 12, "sampling_seed": 3}
PENALISED = {
    "temperature": 0.9,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.1,
    "sampling_seed": 7,
}


def assert_waits_for_depths_alone(found: Decoded) -> None:
    """Levels are sampled one after another, so the host needs their number."""
    for record in found.steps:
        assert len(record.waits) <= 1
        assert all("transfer.py" in wait.where for wait in record.waits), record.report()
    for record in found.starts:
        assert not record.waits, record.report()


@pytest.mark.parametrize(
    "name",
    ["rsd, beams", *(pytest.param(f"rsd, {each}", marks=pytest.mark.full) for each in OTHERS)],
)
def test_requests_that_sample_from_a_draft_model(gpu: Gpu, name: str) -> None:
    """Their random numbers follow from their seeds, or from one generator on the host."""
    found = compared(name, {"temperature": 0.9}, GREEDY, NUCLEUS, gpu=gpu, waits=True, seeded=True)
    assert_waits_for_depths_alone(found)


@pytest.mark.full
@pytest.mark.parametrize("name", ["rsd, beams", "rsd, traversal"])
def test_penalties_along_the_paths_of_a_draft_model(gpu: Gpu, name: str) -> None:
    counted = {"temperature": 0.0, "frequency_penalty": 0.6}
    found = compared(name, PENALISED, counted, GREEDY, gpu=gpu, waits=True, seeded=True)
    assert_waits_for_depths_alone(found)


@pytest.mark.full
def test_seeds_and_penalties_beside_lyanna(gpu: Gpu) -> None:
    found = compared("lyanna", PENALISED, NUCLEUS, GREEDY, gpu=gpu, waits=True, seeded=True)
    assert_waits_for_depths_alone(found)


BUDGETS = {"rsd, beams": (31, 104, 1, 0), "lyanna": (19, 202, 2, 0)}
"""Most kernels, operations of PyTorch, copies in and copies out of a greedy step with drafts."""


@pytest.mark.parametrize("name", BUDGETS)
def test_a_drafted_step_stays_within_its_budget(gpu: Gpu, name: str) -> None:
    host, options = HOSTS[name]
    requests = {"one": Asked(prompt(0, 8), 8, GREEDY), "other": Asked(prompt(1, 6), 8, GREEDY)}
    found = decode(options, requests, WEIGHTS, gpu, host=host, overlap=host != DRAFT_MODEL)
    steps = [each for each, trees in zip(found.steps, found.trees, strict=True) if len(trees) == 2]
    assert len(steps) > 1
    for request, each in requests.items():
        assert found.texts[request] == WEIGHTS.plain_text(each.prompt, each.length)
    for step in steps:
        assert_within_budget(step, BUDGETS[name])
        assert not step.waits
