"""Steps of vLLM's V2 model runner with draft trees on the fake GPU give what the CPU gives."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import fake_gpu_of_v2
import pytest
from fake_gpu_of_v2 import ANSWER
from tree_kernels.machine import find_compiler

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": ("token-recycling", {"tree": "branch:3-2-1"}),
    "dynamic": ("token-recycling", {"nodes": 7}),
    "rsd": ("rsd", {"model": "none", "tree": "beam:2x3"}),
    "rsd in graphs": ("rsd in graphs", {"model": "none", "tree": "beam:2x3"}),
    "traversal": ("rsd", {"model": "none", "tree": "branch:2-2-1", "verify": "traversal"}),
    "lyanna": (
        "lyanna",
        {"model": "none", "steps": 3, "width": 2, "nodes": 5, "resample_nodes": 3},
    ),
    "lyanna in graphs": (
        "lyanna in graphs",
        {"model": "none", "steps": 3, "width": 2, "nodes": 5, "resample_nodes": 3},
    ),
    "kernel alone": ("kernel alone", {"tree": "branch:3-2-1"}),
    "flash attention 2": ("flash attention 2", {"tree": "branch:3-2-1"}),
    "flash attention 3": ("flash attention 3", {"nodes": 7, "memory": 0}),
    "rsd in shapes that change": ("rsd", {"model": "none", "tree": "auto"}),
    "rsd in graphs, in shapes that change": ("rsd in graphs", {"model": "none", "tree": "auto"}),
    "lyanna in shapes that change": (
        "lyanna",
        {"model": "none", "steps": 3, "width": 2, "nodes": "auto"},
    ),
    "lyanna in graphs, in shapes that change": (
        "lyanna in graphs",
        {"model": "none", "steps": 3, "width": 2, "nodes": "auto"},
    ),
}
BUDGETS = {
    **{"static": (17, 4), "dynamic": (23, 3), "rsd": (29, 158), "lyanna": (25, 178)},
    # Each of four forwards replays two graphs, and copies tokens and positions.
    "rsd in graphs": (29 + 4 * 2, 158 + 4 * 2),
    # Two steps along chains, the trees, and a forward over the step's tokens replay a graph each.
    "lyanna in graphs": (20, 68),
}
"""Most kernels and operations of PyTorch of a greedy step with drafts: all that the runner, the
engine's sampler and the drafter launch, without the preparation of inputs and the models."""
SAMPLED_BUDGETS = {"rsd": (51, 333), "traversal": (36, 225)}
"""The same for steps with sampled requests, one of them with filters, beside a greedy one."""

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"),
]


def decoded(case: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    """What both devices decode; the fake one refuses whatever the host would wait for."""
    method, options = CASES[case]
    asked = [{"method": method, "options": options, "parameters": parameters}]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(fake_gpu_of_v2.__file__), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith(ANSWER)]
    assert lines, process.stderr[-3000:]
    answer: dict[str, Any] = json.loads(lines[0].removeprefix(ANSWER))
    found, expected = answer["gpu"], answer["cpu"]
    for name in ("texts", "counts", "acceptance", "paths"):
        assert found[name] == expected[name]
    assert found["counts"]["accepted_tokens"] > 0
    assert found["counts"]["kv_rows_moved"] > 0
    for _, used, report in found["steps"]:
        assert not used["waits"], report
    return answer


GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize("case", BUDGETS)
def test_greedy_requests_within_a_budget(case: str) -> None:
    answer = decoded(case, GREEDY, GREEDY, GREEDY)
    assert answer["gpu"]["texts"] == answer["plain"]
    steps = [each for each in answer["gpu"]["steps"] if each[0] == 2]
    assert len(steps) > 1
    for _, used, report in steps:
        kernels, operations = BUDGETS[case]
        assert used["kernels"] <= kernels, report
        assert used["operations"] <= operations, report
        assert not used["copies in"], report
        assert not used["copies out"], report


@pytest.mark.full
@pytest.mark.parametrize("attention", ["kernel alone", "flash attention 2", "flash attention 3"])
def test_a_target_with_attention(attention: str) -> None:
    """Flash attention reads what comes before a step, with one launch beside the kernel's."""
    answer = decoded(attention, GREEDY, GREEDY, GREEDY)
    assert answer["gpu"]["texts"] == answer["plain"]
    launches = int(attention != "kernel alone")
    steps = [report for drafted, _, report in answer["gpu"]["steps"] if drafted]
    assert len(steps) > 2
    for report in steps:
        lines = [line.partition(":")[0] for line in report.splitlines()]
        assert lines.count("1 _attend_kernel") == 1, report
        assert lines.count("1 flash_attn_varlen_func") == launches, report
        assert "_merge_kernel" not in report


@pytest.mark.full
@pytest.mark.parametrize("case", [name for name in CASES if "change" in name])
def test_shapes_that_change(case: str) -> None:
    """In some steps nothing is drafted. What is missed then is read later, and reported in time."""
    answer = decoded(case, GREEDY, GREEDY, GREEDY)
    found = answer["gpu"]
    assert found["texts"] == answer["plain"]
    assert 0 < found["counts"]["drafted_steps"] < found["counts"]["steps"]
    assert len({len(path[0]) for path in found["paths"]}) > 2
    warm = {"temperature": 0.9, "seed": 3}
    decoded(case, warm, warm | {"presence_penalty": 0.4}, GREEDY)


@pytest.mark.parametrize("case", ["rsd", "traversal", "lyanna"])
def test_requests_that_are_sampled(case: str) -> None:
    warm = {"temperature": 0.9, "seed": 3}
    answer = decoded(case, warm, warm | {"top_p": 0.7, "top_k": 12, "min_p": 0.02}, GREEDY)
    if case in SAMPLED_BUDGETS:
        kernels, operations = SAMPLED_BUDGETS[case]
        for _, used, report in answer["gpu"]["steps"]:
            assert used["kernels"] <= kernels, report
            assert used["operations"] <= operations, report


@pytest.mark.full
@pytest.mark.parametrize("case", ["static", "rsd", "lyanna"])
def test_sampled_requests_with_penalties(case: str) -> None:
    """Their drafts are chains where penalties follow one path."""
    warm = {"temperature": 0.8, "seed": 3}
    decoded(
        case,
        warm,
        warm | {"presence_penalty": 0.4, "repetition_penalty": 1.1},
        GREEDY | {"min_tokens": 3, "stop_token_ids": [5]},
    )
