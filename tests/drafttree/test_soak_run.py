"""What a soak counts, with an engine that answers without a model."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import soak_held
import soak_run
from engine_host.jobs import RunFailed
from soak_requests import Asked, Given, Served

from scripts import soak

POOL = [Asked(0, [5], {"temperature": 0.0, "max_tokens": 2}, None, True)]
PLAIN = [Given([[300, 301]], ["ab"], ["length"])]


class Echo:
    """Answers every request with `PLAIN`; an operation resets one of its counters."""

    def __init__(self, engine: str | None, *, stops_in: int | None = None) -> None:
        self._counts = {"draft_tokens": 0, "mixtures": 0}
        self._stops_in = stops_in

    def serve(self, requests: list[Served], pool: list[Asked]) -> list[Given]:
        if self._counts["mixtures"] == self._stops_in:
            raise RuntimeError("the engine has stopped")
        self._counts["mixtures"] += 1
        self._counts["draft_tokens"] += 1
        return PLAIN * len(requests)

    def operate(self, operation: str) -> None:
        self._counts["draft_tokens"] = 0

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def held(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def serve(tmp_path: Path, seconds: float, **given: Any) -> tuple[soak_run.Report, Path]:
    record = tmp_path / "record"
    report = soak_run.soak(
        Echo, POOL, PLAIN, record, engine="vllm", seed=0, seconds=seconds, **given
    )
    return report, record


def test_counters_that_operations_reset_are_added_up(tmp_path: Path) -> None:
    report, _ = serve(tmp_path, 2.0)
    assert report.operations
    assert report.counts["draft_tokens"] == report.counts["mixtures"]


def test_a_short_soak_looks_for_no_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = serve(tmp_path, 0.2)
    assert (report.measured, report.leaks) == ([], [])
    monkeypatch.setattr(soak_run, "WARM_UP_SECONDS", 0.1)
    report, _ = serve(tmp_path, 0.2)
    assert len(report.measured) == 3


def test_the_mixture_under_way_is_known_when_the_engine_stops(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has stopped"):
        serve(tmp_path, 60.0, stops_in=3)
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    stopped = soak.under_way(lines)
    assert stopped is not None
    assert stopped["mixture"] == 3
    assert all(each["number"] == 0 for each in stopped["requests"])
    assert soak.under_way(lines[:-1]) is None


@pytest.mark.parametrize("stops", [False, True])
def test_all_messages_of_an_engine_are_kept(
    stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = "the reason\n" + "x" * 10_000

    def job(*arguments: object) -> tuple[str, str]:
        if stops:
            raise RunFailed("exit status 1", messages)
        return "made", messages

    monkeypatch.setattr(soak, "run_job", job)
    log = tmp_path / "log"
    with pytest.raises(RunFailed) if stops else nullcontext():
        assert soak.run("vllm", serve, (), 1.0, log) == "made"
    assert log.read_text() == messages


@pytest.fixture
def shared_files() -> Iterator[list[str]]:
    """Names of files in shared memory that no process has open, of two purposes."""
    names = [f"tests_soak_{os.getpid():08x}_{number}" for number in range(3)]
    names.append(f"tests_other_{os.getpid():08x}")
    for name in names:
        (soak_held.SHARED_MEMORY / name).touch()
    yield names
    for name in names:
        (soak_held.SHARED_MEMORY / name).unlink()


def test_files_in_shared_memory_are_compared_by_purpose(shared_files: list[str]) -> None:
    soaks, other = shared_files[:3], shared_files[3:]
    assert soak_held.left_by({*soaks, "absent"}) == {"tests_soak_#_#": 3}
    with (soak_held.SHARED_MEMORY / soaks[0]).open():
        assert soak_held.used_by([os.getpid()]) >= {soaks[0]}
        assert soak_held.left_by({*soaks}) == {"tests_soak_#_#": 2}
    # What plain decoding leaves of one purpose allows nothing of another.
    drafted, plain = soak_held.left_by({*soaks[:1]}), soak_held.left_by({*other})
    assert soak.more_left(drafted, drafted) == []
    assert soak.more_left(drafted, plain) == [
        "in shared memory are left 1 tests_soak_#_#, by plain decoding 0"
    ]
    assert soak.more_left(Counter(), plain) == []


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("sem.mp-_wcm2zdh", "sem.mp-ap3yhue5"),
        ("psm_3c30783d", "psm_4e99db01"),
        ("sgl_shm_mq_18764_6b994bf6", "sgl_shm_mq_19947_89d8de50"),
    ],
)
def test_random_parts_of_names_do_not_matter(
    name: str, same: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (name, same):
        (tmp_path / each).touch()
    monkeypatch.setattr(soak_held, "SHARED_MEMORY", tmp_path)
    assert [*soak_held.left_by({name, same}).values()] == [2]
