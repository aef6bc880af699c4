"""`drafttree trace` on a trace that the real vLLM gave, and the recording itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import rendered
from typer.testing import CliRunner, Result

from drafttree.bench.trace import Trace, read_trace
from drafttree.cli import app
from drafttree.cli.page import html_page
from drafttree.cli.trace_terminal import printable
from drafttree.trace import StepTracer, column_sources
from drafttree.tree import DraftTree, Verified

RECORDED = Path(__file__).parents[1] / "support" / "recorded_trace.json"
"""Written by `drafttree trace --json` with a tiny random model, and with an answer bound to a JSON
schema that was asked for twice."""


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return read_trace(RECORDED)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


# Recording.


class Clock:
    """Advances by a second whenever it is read."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


def ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_a_step_has_its_tree_and_its_times() -> None:
    tracer = StepTracer(torch.device("cpu"), Clock())
    tracer.enter("forward")
    tracer.prompt_read()
    tracer.begin("draft")
    tracer.enter("forward")
    tracer.enter("rest")
    tracer.enter("verify")
    # Column 2 contains no node.
    trees = DraftTree(ids([5, 6, -1, 7, 8]), ids([-1, 0, -1, 0, 3]), ids([5])[0])
    verified = Verified(ids([0, 3, -1]), ids([7, 9, -1]), ids([2])[0])
    tracer.verified(trees, verified, ["", "a", "", "b", "c"])
    tracer.enter("verify")
    tracer.begin()
    (step,) = tracer.steps
    assert [node.model_dump(exclude={"text"}) for node in step.nodes] == [
        {"token": 5, "parent": -1, "source": "", "accepted": True},
        {"token": 6, "parent": 0, "source": "a", "accepted": False},
        {"token": 7, "parent": 0, "source": "b", "accepted": True},
        {"token": 8, "parent": 2, "source": "c", "accepted": False},
    ]
    assert [token.token for token in step.emitted] == [7, 9]
    assert [node.source for node in step.tried] == ["a", "b", "c"]
    # The time of recording itself belongs to no part.
    assert step.seconds.model_dump() == {"draft": 1, "forward": 1, "rest": 1, "verify": 2}
    assert tracer.prompt_seconds.model_dump() == {"draft": 0, "forward": 1, "rest": 1, "verify": 0}


def test_a_step_of_several_requests_is_refused() -> None:
    tracer = StepTracer(torch.device("cpu"))
    trees = DraftTree.of_roots(torch.tensor([3, 4], dtype=torch.int32))
    verified = Verified(ids([0], [0]), ids([1], [2]), ids([1, 1])[0])
    with pytest.raises(ValueError, match="2 requests run together"):
        tracer.verified(trees, verified, [""])


def test_what_grammars_draft_is_named_for_them() -> None:
    proposed = ["", "a", "b"]
    assert column_sources(proposed, None, None) == proposed
    assert column_sources(proposed, [0, 2, -1], None) == ["", "b", "likely under a grammar"]
    forced = [False, True, True]
    sure = "forced by a grammar"
    assert column_sources(proposed, [0, 2, -1], forced) == ["", sure, sure]


# The recorded trace.


def test_the_recorded_trace_has_what_the_pages_show(recorded: Trace) -> None:
    emitted = [token.token for step in recorded.steps for token in step.emitted]
    answer = [token.token for token in recorded.tokens]
    assert [answer[0], *emitted][: len(answer)] == answer
    sources = {row["source"] for row in recorded.by_source()}
    assert "forced by a grammar" in sources
    assert any(source.startswith("memory match of") for source in sources)
    assert "shorter n-gram match" in sources
    assert all(step.seconds.forward > 0 for step in recorded.steps)
    assert all(0 < step.seconds.draft < step.seconds.total for step in recorded.steps)


def test_the_terminal_shows_the_first_steps(recorded: Trace) -> None:
    result = command(RECORDED, "--steps", 2)
    assert result.exit_code == 0, result.output
    first = recorded.steps[0]
    assert re.findall(r"^step (\d+):", result.output, re.M) == ["1", "2"]
    hidden = len(recorded.steps) - 2
    assert f"… {hidden} more steps: --steps {len(recorded.steps)}" in result.output
    accepted = len(first.emitted) - 1
    assert f"{accepted} of {len(first.nodes) - 1} draft tokens accepted" in result.output
    assert result.output.count("bonus token") == 2
    rows = [line.split() for line in result.output.splitlines() if "forced by a grammar  " in line]
    (forced,) = [row for row in recorded.by_source() if row["source"] == "forced by a grammar"]
    assert any(str(forced["tried"]) in row and str(forced["hit"]) in row for row in rows)


