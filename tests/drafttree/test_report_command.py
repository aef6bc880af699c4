"""`drafttree report` on the runs that the project has measured, and on what is no run."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import rendered
from typer.testing import CliRunner, Result

from drafttree.bench.run_files import BenchRun, RunFigures, find_runs
from drafttree.cli import app
from drafttree.cli.report_plots import by_batch_size

RESULTS = Path(__file__).parents[2] / "results"
FILES = (
    *("float32-auto-batch-1.json", "float32-auto-batch-8.json", "bfloat16-waves-batch-1.json"),
    "bfloat16-starts-nodes-7-and-auto.json",
)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs of two number formats, one file with several runs, and files that are none."""
    runs = tmp_path / "runs"
    (runs / "inner").mkdir(parents=True)
    for name in FILES[:-1]:
        # As if all had been asked the same, so that batch sizes can be compared.
        report = json.loads((RESULTS / "vllm-cpu" / name).read_text())
        (runs / name).write_text(json.dumps(report | {"prompts": 40, "max_new_tokens": 128}))
    shutil.copy(RESULTS / "vllm-cpu" / FILES[-1], runs / "inner")
    shutil.copy(RESULTS / "workloads.json", runs)
    (runs / "broken.json").write_text("{")
    (runs / "<b>.json").write_text('{"engine": "vllm"}')
    return runs


@pytest.fixture
def page(folder: Path) -> Path:
    file = folder.with_name("runs.html")
    result = command(folder, "--output", file)
    assert result.exit_code == 0, result.output
    return file


def test_all_runs_are_found_and_the_others_are_named(folder: Path) -> None:
    several = json.loads((folder / "inner" / FILES[-1]).read_text())["runs"]
    runs, skipped = find_runs(folder)
    assert [run.number for run in runs] == list(range(1, 4 + len(several)))
    assert {str(run.file) for run in runs} == {*FILES[:-1], f"inner/{FILES[-1]}"}
    assert {str(file): reason.partition(":")[0] for file, reason in skipped.items()} == {
        "broken.json": "cannot be read as JSON",
        "<b>.json": "no report of drafttree bench",
        "workloads.json": "no report of drafttree bench",
    }


def test_every_report_of_the_bench_is_a_run() -> None:
    runs, _ = find_runs(RESULTS)
    found = {run.file for run in runs}
    for file in RESULTS.rglob("*.json"):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and "per_category" in content:
            assert file.relative_to(RESULTS) in found


def test_the_page_has_conditions_figures_and_plots(folder: Path, page: Path) -> None:
    text = page.read_text()
    runs, skipped = find_runs(folder)
    for run in runs:
        cells = "".join(
            f"<td>{getattr(run.report, name):.2f}</td>"
            for name in ("speedup", "decode_speedup", "mean_accepted_tokens")
        )
        assert cells in text
        for condition in run.conditions:
            assert condition in text
        # In the legend or beside its bar.
        assert text.count(run.label) >= 2
        for kind in run.report.per_category:
            assert f">{kind}</text>" in text
    groups = {run.conditions for run in runs}
    assert text.count("By method") == text.count("By kind of task") == len(groups)
    # Only one setting was run with two batch sizes.
    assert text.count("By batch size") == 1
    assert text.count("<svg") == text.count("</svg>") == 2 * len(groups) + 1
    for file in skipped:
        assert f"<code>{str(file).replace('<', '&lt;').replace('>', '&gt;')}</code>" in text
    assert "<b>" not in text


def test_ids_are_unique_and_references_lead_to_them(page: Path) -> None:
    text = page.read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids) > 100
    references = re.findall(r'href="([^"]+)"|url\(([^)]+)\)', text)
    assert references
    for pair in references:
        (target,) = filter(None, pair)
        assert target.removeprefix("#") in ids


