"""The soak of each engine with each method, and that it reports wrong answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from hosts import Host

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"
MINUTES = {"token-recycling": 5.0, "rsd": 4.0, "lyanna": 4.0}
"""Memory is first taken after three tenths of it, and at least 75 seconds."""


def soak(
    host: Host, method: str, minutes: float, logs: Path, **environment: str
) -> tuple[int, str, list[int]]:
    """The exit status, the output, and the numbers of the last line."""
    arguments = ["--engine", host.name, "--method", method, "--minutes", str(minutes)]
    arguments += ["--logs", str(logs)]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    last = ended.stdout.splitlines()[-1]
    numbers = re.fullmatch(r"(\d+) requests, (\d+) wrong, (\d+) leaks", last)
    assert numbers, ended.stdout
    return ended.returncode, ended.stdout, [int(number) for number in numbers.groups()]


@pytest.mark.full
@pytest.mark.parametrize("method", MINUTES)
def test_minutes_without_a_wrong_answer_or_a_leak(host: Host, method: str, tmp_path: Path) -> None:
    status, output, (requests, wrong, leaks) = soak(host, method, MINUTES[method], tmp_path)
    assert (status, wrong, leaks) == (0, 0, 0), output
    assert requests > 100
    assert re.search(r"^accepted_tokens: [1-9]", output, re.M)


@pytest.mark.full
def test_a_planted_fault_is_reported(host: Host, tmp_path: Path) -> None:
    """Below the root, sampled tokens are the most likely ones, or grammars allow what roots may."""
    fault = {"vllm": "most likely", "sglang": "root's grammar"}[host.name]
    variables = {faults.VARIABLE: fault}
    status, output, (_, wrong, _) = soak(host, "token-recycling", 0.5, tmp_path, **variables)
    assert status == 1
    assert wrong > 0, output
    assert re.search(
        r"^wrong, with --engine \w+ --method token-recycling --seed 0 --pool 120: ", output, re.M
    )
