"""`drafttree tree` on small made-up runs."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from drafttree.bench.tree_fit import MeasuredTree, fit, tokens_per_step
from drafttree.cli import app
from drafttree.tree import StaticTree

# In 100 steps; [0, 0] was not drafted 10 of the 50 times that its parent was accepted.
STEPS = 100
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TRIED = [100, 100, 40, 50, 20, 30]
HIT = [50, 20, 30, 8, 5, 12]
COUNTS: dict[str, Any] = {"paths": PATHS, "tried": TRIED, "hit": HIT}
SOURCES = {
    "sources": [
        {"source": "suffix", "tried": 1200, "hit": 300, "share": 0.25},
        {"source": "row", "tried": 80, "hit": 4, "share": 0.05},
    ]
}


def report(**changed: Any) -> dict[str, Any]:
    whole = {"engine": "vllm", "method": "some-method", "counters": {"steps": STEPS}}
    return {**whole, "acceptance": COUNTS, **changed}


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tree", *map(str, arguments)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(report()))
    return file


def test_the_tree_is_shown_with_its_shares(run: Path) -> None:
    result = command(run)
    assert result.exit_code == 0, result.output
    lines = [line.lstrip(" │├└─") for line in result.output.splitlines()]
    assert lines == [
        "some-method in vllm: 6 draft tokens, 100 decode steps of 2.25 tokens",
        "rank 0: accepted in 50.0% of steps, 50.0% of its parent's",
        "rank 0: accepted in 30.0% of steps, 60.0% of its parent's, not drafted 10 times",
        "rank 0: accepted in 12.0% of steps, 40.0% of its parent's",
        "rank 1: accepted in 8.0% of steps, 16.0% of its parent's",
        "rank 1: accepted in 20.0% of steps, 20.0% of its parent's",
        "rank 0: accepted in 5.0% of steps, 25.0% of its parent's",
    ]


def test_lines_of_deep_trees_are_not_truncated(tmp_path: Path) -> None:
    deep = {"paths": [[0] * depth for depth in range(1, 31)], "tried": [9] * 30, "hit": [9] * 30}
    (tmp_path / "run.json").write_text(json.dumps(report(acceptance=deep)))
    lines = command(tmp_path / "run.json").output.splitlines()
    assert len(lines) == 31
    assert all("of steps" in line for line in lines[1:])


def test_runs_of_other_trees_are_shown_by_source(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(report(acceptance=SOURCES)))
    shown = command(file).output
    for cell in ("suffix", "1,200", "300", "25.0%", "row", "80", "4", "5.0%"):
        assert cell in shown
    result = command(file, "--fit", 3, "--output", tmp_path / "tree.json")
    assert result.exit_code == 2
    assert "need a static tree" in result.output


def test_the_fitted_tree_is_the_best_of_all() -> None:
    """It is compared with all prefix-closed trees of ranks 0 and 1, five nodes and four levels."""
    measured = MeasuredTree.from_counts(COUNTS, STEPS)
    # Below the root: rank 0 was accepted 30 + 5 + 12 of 50 + 20 + 30 times, rank 1 8 of 50 times.
    pooled = {0: 47 / 100, 1: 8 / 50}

    def worth(path: tuple[int, ...]) -> float:
        if list(path) in PATHS:
            return HIT[PATHS.index(list(path))] / STEPS
        return worth(path[:-1]) * pooled[path[-1]]

    every: list[tuple[int, ...]] = [()]
    for path in every:
        if len(path) < 4:
            every += [(*path, 0), (*path, 1)]
    likely = sorted(every[1:], key=worth)[-14:]
    for nodes in range(1, 6):
        best = max(
            1 + sum(map(worth, chosen))
            for chosen in combinations(likely, nodes)
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
        )
        tree, shares = fit(measured, nodes)
        assert tree.num_draft_tokens == nodes
        assert tokens_per_step(tree, shares) == pytest.approx(best)
    # [0, 0, 0, 0] and [0, 1, 0] were not in the run's tree.
    tree, shares = fit(measured, 8)
    assert {(0, 0, 0, 0), (0, 0, 1)} <= set(tree.paths)
    assert shares[0, 0, 0, 0] == pytest.approx(0.12 * 0.47)


def test_the_fitted_tree_is_written_for_the_option_tree(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "tree.json"
    result = command(run, "--fit", 3, "--output", output)
    assert result.exit_code == 0, result.output
    assert StaticTree.from_file(output).paths == ((0,), (1,), (0, 0))
    assert (
        "expected tokens per step: 2.25 before, with 6 draft tokens; 2.00 after, with 3"
        in result.output
    )
    assert "30.0% of steps" in result.output


def test_a_tree_that_only_has_leaves_goes_deeper_by_the_same_ranks() -> None:
    counts = {"paths": [[0], [1]], "tried": [10, 10], "hit": [6, 1]}
    tree, shares = fit(MeasuredTree.from_counts(counts, 10), 3)
    assert tree.paths == ((0,), (0, 0), (0, 0, 0))
    assert shares[0, 0, 0] == pytest.approx(0.6**3)


def test_a_tree_is_shown_alone() -> None:
    result = command("--tree", "branch:2-1")
    assert result.exit_code == 0, result.output
    assert [line.lstrip(" │├└─") for line in result.output.splitlines()] == [
        "4 draft tokens, depth 2",
        *("rank 0", "rank 0", "rank 1", "rank 0"),
    ]


@pytest.mark.parametrize("what", ["run", "alone"])
def test_a_picture_is_drawn(run: Path, tmp_path: Path, what: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here")
    picture = tmp_path / "tree.png"
    shown = [run] if what == "run" else ["--tree", "branch:3-2"]
    result = command(*shown, "--picture", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert command(*shown, "--picture", tmp_path / "absent" / "tree.png").exit_code == 2
    assert command(*shown, "--picture", tmp_path / "tree.nonsense").exit_code == 2


def test_a_picture_needs_matplotlib(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command(run, "--picture", tmp_path / "tree.png")
    assert result.exit_code == 2
    assert "needs matplotlib" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "is not JSON"),
        ("[]", "not a bench report"),
        ('{"paths": [[0]]}', "not a bench report"),
        ({"runs": [report(), report()]}, "contains 2 runs"),
        (report(acceptance={}), "has no acceptance statistics"),
        ({key: report()[key] for key in ("engine", "method", "counters")}, "older version"),
        (report(counters={}), "no decode steps"),
        (report(acceptance={"paths": PATHS}), "cannot be read"),
        (report(acceptance={**COUNTS, "hit": [1]}), "cannot be read"),
        (
            report(acceptance={**COUNTS, "hit": [90, *HIT[1:]]}, counters={"steps": 80}),
            "contradict",
        ),
        (report(acceptance={"sources": [{"source": "row"}]}), "cannot be read"),
    ],
)
def test_files_that_are_not_a_run(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    result = command(file)
    assert result.exit_code == 2
    assert message in result.output


def test_wrong_arguments(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "tree.json"
    for arguments, message in (
        ([], "either a bench run or --tree"),
        ([run, "--tree", "branch:2"], "either a bench run or --tree"),
        ([tmp_path / "absent.json"], "No such file"),
        (["--tree", tmp_path / "absent.json"], "No such file"),
        (["--tree", "branch:2-x"], "branching factors"),
        (["--tree", "branch:2", "--fit", 3, "--output", output], "give the run instead"),
        ([run, "--fit", 3], "need each other"),
        ([run, "--output", output], "need each other"),
        ([run, "--fit", 0, "--output", output], "use 1 to 255"),
        ([run, "--fit", 256, "--output", output], "use 1 to 255"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2, arguments
        assert message in result.output, arguments
    assert not output.exists()


def test_more_nodes_than_the_measured_ranks_make() -> None:
    counts = {"paths": [[0]], "tried": [10], "hit": [6]}
    with pytest.raises(ValueError, match="measured allow 64"):
        fit(MeasuredTree.from_counts(counts, 10), 65)