def test_rejected_branches_are_counted(recorded: Trace) -> None:
    """Each node is shown, or counted below a rejected one."""
    result = command(RECORDED, "--steps", len(recorded.steps))
    drafted = sum(len(step.nodes) - 1 for step in recorded.steps)
    shown = len(re.findall(r"^[ │├└─]+'.*'  (?!bonus)", result.output, re.M))
    hidden = sum(map(int, re.findall(r"  and (\d+) below", result.output)))
    assert shown + hidden == drafted
    assert "more steps" not in result.output


def test_texts_cannot_control_the_terminal(tmp_path: Path, recorded: Trace) -> None:
    changed = recorded.model_copy(deep=True)
    changed.answer += "\x1b[2J"
    changed.steps[0].bonus.text = "\x1b[2J\r\n"
    file = tmp_path / "control.json"
    file.write_text(changed.model_dump_json())
    output = command(file).output
    assert "'\ufffd[2J␍⏎'  bonus token" in output
    assert "\x1b[2J" not in output


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace.update(prompt=[]),
        lambda trace: trace["steps"][0].update(nodes=[]),
        lambda trace: trace["steps"][0]["nodes"][0].update(parent=0),
        lambda trace: trace["steps"][0]["nodes"][2].update(parent=2),
        lambda trace: trace["steps"][0]["nodes"][2].update(parent=-1),
        lambda trace: trace["steps"][0]["nodes"][2].update(parent=99),
    ],
)
def test_a_broken_trace_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    broken = json.loads(RECORDED.read_text())
    change(broken)
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(broken))
    result = command(file, "--html", tmp_path / "page.html")
    assert result.exit_code == 2
    assert result.output.startswith(f"drafttree trace: {file} is no trace: ")
    assert len(result.output.splitlines()) == 1


def test_texts_of_all_languages_are_shown_as_they_are(tmp_path: Path, recorded: Trace) -> None:
    # A no-break space, a narrow one, an ideographic one, joiners, a direction mark, a soft hyphen
    # and a character that Unicode does not have yet.
    kept = "a\u00a0b\u202fc\u3000d \U0001f469\u200d\U0001f4bb \u200c\u200f\u00ad\U0001fbfa\u0378e"
    removed = "\x00\x9b\r\u202a\u202e\u2066\u2069"
    assert printable(f"{kept}\t\r\n{removed}\ud800\n") == f"{kept}\t\n{8 * chr(0xFFFD)}\n"
    changed = recorded.model_copy(update={"answer": kept})
    file = tmp_path / "languages.json"
    file.write_text(changed.model_dump_json())
    assert f"answer: {kept}\n" in command(file).output


def test_a_trace_is_written_again_as_it_was(tmp_path: Path) -> None:
    result = command(RECORDED, "--json", tmp_path / "again.json")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "again.json").read_text() == RECORDED.read_text()


# The page.


def page_of(tmp_path: Path, recording: Path = RECORDED) -> Path:
    page = tmp_path / "trace.html"
    result = command(recording, "--html", page)
    assert result.exit_code == 0, result.output
    return page


def test_the_files_are_written_where_nobody_reads_the_terminal(tmp_path: Path) -> None:
    """As in `drafttree trace ... | head`."""
    written, page = tmp_path / "trace.json", tmp_path / "trace.html"
    reading, writing = os.pipe()
    os.close(reading)
    command = [str(Path(sys.executable).with_name("drafttree")), "trace", str(RECORDED)]
    command += ["--json", str(written), "--html", str(page)]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert result.returncode != 0
    assert read_trace(written) == read_trace(RECORDED)
    assert "</html>" in page.read_text(encoding="utf-8")


def test_the_page_contains_the_trace_and_refers_to_nothing(tmp_path: Path, recorded: Trace) -> None:
    text = page_of(tmp_path).read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    expected = recorded.model_dump() | {"sources": recorded.by_source()}
    assert json.loads(data) == expected
    assert "default-src 'none'" in text
    assert not re.search(r"<(?:link|img|iframe)|\bsrc=|\bhref=|@import|url\(", text)


