"""Token Recycling gives plain decoding's tokens with all kinds of options, in both engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hosts import Answer, Case, Host, on_v2_too
from random_prompts import some_prompts
from recycling_options import OPTIONS

from recycle_plugin.storage.table_files import TableSpec, load_tables

GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
FIRST = some_prompts(12)
# A second turn after each prompt, with chunked prefill beside the other requests.
SECOND = [prompt + more for prompt, more in zip(FIRST, some_prompts(12, 4, 300), strict=True)]
CASES = [Case(FIRST, GREEDY), Case(SECOND, GREEDY)]
CHUNKS = {"vllm": 400, "sglang": 128}


def serve(host: Host, model: Path, cases: list[Case], options: dict[str, Any]) -> Any:
    chunk = CHUNKS[host.name]
    return host.run(model, cases, "token-recycling", options, running=4, chunk=chunk)


@cache
def plain_answers(host: Host, model: Path) -> list[Answer]:
    served, _ = host.run(model, CASES, running=4)
    return served


MAIN = ("the paper's static tree", "dynamic, many nodes", "dynamic, primed")
"""Settings that are tested always; the full product tests all."""


@on_v2_too
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=() if name in MAIN else pytest.mark.full, id=name)
        for name, options in OPTIONS.items()
    ],
)
def test_tokens_equal_plain_decoding(
    host: Host,
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    options: dict[str, object],
) -> None:
    served, log = serve(host, tiny_llama, CASES, options)
    for drafted, plain in zip(served, plain_answers(host, tiny_llama), strict=True):
        assert drafted.tokens == plain.tokens
        assert drafted.counters["accepted_tokens"] > 0
        if options.get("nodes") != 3:
            proves_drafting(drafted)
    assert ("Token Recycling is primed" in log) == bool(options.get("prime"))


def test_auto_drafts_where_it_pays(host: Host, tiny_llama: Path) -> None:
    """Which tree sizes pay depends on the machine, but for a repeated text some always do."""
    case = Case(FIRST[:1], {**GREEDY, "max_tokens": 300}, rounds=3)
    (plain,), _ = host.run(tiny_llama, [case], running=1)
    (drafted,), _ = host.run(tiny_llama, [case], "token-recycling", {"nodes": "auto"}, running=1)
    assert drafted.tokens == plain.tokens
    assert drafted.counters["accepted_tokens"] > 10
    assert drafted.counters["steps"] > drafted.counters["drafted_steps"] > 0


@on_v2_too
def test_tables_are_saved_to_a_file_and_loaded_from_it(
    host: Host, tiny_llama: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tables" / "learned.safetensors"
    options = {"nodes": 31, "hot_start": str(file)}
    once = [Case(FIRST[:1], GREEDY)]
    (cold,), _ = serve(host, tiny_llama, once, options)
    (answer,) = cold.tokens
    remembered = load_tables(file, {"memory": TableSpec((None,))}, {})["memory"].tolist()
    places = range(len(remembered))
    assert any(remembered[at : at + len(answer)] == answer for at in places)
    (warm,), _ = serve(host, tiny_llama, once, options)
    assert warm.tokens == cold.tokens == [plain_answers(host, tiny_llama)[0].tokens[0]]
    # More than a tree of eight levels without a copy of the answer can give.
    assert warm.counters["accepted_tokens"] > 12 * warm.counters["drafted_steps"]
    assert warm.counters["steps"] < 0.7 * cold.counters["steps"]

    content = file.read_bytes()
    file.write_bytes(content[:-100])
    (again,), log = serve(host, tiny_llama, once, options)
    assert again.tokens == cold.tokens
    assert again.counters == cold.counters
    assert "learned.safetensors is damaged" in log
    assert file.read_bytes() == content[:-100]


@on_v2_too
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a batch"])
def test_finished_answers_are_copied_when_they_come_again(
    host: Host, tiny_llama: Path, together: bool
) -> None:
    """Greedy requests and, in vLLM, seeded ones, whose answers are the same the second time."""
    sampling = [{**GREEDY, "max_tokens": 120} for _ in range(4)]
    if host.name == "vllm":
        sampling[1] |= {"temperature": 0.9, "seed": 1}
        sampling[2] |= {"repetition_penalty": 1.1}
        sampling[3] |= {"temperature": 1.2, "seed": 3}
    waves = [Case(FIRST[:4], sampling, together=together)] * 2
    (plain,), _ = host.run(tiny_llama, waves[:1], running=4)
    kept, _ = serve(host, tiny_llama, waves, {"nodes": 80, "prime": False})
    forgotten, _ = serve(host, tiny_llama, waves, {"nodes": 80, "prime": False, "memory": 0})
    assert [wave.tokens for wave in (*kept, *forgotten)] == [plain.tokens] * 4
    # More than a tree of eight levels without a spine can give.
    copied, steps = kept[1].counters["accepted_tokens"], kept[1].counters["drafted_steps"]
    assert copied / steps > 12
    assert kept[1].counters["steps"] < 0.6 * forgotten[1].counters["steps"]
