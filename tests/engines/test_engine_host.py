"""A run of an engine fails if its process does, even if it had written its result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_host.failing_jobs import ends_with_an_error, never_ends
from engine_host.jobs import RunFailed, run_job
from hosts import Host


def test_a_run_that_has_to_be_killed(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "result is written"
    with pytest.raises(RunFailed, match="killed after 5 seconds"):
        run_job(host.name, never_ends, (file,), {}, timeout=5)
    assert file.exists()


@pytest.mark.parametrize(
    "environment",
    [{}, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}],
    ids=["a fork", "a new Python"],
)
def test_a_run_that_ends_with_an_error(host: Host, environment: dict[str, str]) -> None:
    if host.name == "sglang":
        result, _ = run_job(host.name, ends_with_an_error, (), environment, timeout=100)
        assert result == "a result"
        return
    with pytest.raises(RunFailed, match="exit status 3"):
        run_job(host.name, ends_with_an_error, (), environment, timeout=100)
