"""`scripts/hosts/harness.py`: lm-evaluation-harness on a plain server and on one that drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from scripts.hosts.harness import Outcome, compare, make_tasks, read_results, write_tasks

COUNTS = {
    "steps": 5,
    "emitted": 9,
    "accepted_tokens": 4,
    "non_first_child_accepted": 1,
    "kv_rows_moved": 2,
}
PLAIN = {"gsm8k": Outcome({0: "one", 1: "two"}, {"exact_match,strict": 0.5}, {})}


def drafted(
    second: str = "two", score: float = 0.5, counts: dict[str, int] | None = None
) -> dict[str, Outcome]:
    answers = {0: "one", 1: second}
    return {"gsm8k": Outcome(answers, {"exact_match,strict": score}, COUNTS | (counts or {}))}


def test_tables_of_equal_answers() -> None:
    lines, wrong = compare(PLAIN, drafted())
    assert "| gsm8k | 2 | 2 | 5 | 9 | 4 | 1 |" in lines
    assert "| gsm8k | exact_match,strict | 0.5000 | 0.5000 |" in lines
    assert not wrong


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (drafted(second="too"), "gsm8k, item 1: 'too' instead of 'two'"),
        (drafted(score=1.0), "gsm8k: exact_match,strict is 1.0 instead of 0.5"),
        (drafted(counts={"accepted_tokens": 0}), "gsm8k: accepted_tokens is 0"),
        (drafted(counts={"kv_rows_moved": 0}), "gsm8k: kv_rows_moved is 0"),
    ],
)
def test_what_is_wrong_is_told(outcome: dict[str, Outcome], message: str) -> None:
    assert compare(PLAIN, outcome)[1] == [message]


def test_tasks_are_the_harness_own_with_other_data(tmp_path: Path) -> None:
    tasks = make_tasks(Path("/data/gsm8k"), Path("/data/ifeval.jsonl"), tokens=7)
    write_tasks(tasks, Path("/venv/lm_eval/tasks"), tmp_path / "tasks")
    gsm8k, ifeval = (
        yaml.safe_load((tmp_path / "tasks" / f"{name}.yaml").read_text())
        for name in ("gsm8k", "ifeval")
    )
    assert gsm8k["include"] == "/venv/lm_eval/tasks/gsm8k/gsm8k.yaml"
    assert gsm8k["dataset_kwargs"]["data_files"]["test"] == "/data/gsm8k/test.jsonl"
    assert ifeval["dataset_kwargs"]["data_files"] == {"train": "/data/ifeval.jsonl"}
    for task in (gsm8k, ifeval):
        assert task["dataset_path"] == "json"
        assert task["generation_kwargs"]["max_gen_toks"] == 7
        assert task["generation_kwargs"]["temperature"] == 0


def test_the_harness_files_are_read(tmp_path: Path) -> None:
    """An item has a line for each filter, and errors of scores are left out."""
    folder = tmp_path / "model"
    folder.mkdir()
    items = [{"doc_id": item, "resps": [[text]]} for item, text in ((1, "b"), (0, "a"), (1, "b"))]
    (folder / "samples_local_gsm8k_now.jsonl").write_text("\n".join(map(json.dumps, items)))
    scores = {"alias": "x", "sample_len": 2, "exact_match,a": 0.5, "exact_match_stderr,a": 0.1}
    results = {"results": {"local_gsm8k": scores}}
    (folder / "results_now.json").write_text(json.dumps(results))
    assert read_results(tmp_path) == ({0: "a", 1: "b"}, {"exact_match,a": 0.5})