def test_the_page_renders_and_loads_nothing(folder: Path, page: Path) -> None:
    shown = "document.title = `${document.querySelectorAll('svg text').length} texts`;"
    dom = rendered(page, shown)
    (texts,) = re.findall(r"<title>(\d+) texts</title>", dom)
    assert int(texts) > 50
    runs, _ = find_runs(folder)
    assert f"{len(runs)} runs of drafttree bench" in dom


def test_runs_without_times_have_no_plots(folder: Path, tmp_path: Path) -> None:
    """As where kernels run in Triton's interpreter."""
    report = json.loads((folder / FILES[0]).read_text())
    alone = tmp_path / "untimed"
    alone.mkdir()
    for figures in (report, *report["per_category"].values(), *report["repetitions"]):
        figures |= {name: None for name in figures if name.endswith(("speedup", "per_second"))}
    (alone / "run.json").write_text(json.dumps(report))
    result = command(alone, "--output", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "page.html").read_text()
    assert "<svg" not in text
    assert f"<td>{report['mean_accepted_tokens']:.2f}</td>" in text


def test_names_that_are_not_utf8_are_escaped(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / FILES[0], folder / os.fsdecode(b"run-\xff.json"))
    (folder / os.fsdecode(b"none-\xfe.json")).write_text("{")
    result = command(folder, "--output", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<td>run-\\udcff.json</td>" in text
    assert "<code>none-\\udcfe.json</code>" in text


def test_a_method_on_another_runner_than_plain_decoding_is_marked(folder: Path) -> None:
    [_, first, second, *_], _ = find_runs(folder)
    first, second = (
        replace(run, report=run.report.model_copy(update={"runner": "v2"} | other))
        for run, other in ((first, {"method_runner": "v1"}), (second, {}))
    )
    assert first.setting == f"{second.setting} (v1)"
    assert first.conditions == second.conditions


def odd_report(folder: Path, **changed: object) -> Path:
    """A folder with a good report and one with other values."""
    odd = folder.with_name("odd")
    odd.mkdir()
    shutil.copy(folder / FILES[0], odd)
    report = json.loads((folder / FILES[1]).read_text())
    (odd / "odd.json").write_text(json.dumps(report | changed))
    return odd


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("$HOME_{x$", "$HOME_{x$"),
        ("a $x$ b", "a $x$ b"),
        ("/data/\udcff.json", "/data/?.json"),
        ("\ud800", "?"),
        ("中文 😀", "中文 😀"),
    ],
)
def test_any_text_is_shown_as_it_is(folder: Path, tmp_path: Path, text: str, shown: str) -> None:
    figures = json.loads((folder / FILES[1]).read_text())["per_category"]
    odd = odd_report(folder, options={"tree": text}, per_category={text: figures["coding"]})
    file = tmp_path / "page.html"
    result = command(odd, "--output", file)
    assert result.exit_code == 0, result.output
    page = file.read_text(encoding="utf-8")
    assert f">{shown}</text>" in page
    # In the table, beside its bar and in the legend.
    assert page.count(f"tree={shown}") == 3


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"repetitions": [1]}, "repetitions.0: Input should be"),
        ({"per_category": {"a": 1}}, "per_category.a: Input should be"),
        ({"per_category": {"a": {"speedup": "x"}}}, "per_category.a.speedup: Input should be"),
        ({"speedup": "x"}, "speedup: Input should be a valid number"),
        ({"speedup": "1.5"}, "speedup: Input should be a valid number"),
        ({"speedup": float("nan")}, "speedup: Input should be a finite number"),
        ({"temperature": None}, "temperature: Input should be a valid number"),
        ({"batch_size": 0}, "batch_size: Input should be greater than or equal to 1"),
        ({"prompts": 10**400}, "prompts: Input should be less than"),
        ({"waves": 3}, "waves: Input should be a valid list"),
        ({"method": 3}, "method: Input should be a valid string"),
    ],
)
def test_an_odd_report_is_skipped_with_the_reason(
    folder: Path, changed: dict[str, object], reason: str
) -> None:
    odd = odd_report(folder, **changed)
    output = odd / "page.html"
    result = command(odd, "--output", output)
    assert result.exit_code == 0, result.output
    assert f"skipped odd.json: no report of drafttree bench: {reason}" in result.output
    assert "1 runs, written" in result.output
    assert f"<code>odd.json</code>: no report of drafttree bench: {reason}" in output.read_text()


