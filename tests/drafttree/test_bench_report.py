"""The parts of the bench that need no engine: prompts, options, comparisons and counts."""

from __future__ import annotations

import json
import sys
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from drafttree.bench.cost import mean_context
from drafttree.bench.draft_figures import draft_figures
from drafttree.bench.errors import EngineError, InputError
from drafttree.bench.methods import BenchMethod, check_engine, parse_pairs, resolve_method
from drafttree.bench.prompts import Prompt, default_prompts_path, load_prompts
from drafttree.bench.protocol import Generation
from drafttree.bench.report import (
    Repetition,
    check_counters,
    first_difference,
    report,
    without_times,
)
from drafttree.bench.table import (
    category_table,
    choices_table,
    comparison_table,
    explained_table,
    figures_table,
)
from drafttree.budget.tier_explanation import TierChoice
from drafttree.cli import app


def answer(tokens: list[int], steps: int, seconds: float) -> Generation:
    """An answer whose first token comes from the prefill, which takes a third of the time."""
    return Generation(
        prompt_tokens=10,
        token_ids=tokens,
        steps=steps,
        step_tokens=len(tokens) - 1,
        seconds=seconds,
        decode_tokens=len(tokens) - 1,
        decode_seconds=seconds * 2 / 3,
    )


def test_shipped_prompts() -> None:
    prompts = load_prompts(default_prompts_path())
    assert len(prompts) == 40
    assert len({prompt.question_id for prompt in prompts}) == 40
    categories = Counter(prompt.category for prompt in prompts)
    assert len(categories) == 13
    assert min(categories.values()) >= 3
    assert sum(len(prompt.turns) == 2 for prompt in prompts) >= 5


def test_shipped_prompts_with_schemas() -> None:
    prompts = load_prompts(default_prompts_path().parent / "prompts" / "structured.jsonl")
    assert len({prompt.question_id for prompt in prompts}) == len(prompts) == 60
    assert set(Counter(prompt.category for prompt in prompts).values()) == {15}
    for prompt in prompts:
        assert prompt.schema is not None
        schema = json.loads(prompt.schema)
        assert schema.get("type") == "object" or schema.keys() == {"anyOf"}


def test_lines_beyond_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    good = json.dumps({"question_id": 1, "category": "qa", "turns": ["Why?"]})
    path.write_text(f"{good}\n\n{good}\nnonsense\n")
    assert load_prompts(path, 2) == [Prompt(1, "qa", ("Why?",))] * 2
    with pytest.raises(InputError, match="line 4: not JSON"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question_id": 1, "turns": ["a"]}', "missing category"),
        ('{"question_id": 1, "category": "qa", "turns": []}', "turns must be"),
        ('{"question_id": 1, "category": "qa", "turns": "a"}', "turns must be"),
        ('{"question_id": [], "category": "qa", "turns": ["a"]}', "question_id must be"),
        ('{"question_id": 1, "category": 2, "turns": ["a"]}', "category must be"),
        ('{"question_id": 1, "category": "a", "turns": ["a"], "schema": "b"}', "schema must be"),
        ('{"question_id": 1, "category": "a", "messages": []}', "messages must be a non-empty"),
        ('{"question_id": 1, "category": "a", "messages": "b"}', "messages must be a list"),
        (
            '{"question_id": 1, "category": "a", "messages": [{"role": "user"}]}',
            "messages whose content is a string",
        ),
        (
            '{"question_id": 1, "category": "a", "messages": [{"role": "system", "content": "b"}]}',
            "must have the role user",
        ),
        (
            r'{"question_id": 1, "category": "a", "turns": ["b", "\ud83d"]}',
            r"line 1: the prompt has a lone surrogate, '\\ud83d'",
        ),
        (r'{"question_id": "\ud83d", "category": "a", "turns": ["b"]}', "line 1: .* half of a"),
        (r'{"question_id": 1, "category": "\ud83d", "turns": ["b"]}', "line 1: .* half of a"),
        (
            r'{"question_id": 1, "category": "a", "turns": ["b"], "schema": {"const": "\ud83d"}}',
            "line 1: .* half of a",
        ),
        ("[]", "expected a JSON object"),
        ("", "no prompts"),
    ],
)
def test_bad_prompts(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match=complaint):
        load_prompts(path)


