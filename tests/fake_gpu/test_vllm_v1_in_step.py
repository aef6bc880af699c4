"""On the fake GPU, whole steps of vLLM's V1 model runner that draft within the step, with RSD and
with Lyanna's trees, give what they give on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpu.comparison import assert_within_budget
from fake_gpu.tensors import Gpu

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fake_gpu.vllm_v1 import Asked, Decoded, decode
from fake_gpu.vllm_v1_cases import GREEDY, HOSTS, MAIN, WEIGHTS, asked, both, prompt
from fake_gpu.vllm_v1_hosts import DraftModelHost

EVERY = [
    pytest.param(name, marks=[] if name in MAIN else pytest.mark.full, id=name) for name in HOSTS
]
# One arrives while others decode, with a prompt that is read in parts.
SIZES = ((9, 12, 0), (6, 10, 0), (13, 5, 3))


def compared(name: str, *parameters: dict[str, Any], gpu: Gpu, waits: bool = False) -> Decoded:
    """Decode three requests on the CPU and on the fake GPU, and compare."""
    return both(*HOSTS[name], asked(SIZES, parameters), gpu, waits=waits)


def assert_waits_for_sizes_alone(found: Decoded) -> None:
    """The host waits once in a step at most, for the numbers of draft tokens."""
    for record in found.steps:
        assert {wait.what for wait in record.waits} <= {"an event"}
        assert len(record.waits) <= 1


@pytest.mark.parametrize("name", EVERY)
def test_greedy_requests(gpu: Gpu, name: str) -> None:
    found = compared(name, GREEDY, GREEDY, GREEDY, gpu=gpu)
    assert_waits_for_sizes_alone(found)
    if HOSTS[name][0] is DraftModelHost:
        assert not any(record.waits for record in found.steps)


@pytest.mark.parametrize(
    "name",
    [
        *("rsd, beams", "rsd, traversal", "rsd with tables"),
        pytest.param("rsd, branches", marks=pytest.mark.full),
    ],
)
def test_requests_that_sample_from_a_draft_model(gpu: Gpu, name: str) -> None:
    """Their random numbers follow from their seeds, or from one generator on the host."""
    nucleus = {"temperature": 0.8, "top_p": 0.7, "top_k": 12, "seed": 3}
    found = compared(name, {"temperature": 0.9}, GREEDY, nucleus, gpu=gpu)
    assert not any(record.waits for record in found.steps)


@pytest.mark.parametrize(
    "name",
    [
        "rsd, beams",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("rsd, traversal", "rsd with tables")
        ),
    ],
)
def test_penalties_along_the_paths_of_a_draft_model(gpu: Gpu, name: str) -> None:
    penalised = {"temperature": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.1, "seed": 7}
    counted = {"temperature": 0.0, "frequency_penalty": 0.6}
    found = compared(name, penalised, counted, GREEDY, gpu=gpu, waits=True)
    assert_waits_where_documented(found)


@pytest.mark.full
def test_seeds_and_penalties_beside_lyanna(gpu: Gpu) -> None:
    penalised = {"temperature": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.1, "seed": 7}
    nucleus = {"temperature": 0.8, "top_p": 0.7, "seed": 3}
    found = compared("lyanna", penalised, nucleus, GREEDY, gpu=gpu, waits=True)
    assert_waits_where_documented(found)


def assert_waits_where_documented(found: Decoded) -> None:
    """Tokens are needed on the host before the next level is sampled."""
    where = {wait.where.partition(":")[0] for each in found.steps for wait in each.waits}
    files = "vllm/sampling.py", "vllm/tree_rules.py", "verify.py", "transfer.py", "tree.py"
    assert where <= {f"drafttree/{file}" for file in files}


BUDGETS = {
    "rsd, beams": (25, 102, 2, 0),
    # Each of four forwards replays two graphs, and copies tokens and positions.
    "rsd, in graphs": (25 + 4 * 2, 102 + 4 * 2, 2, 0),
    "lyanna": (20, 195, 2, 1),
    # Two steps along chains, the trees, and a forward over the tokens of a step if they are not
    # too many, replay a graph each.
    "lyanna, in graphs": (15, 87, 2, 1),
}
"""Most kernels, operations of PyTorch, copies in and copies out of a greedy step with drafts."""


@pytest.mark.parametrize("name", BUDGETS)
def test_a_drafted_step_stays_within_its_budget(gpu: Gpu, name: str) -> None:
    host, options = HOSTS[name]
    requests = {"one": Asked(prompt(0, 9), 9, GREEDY), "other": Asked(prompt(1, 6), 9, GREEDY)}
    found = decode(host, options, requests, WEIGHTS, gpu, chunk=16)
    steps = [each for each, trees in zip(found.steps, found.trees, strict=False) if len(trees) == 2]
    assert len(steps) > 1
    for step in steps:
        assert_within_budget(step, BUDGETS[name])
