"""The replay's workloads, waves and peers, and the report of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import make_tiny_llama

from drafttree.bench.models import ensure
from recycle_plugin import DynamicTreeDrafter
from scripts.experiments.common import Replayed
from scripts.experiments.token_recycling.foreign_text import read_tokens
from scripts.experiments.token_recycling.known_target import KnownTarget
from scripts.experiments.token_recycling.measure import Bench
from scripts.experiments.token_recycling.peers import replay_ngram, replay_suffix
from scripts.experiments.token_recycling.replay import Text
from scripts.experiments.token_recycling.replay_results import Results, gain, read_runs
from scripts.experiments.token_recycling.report_workloads import by_workload
from scripts.experiments.token_recycling.workloads import Conversation, load_waves, reworded

VOCAB = 128
TASKS: dict[str, Any] = {
    "edit": [["Replace a by b.\n```\nx = a\n```", "```\nx = b\n```"]],
    "agent": [
        [
            ["system", "You have tools."],
            ["user", "Fix it."],
            ["assistant", "<tool_call>read_file</tool_call>"],
            ["tool", "x = 1"],
            ["assistant", "It is fixed."],
        ]
    ],
}


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure("smollm2-135m")


@pytest.fixture
def target(tmp_path: Path) -> KnownTarget:
    folder = make_tiny_llama(tmp_path / "tiny", vocab_size=VOCAB)
    return KnownTarget(folder, tmp_path / "work", 24)


@pytest.fixture
def wave() -> list[Conversation]:
    """Two chats whose given answers the target would not give."""
    draws = torch.randint(2, VOCAB, (2, 60), generator=torch.Generator().manual_seed(5)).tolist()
    return [
        Conversation("a", [Text(i, each[:20], [*each[20:60], *each[30:50]], given=True)])
        for i, each in enumerate(draws)
    ]


def copied_wave() -> list[Conversation]:
    """The answer continues a copy of the prompt that the prompt itself begins."""
    text = list(range(10, 30))
    return [Conversation("a", [Text(0, [*text, 10, 11], text[2:], given=True)])]


@cache
def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def decoded(model: Path, tokens: list[int]) -> str:
    return str(tokenizer_of(model).decode(tokens))


def test_rewording_keeps_the_task() -> None:
    turn = "Create a Python script for this problem:\nWrite a function to find x.\nassert f(1) == 2"
    near = reworded(turn)
    assert near == reworded(turn) != turn
    assert "assert f(1) == 2" in near
    assert "Create a Python script" not in near
    assert "determine x." in near


def test_edits_and_agents_have_their_true_answers(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(TASKS))
    target: Any = SimpleNamespace(ends={2})
    (edits,) = load_waves("edit", file, 40, 1, model, target, 96)
    (text,) = edits[0].texts
    assert text.given
    assert decoded(model, text.answer) == "```\nx = b\n```<|im_end|>"
    assert decoded(model, text.prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")
    agents, again = load_waves("agent", file, 40, 2, model, target, 96)
    assert agents is again
    first, second = agents[0].texts
    assert decoded(model, first.answer) == "<tool_call>read_file</tool_call><|im_end|>"
    assert decoded(model, second.prompt) == (
        decoded(model, first.prompt + first.answer)
        + "\n<|im_start|>tool\nx = 1<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_second_wave_starts_with_what_the_first_taught(
    target: KnownTarget, wave: list[Conversation]
) -> None:
    prompts = [chat.texts[0].prompt for chat in wave]
    own = [Text(i, each, target.begin(each).answer, given=False) for i, each in enumerate(prompts)]
    wave = [Conversation("a", [text]) for text in own]
    bench = Bench(target, [wave, wave], context=128)
    dynamic, cold = (bench.begin(name, 7) for name in ("dynamic", "dynamic cold"))
    progress = list(bench.replay([dynamic, cold], "file"))
    assert len(progress) == 4
    for number in range(2):
        steps = [found[number][0].steps for found in dynamic.found]
        assert steps[1] < steps[0]
    assert cold.found[0] == cold.found[1]


def test_a_batch_replays_every_request(target: KnownTarget, wave: list[Conversation]) -> None:
    bench = Bench(target, [wave], context=128, batch=8)
    dynamic = bench.begin("dynamic", 7)
    list(bench.replay([dynamic], "file"))
    assert [found[0].tokens for _, found in sorted(dynamic.found[0].items())] == [59, 59]


def test_foreign_text_goes_to_the_memory(
    target: KnownTarget, wave: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered: list[list[int]] = []
    monkeypatch.setattr(
        DynamicTreeDrafter,
        "remember",
        lambda self, tokens: remembered.append(list(tokens)),
    )
    bench = Bench(target, [wave], context=128, foreign=[3, 4, 5])
    bench.begin("dynamic", 7)
    assert remembered == [[3, 4, 5]]
    with pytest.raises(ValueError, match="no texts with a static tree"):
        bench.begin("static", 7)


def test_foreign_tokens_are_counted(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n")
    (tmp_path / "b.py").write_text("import sys\n")
    tokens = read_tokens([tmp_path], model, 5)
    assert decoded(model, tokens).startswith("import os\nimport")
    with pytest.raises(ValueError, match="fewer than 100"):
        read_tokens([tmp_path], model, 100)


def test_ngram_drafts_five_tokens_of_a_copy() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    (found,) = replay_ngram([copied_wave()], 2048)
    # After the first token, 17 are left: 5 drafts and the target's token, three times.
    assert found == {0: [Replayed(steps=3, tokens=17, draft_tokens=15)]}


def test_suffix_decoding_keeps_its_cache_from_wave_to_wave() -> None:
    pytest.importorskip("arctic_inference", reason="arctic-inference is not installed here")
    text = Text(0, [5, 6, 7, 8], list(range(10, 34)), given=True)
    first, second = replay_suffix([[Conversation("a", [text])]] * 2)
    assert first == {0: [Replayed(steps=23, tokens=23, draft_tokens=0)]}
    assert second[0][0].steps < 6
    assert second[0][0].draft_tokens >= 23 - second[0][0].steps


def a_run(setting: str, nodes: int, steps: list[int], **conditions: Any) -> dict[str, Any]:
    counts = [[each, 60] for each in steps]
    return {
        **{"setting": setting, "nodes": nodes, "model": "m", "dtype": "float32"},
        **{"prompts": "mbpp.jsonl", "limit": 2, "max_new_tokens": 96, "start": "hot"},
        **{"primed": None, "prompts_done": 2, "by_prompt": counts},
        "mean_accepted_tokens": 120 / sum(steps),
        **conditions,
    }


def test_runs_of_a_workload_are_compared_wave_by_wave(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    usual = a_run("grown primed", 15, [30, 40])
    file.write_text(
        json.dumps(
            [
                usual,
                a_run("dynamic primed", 15, [10, 20], wave=2),
                a_run("dynamic primed", 15, [35, 45], batch=8),
                a_run("suffix", 24, [40, 60]),
                a_run("dynamic primed", 31, [20, 30], prompts_done=1),
            ]
        )
    )
    found = by_workload(read_runs(file))
    assert {title: sorted(runs) for title, runs in found.items()} == {
        "mbpp, 2 chats, wave 1": [("dynamic primed", 15), ("suffix", 24)],
        "mbpp, 2 chats, wave 2": [("dynamic primed", 15)],
        "mbpp, 2 chats, batch 8, wave 1": [("dynamic primed", 15), ("suffix", 24)],
    }
    runs = found["mbpp, 2 chats, wave 1"]
    more, error = gain(runs["dynamic primed", 15], runs["suffix", 24])
    assert more == pytest.approx(120 / 70 - 120 / 100)
    assert 0 < error < more
    results = Results(file)
    waves = [results.prompts_done({**read_runs(file)[0], "wave": wave}) for wave in (1, 2, 3)]
    assert waves == [2, 2, 0]