def test_pairs_of_surrogates_are_characters(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(r'{"question_id": 1, "category": "qa", "turns": ["\ud83d\ude00"]}')
    assert load_prompts(path) == [Prompt(1, "qa", ("\U0001f600",))]


def test_absent_prompts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the prompts"):
        load_prompts(tmp_path / "absent.jsonl")


# A row of SPEED-Bench: the fields that its data card lists.
SPEED_BENCH = {
    "question_id": "8a3f",
    "category": "coding",
    "sub_category": "javascript",
    "turns": ["Write a loop.", "Make it shorter."],
    "source": "https://example.org/questions",
    "src_id": "questions_17",
    "difficulty": "medium",
    "multiturn": True,
}


def test_speed_bench_with_turns_and_with_messages(tmp_path: Path) -> None:
    """The hub's fields, and those of the files that SPEED-Bench's prepare.py writes."""
    messages = [{"role": "user", "content": turn} for turn in SPEED_BENCH["turns"]]
    prepared = {name: value for name, value in SPEED_BENCH.items() if name != "turns"}
    path = tmp_path / "qualitative.jsonl"
    path.write_text(f"{json.dumps(SPEED_BENCH)}\n{json.dumps(prepared | {'messages': messages})}\n")
    expected = Prompt("8a3f", "coding", ("Write a loop.", "Make it shorter."))
    assert load_prompts(path) == [expected, expected]


def test_placeholders_of_speed_bench_are_refused(tmp_path: Path) -> None:
    placeholder = (
        "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nAnswer this."
    )
    path = tmp_path / "qualitative.jsonl"
    path.write_text(json.dumps(SPEED_BENCH | {"turns": [placeholder]}))
    with pytest.raises(InputError, match=r"line 1: SPEED-Bench has a placeholder.*prepare\.py"):
        load_prompts(path)


def test_prompts_in_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "test-00000-of-00001.parquet"
    rows = [SPEED_BENCH, SPEED_BENCH | {"question_id": "b", "turns": ["Why?"]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = load_prompts(path)
    assert [prompt.question_id for prompt in found] == ["8a3f", "b"]
    assert found[0].turns == ("Write a loop.", "Make it shorter.")
    assert load_prompts(path, 1) == found[:1]
    parquet.write_table(pyarrow.Table.from_pylist([SPEED_BENCH | {"turns": []}]), path)
    with pytest.raises(InputError, match="row 1: turns must be"):
        load_prompts(path)
    path.write_text("no Parquet")
    with pytest.raises(InputError, match="cannot read the prompts"):
        load_prompts(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pip install pyarrow, or give the prompts as JSON lines"):
        load_prompts(tmp_path / "test.parquet")


def test_options() -> None:
    pairs = ["nodes=80", "tree=beam:3x5", "flag=true", 'name="7"', "empty="]
    assert parse_pairs(pairs) == {
        "nodes": 80,
        "tree": "beam:3x5",
        "flag": True,
        "name": "7",
        "empty": "",
    }
    for bad in (["nodes"], ["=3"], ["a=1", "a=2"], ["method=ngram"]):
        with pytest.raises(InputError, match="--option"):
            parse_pairs(bad)


def test_engine_methods() -> None:
    assert resolve_method("none", {}).speculative_config is None
    ngram = resolve_method("ngram", {"num_speculative_tokens": 3})
    assert ngram.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }
    with pytest.raises(InputError, match="takes no options"):
        resolve_method("none", {"nodes": 3})


def test_suffix_decoding_is_refused_with_the_way_to_build_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suffix = resolve_method("suffix", {"suffix_decoding_max_tree_depth": 64})
    assert suffix.speculative_config == {"method": "suffix", "suffix_decoding_max_tree_depth": 64}
    assert suffix.learns
    assert not suffix.drafts_trees
    with pytest.raises(InputError, match="use --engine vllm"):
        check_engine("sglang", suffix)
    monkeypatch.setattr("drafttree.bench.methods.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install .* arctic-inference==0\.3\.0"):
        check_engine("vllm", suffix)
    monkeypatch.setattr("drafttree.bench.methods.find_spec", lambda name: name)
    check_engine("vllm", suffix)


def test_the_demo_refuses_what_an_engine_cannot_run() -> None:
    result = CliRunner().invoke(app, ["demo", "--engine", "sglang", "--method", "ngram"])
    assert result.exit_code == 2
    assert "cannot verify drafts" in " ".join(result.output.split())


def test_a_draft_model_of_vllm() -> None:
    drafted = resolve_method("draft_model", {"model": "DRAFT", "num_speculative_tokens": 3})
    assert drafted.speculative_config == {
        "method": "draft_model",
        "model": "DRAFT",
        "num_speculative_tokens": 3,
    }
    assert drafted.draft_model == "DRAFT"
    assert not drafted.drafts_trees
    assert not drafted.learns
    check_engine("vllm", drafted)
    with pytest.raises(InputError, match=r"need a GPU or a CPU with AMX, .* --method rsd"):
        check_engine("sglang", drafted)
    with pytest.raises(InputError, match="--option model=FOLDER"):
        resolve_method("draft-model", {})


@pytest.mark.parametrize("name", ["draft-model", "ngram"])
def test_speculation_of_vllm_is_not_measured_at_a_temperature_on_a_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = resolve_method(name, {"model": "DRAFT"} if name == "draft-model" else {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=r"--temperature 0\.7 on a CPU.* Use --temperature 0"):
        check_engine("vllm", method, 0.7)
    for others in ("none", "token-recycling"):
        check_engine("vllm", resolve_method(others, {}), 0.7)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_engine("vllm", method, 0.7)


def test_tree_methods() -> None:
    for name in ("token-recycling", "token_recycling"):
        method = resolve_method(name, {"nodes": 15})
        assert method.name == "token-recycling"
        assert method.speculative_config == {"method": "token_recycling", "nodes": 15}
        assert method.max_draft_tokens == 15
    with pytest.raises(InputError, match=r"token_recycling, besides none and .* ngram"):
        resolve_method("oracle", {})
    with pytest.raises(InputError, match="no option 'leaves'"):
        resolve_method("token-recycling", {"leaves": 3})


def test_first_difference() -> None:
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == (1, 1)
    assert first_difference([[1, 2], [3]], [[1], [9]]) == (0, 1)
    assert first_difference([[]], [[4]]) == (0, 0)


def test_figures() -> None:
    prompts = [Prompt(1, "qa", ("a", "b")), Prompt(2, "math", ("c",))]
    plain = [[answer([1, 2, 3], 2, 3.0), answer([4, 5, 6], 2, 3.0)], [answer([7, 8, 9], 2, 3.0)]]
    method = [[answer([1, 2, 3], 1, 1.5), answer([4, 5, 6], 2, 3.0)], [answer([7, 8, 0], 1, 1.5)]]
    slow = [[answer([1, 2, 3], 1, 15.0), answer([4, 5, 6], 2, 30.0)], [answer([7, 8, 0], 1, 15.0)]]
    repetitions = [Repetition(plain, method), Repetition(plain, slow), Repetition(plain, method)]
    costs = {"verify_cost": 1.25, "chain_cost": 1.2, "cost_tokens": 8}
    result = report(prompts, repetitions, ["identical", "tie"], costs)
    assert (result["new_tokens"], result["steps"], result["baseline_steps"]) == (9, 4, 6)
    assert result["mean_accepted_tokens"] == pytest.approx(6 / 4)
    assert result["baseline_mean_accepted_tokens"] == 1.0
    assert result["tokens_per_second"] == pytest.approx(9 / 6)
    assert result["baseline_tokens_per_second"] == pytest.approx(1.0)
    assert result["speedup"] == pytest.approx(1.5)
    assert result["decode_speedup"] == pytest.approx(1.5)
    assert result["possible_decode_speedup"] == pytest.approx(1.5 / 1.25)
    assert (result["prompts"], result["identical"], result["ties"]) == (2, 1, 1)
    assert result["differing"] == [2]
    assert [round(single["speedup"], 3) for single in result["repetitions"]] == [1.5, 0.15, 1.5]
    assert result["per_category"]["math"]["mean_accepted_tokens"] == 2.0
    assert result["per_category"]["qa"]["speedup"] == pytest.approx(6 / 4.5)
    table = figures_table({"method": "ngram", **result})
    assert table.row_count == 10
    assert category_table(result).row_count == 2


def test_figures_without_decode_steps() -> None:
    one = [[Generation(prompt_tokens=3, token_ids=[5], seconds=1.0)]]
    result = report([Prompt(1, "qa", ("a",))], [Repetition(one, one)], ["identical"], {})
    assert result["mean_accepted_tokens"] is None
    assert result["decode_speedup"] is None
    assert result["speedup"] == 1.0
    assert figures_table({"method": "none", **result}).row_count == 7


def test_times_that_mean_nothing_are_left_out() -> None:
    plain, method = [[answer([1, 2, 3, 4], 3, 6.0)]], [[answer([1, 2, 3, 4], 2, 3.0)]]
    timed = report([Prompt(1, "qa", ("a",))], [Repetition(plain, method)], ["identical"], {})
    assert timed["speedup"] == 2
    counted = without_times(timed)
    assert counted.keys() == timed.keys()
    for figures in (counted, counted["per_category"]["qa"], counted["repetitions"][0]):
        assert figures["speedup"] is figures["baseline_tokens_per_second"] is None
        assert figures["steps"] == 2
    assert counted["mean_accepted_tokens"] == timed["mean_accepted_tokens"] == 1.5
    table = figures_table(counted | {"method": "token-recycling"})
    console = Console(width=100, record=True, file=StringIO())
    console.print(table)
    assert "1.50" in console.export_text()


def test_runs_are_compared_by_what_was_varied() -> None:
    figures = {
        **{"mean_accepted_tokens": 2.345, "speedup": 1.2, "decode_speedup": None},
        **{"mbsu": 1.5, "draft_time_share": 0.25, "identical": 3, "prompts": 4},
    }
    reports = [
        {
            **figures,
            "options": {"model": "somewhere", "tree": tree},
            "counters": {"drafted_steps": 10, "draft_tokens": 10 * nodes},
        }
        for tree, nodes in (("branch:2-1-1-1-1-1-1", 14), ("beam:2x7", 13.5))
    ]
    console = Console(width=80, record=True, file=StringIO())
    console.print(comparison_table(reports))
    text = console.export_text()
    assert "somewhere" not in text
    for cell in ("tree", "branch:2-1-1-1-1-1-1", "14.0", "2.35", "1.50", "0.25", "1.20", "3/4"):
        assert cell in text


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_is_shown_if_any_run_has_its_figure(first: int) -> None:
    """RSD with `tree=auto` has no memory-bound speedup, and on V2 no time spent drafting."""
    figures = {
        **{"mean_accepted_tokens": 2.0, "speedup": 1.2, "decode_speedup": 1.3},
        **{"identical": 3, "prompts": 4, "counters": {}},
    }
    reports = [
        {**figures, "options": {"tree": "beam:3x3"}, "mbsu": 1.57, "draft_time_share": 0.25},
        {**figures, "options": {"tree": "auto"}},
    ]
    console = Console(width=100, record=True, file=StringIO())
    console.print(comparison_table([reports[first], reports[1 - first]]))
    text = console.export_text()
    assert "MBSU" in text
    assert "drafting" in text
    rows = [line.replace("│", " ").split() for line in text.splitlines() if "3/4" in line]
    cells = [["beam:3x3", "2.00", "1.57", "0.25", "1.20", "1.30", "3/4"]]
    cells.append(["auto", "2.00", "1.20", "1.30", "3/4"])
    assert rows == [cells[first], cells[1 - first]]


def write_weights(folder: Path, name: str, size: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\0" * size)
    return folder


def test_the_memory_bound_speedup_needs_the_sizes_of_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_weights(tmp_path / "target", "model.safetensors", 100)
    draft = write_weights(tmp_path / "draft", "model.safetensors", 25)
    unknown = write_weights(tmp_path / "unknown", "pytorch_model.bin", 25)
    monkeypatch.setattr(
        "drafttree.bench.draft_figures.local_folder",
        lambda model: draft if model == "somebody/draft" else Path(model),
    )
    repetition = Repetition([], [[answer([1, 2, 3, 4], 2, 4.0)]])

    def figures(draft: str, target: Path) -> dict[str, float]:
        method = BenchMethod(
            "rsd", {}, {}, max_draft_tokens=4, draft_forwards=2, draft_model=draft, timed=True
        )
        return draft_figures(repetition, method, target, 1.0)

    known = {
        **{"block_efficiency": 1.5, "mbsu": 1.5 / 1.5},
        **{"draft_size_ratio": 0.25, "draft_time_share": 0.25},
    }
    assert figures(str(draft), target) == figures("somebody/draft", target) == known
    for pair in ((str(unknown), target), (str(draft), unknown)):
        assert figures(*pair) == {"block_efficiency": 1.5, "draft_time_share": 0.25}


def test_tables_of_sizes_have_empty_cells_without_times() -> None:
    row = TierChoice(7, "best", 2, 15, 1.25, (0, 7), (1.0, 2.0), (0.01, 0.011)).row()
    explained = {"num_draft_tokens": 7, "observed_ms": 1.5, "realised_tokens": 2.25}
    report = without_times({"choices": [row], "explained": [explained]})
    output = StringIO()
    Console(file=output, width=80).print(choices_table(report), explained_table(report))
    rows = [line.split() for line in output.getvalue().splitlines() if " 7 " in line]
    assert rows == [["7", "best", "2", "15"], ["7", "2.25"]]


def test_mean_context_weighs_answers_by_their_tokens() -> None:
    short, long = answer([1, 2], 1, 1.0), answer([1] * 6, 5, 1.0)
    long.prompt_tokens = 100
    assert mean_context([[short], [long]]) == round((2 * 11 + 6 * 103) / 8)
    assert mean_context([]) == 0


def test_counters_must_agree() -> None:
    repetition = Repetition([], [[answer([1, 2, 3, 4], 2, 1.0)]])
    good = {"steps": 2, "emitted": 3, "accepted_tokens": 1}
    check_counters(repetition, good)
    check_counters(repetition, {**good, "emitted": 4})
    for wrong in ({"steps": 3}, {"emitted": 2}, {"emitted": 5}):
        with pytest.raises(EngineError, match="disagree"):
            check_counters(repetition, {**good, **wrong})
    # A step that was scheduled before the answer's end was known may have emitted more.
    later = {"steps": 3, "emitted": 5, "accepted_tokens": 1}
    check_counters(repetition, later, ahead=True)
    for wrong in ({"steps": 4}, {"steps": 1}, {"emitted": 6}):
        with pytest.raises(EngineError, match="disagree"):
            check_counters(repetition, {**later, **wrong}, ahead=True)


def test_the_last_choices_of_a_scheduler_are_a_table() -> None:
    choices = [
        TierChoice(7, "best", 2, 15, 1.0 + index / 100, (0, 7), (1.0, 2.0), (0.01, 0.011)).row()
        for index in range(20)
    ]
    output = StringIO()
    Console(file=output, width=80).print(choices_table({"choices": choices}))
    rows = [line.split() for line in output.getvalue().splitlines() if "best" in line]
    assert rows == [["7", "best", "2", "15", f"{1 + index / 100:.2f}"] for index in range(4, 20)]