def lines_by_batch_size(runs: Iterable[BenchRun]) -> dict[str, tuple[list[float], list[float]]]:
    """The batch sizes and speedups of each line of the plot, by its label."""
    figure = by_batch_size(list(runs))
    if figure is None:
        return {}
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in figure.axes[0].lines
        if not str(line.get_label()).startswith("_")
    }


@pytest.mark.parametrize(
    ("changed", "labels"),
    [
        ({"temperature": 1.0}, ("temperature 0", "temperature 1")),
        ({"max_new_tokens": 32}, ("at most 128 new tokens", "at most 32 new tokens")),
        ({"prompts": 10}, ("40 prompts", "10 prompts")),
        ({"prompts": 80, "waves": [RunFigures()] * 2}, ("1 wave", "2 waves")),
        (
            {"prompts": 20, "waves": [RunFigures()] * 2},
            ("40 prompts, 1 wave", "10 prompts, 2 waves"),
        ),
    ],
)
def test_runs_that_were_asked_something_else_are_not_averaged(
    folder: Path, changed: dict[str, Any], labels: tuple[str, str]
) -> None:
    [_, run, *_], _ = find_runs(folder)
    assert run.setting == "token-recycling"

    def other(size: int, speedup: float, **more: Any) -> BenchRun:
        report = run.report.model_copy(update={"batch_size": size, "speedup": speedup} | more)
        return replace(run, report=report)

    runs = [other(1, 2.0), other(8, 1.4), other(8, 1.6)]
    assert lines_by_batch_size(runs) == {"token-recycling": ([1, 8], [2.0, 1.5])}
    assert lines_by_batch_size([runs[0], other(8, 1.0, **changed)]) == {}
    both = lines_by_batch_size([*runs, other(1, 1.0, **changed), other(8, 0.5, **changed)])
    assert both == {
        f"token-recycling, {labels[0]}": ([1, 8], [2.0, 1.5]),
        f"token-recycling, {labels[1]}": ([1, 8], [1.0, 0.5]),
    }


def test_waves_and_cut_prompts_have_columns_where_a_run_has_them(
    folder: Path, tmp_path: Path
) -> None:
    shutil.rmtree(folder / "inner")
    (folder / "bfloat16-waves-batch-1.json").unlink()
    file = tmp_path / "page.html"

    def headings() -> list[str]:
        assert command(folder, "--output", file).exit_code == 0
        return re.findall("<th>([^<]*)</th>", file.read_text())

    assert not {"waves", "cut prompts"} & set(headings())
    report = json.loads((folder / FILES[1]).read_text())
    report |= {"waves": [{}] * 5, "cut_prompts": 7}
    (folder / FILES[1]).write_text(json.dumps(report))
    found = headings()
    place = found.index("waves")
    assert found[place : place + 2] == ["waves", "cut prompts"]
    table = file.read_text().partition("</table>")[0]
    rows = [re.findall("<td>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert sorted(row[place : place + 2] for row in rows) == [["1", "0"], ["5", "7"]]


def test_wrong_input(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    output = tmp_path / "page.html"
    for arguments, complaint in (
        ((tmp_path / "absent", "--output", output), "is not a folder"),
        ((empty, "--output", output), "has no runs: write some with drafttree bench --output"),
        ((folder, "--output", tmp_path / "absent" / "page.html"), "does not exist"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2
        assert complaint in " ".join(result.output.split())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command(folder, "--output", output)
    assert result.exit_code == 2
    assert "plots need matplotlib" in " ".join(result.output.split())
    assert not output.exists()