def test_texts_cannot_end_the_data(tmp_path: Path, recorded: Trace) -> None:
    """A model may write HTML."""
    changed = recorded.model_copy(update={"answer": "</script><img src=x>"})
    recording = tmp_path / "html.json"
    recording.write_text(changed.model_dump_json())
    text = page_of(tmp_path, recording).read_text()
    assert text.count("</script>") == 2
    assert "<img" not in text


def test_halves_of_characters_are_escaped() -> None:
    assert "<title>\\udcff</title>" in html_page("\udcff", "")


def current(dom: str) -> dict[str, Any]:
    """What a page shows of its current step."""
    (tree,) = re.findall(r'<svg id="tree".*?</svg>', dom, re.S)
    return {
        "number": re.findall(r'id="number">(.*?)<', dom)[0],
        "outcome": re.findall(r'id="outcome"[^>]*>(.*?)</p>', dom)[0],
        "nodes": len(re.findall(r"<rect", tree)),
        "accepted": len(re.findall(r'<g class="accepted"', tree)),
        "now": len(re.findall(r'<span class="now(?: bonus)?">', dom)),
    }


@pytest.mark.parametrize(
    ("keys", "step"),
    [
        ((), 0),
        (("ArrowRight",), 1),
        (("ArrowRight", "ArrowRight", "ArrowLeft"), 1),
        (("End", "ArrowRight"), -1),
        (("End", "Home", "ArrowLeft"), 0),
    ],
)
def test_keys_step_through_the_answer(
    tmp_path: Path, recorded: Trace, keys: tuple[str, ...], step: int
) -> None:
    pressed = "".join(
        f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}));" for key in keys
    )
    shown = current(rendered(page_of(tmp_path), pressed))
    steps = recorded.steps
    at = steps[step]
    assert shown["number"] == f"Step {step % len(steps) + 1} of {len(steps)}"
    assert shown["nodes"] == len(at.nodes) + 1
    assert shown["accepted"] == len(at.emitted)
    accepted = len(at.emitted) - 1
    outcome = f"{accepted} of {len(at.nodes) - 1} draft tokens accepted"
    assert shown["outcome"].startswith(outcome)
    before = sum(len(each.emitted) for each in steps[: step % len(steps)])
    assert shown["now"] == min(len(at.emitted), len(recorded.tokens) - 1 - before)


# Wrong input, which is refused before an engine starts.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give --method and --model, or a trace"),
        (["--method", "token-recycling"], "give --method and --model"),
        (["--method", "oracle", "--model", "MODEL"], "unknown method 'oracle'"),
        (["--method", "ngram", "--model", "MODEL"], "--method ngram drafts no trees"),
        (["--method", "none", "--model", "MODEL"], "--method none drafts no trees"),
        (["--method", "rsd", "--model", "MODEL"], "RSD needs the option 'model'"),
        (["--method", "token-recycling", "--model", "absent"], "is not a model folder"),
        (
            ["--method", "token-recycling", "--model", "MODEL", "--option", "nodes"],
            "expected KEY=VALUE",
        ),
        (
            ["--method", "token-recycling", "--model", "MODEL", "--engine", "steam"],
            "unknown engine 'steam'",
        ),
        (
            ["--method", "token-recycling", "--model", "MODEL", "--prompt", "a", "--index", "1"],
            "leave --prompts and --index out",
        ),
        (
            ["--method", "token-recycling", "--model", "MODEL", "--index", "100000"],
            "--index 100000: there are ",
        ),
        (
            ["--method", "token-recycling", "--model", "MODEL", "--max-new-tokens", "128"],
            "below the context of 128 tokens",
        ),
        (
            ["--method", "token-recycling", "--model", "MODEL", "--html", "absent/trace.html"],
            "the folder of absent/trace.html does not exist",
        ),
        (["MODEL/config.json"], "is no trace"),
        (["absent.json"], "cannot read absent.json"),
        ([str(RECORDED), "--method", "rsd"], "is a trace already: leave out --method"),
        (
            [str(RECORDED), "--option=a=b", "--temperature=0", "--engine=vllm", "--steps=1"],
            "is a trace already: leave out --engine, --temperature, --option",
        ),
        ([str(RECORDED), "--compiled", "--verbose"], "leave out --eager/--compiled, --verbose"),
    ],
)
def test_wrong_input(model: Path, arguments: list[str], complaint: str) -> None:
    result = command(*(each.replace("MODEL", str(model)) for each in arguments))
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.output.split())
