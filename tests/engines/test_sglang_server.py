"""SGLang's OpenAI server with draft trees: chats of many clients, metrics, and its benchmark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import bench_conversations
import httpx
import pytest
from awaited import wait_until
from bench_conversations import COUNT, write_conversations
from bound_answers import called_arguments, object_answer
from openai import OpenAI
from openai_chats import (
    BEST,
    LONG,
    QUESTIONS,
    TOKENS,
    Reply,
    ask_at_once,
    best_of,
    chat_prompts,
    check_equal,
    hang_up,
    request_of,
)
from sglang_runs import Case, environment, run_sglang
from sglang_server import counters_of, serving

from scripts.server_process import is_up

DATASETS_STUB = Path(__file__).parents[1] / "support" / "datasets_stub"
TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = (
        *("--served-model-name", "smollm2", "--enable-metrics"),
        *("--grammar-backend", "xgrammar", "--tool-call-parser", "hermes"),
        "--constrained-json-disable-any-whitespace",
        # SGLang counts acceptance once in so many steps.
        *("--decode-log-interval", "5"),
    )
    folder = tmp_path_factory.mktemp("server")
    with serving(smollm2, {"nodes": 32}, folder, *arguments) as address:
        yield address


def streamed(address: str, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    """The choices of a streamed answer, piece by piece."""
    found = []
    request = body | {"stream": True}
    with httpx.stream("POST", f"{address}{path}", json=request, timeout=120) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"]
    return found


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> list[Reply]:
    """Greedy answers without a method: to the questions, and to TEXT as a completion."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [*chat_prompts(tokenizer), tokenizer(TEXT)["input_ids"]]
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS}
    case = Case(prompts, sampling, together=False, logprobs=BEST)
    (found,), _ = run_sglang(smollm2, [case], drafted=False, skip_tokenizer_init=False)
    return [
        Reply(text or "", reason, logprobs, [best_of(each.values()) for each in best])
        for text, reason, logprobs, best in zip(
            found.texts, found.reasons, found.logprobs, found.top_logprobs, strict=True
        )
    ]


def test_answers_are_those_of_plain_decoding(server: str, plain: list[Reply]) -> None:
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": TOKENS}
    chat = settings | request_of(QUESTIONS[0])
    whole = httpx.post(f"{server}/v1/chat/completions", json=chat, timeout=120).json()
    assert whole["choices"][0]["message"]["content"] == plain[0].text
    pieces = [
        each["delta"].get("content") or ""
        for each in streamed(server, "/v1/chat/completions", chat)
    ]
    assert "".join(pieces) == plain[0].text
    assert len([piece for piece in pieces if piece]) > 2

    completion = settings | {"prompt": TEXT}
    whole = httpx.post(f"{server}/v1/completions", json=completion, timeout=120).json()
    assert whole["choices"][0]["text"] == plain[-1].text
    pieces = [each["text"] for each in streamed(server, "/v1/completions", completion)]
    assert "".join(pieces) == plain[-1].text


@pytest.mark.parametrize("samples", [1, pytest.param(3, marks=pytest.mark.full)])
def test_many_clients_at_once(samples: int, server: str, plain: list[Reply]) -> None:
    """With OpenAI's client, streamed and whole, logprobs included: plain decoding's answers."""
    # Nothing that was learned, or counted, remains.
    assert httpx.post(f"{server}/flush_cache", timeout=60).status_code == 200
    found = ask_at_once(server, n=samples)
    check_equal(found, [[reply] * samples for reply in plain[:-1]])
    counters = counters_of(server)
    for name in ("accepted_tokens", "non_first_child_accepted", "kv_rows_moved"):
        assert counters[name] > 0


def metric(address: str, name: str) -> float:
    page = httpx.get(f"{address}/metrics", timeout=10).text
    found = re.findall(rf"^sglang:{name}{{.*}} (\S+)$", page, re.MULTILINE)
    assert found, page[-2000:]
    return sum(map(float, found))


def test_clients_that_hang_up(server: str, plain: list[Reply]) -> None:
    """Their requests end, the KV cache is free again, and later answers are right."""
    before = counters_of(server)
    left = hang_up(server)
    names = ("num_running_reqs", "num_queue_reqs", "num_used_tokens")
    wait_until(
        lambda: not any(metric(server, name) for name in names),
        "a request that was left did not end, or keeps its KV cache",
    )
    after = counters_of(server)
    assert after["emitted"] - before["emitted"] < left * LONG / 2
    assert after["accepted_tokens"] > before["accepted_tokens"]
    check_equal(ask_at_once(server), [[reply] for reply in plain[:-1]])


@pytest.mark.full
def test_its_own_benchmark(server: str, smollm2: Path, tmp_path: Path) -> None:
    """`sglang.bench_serving`: all requests are answered, and it finds that drafts are accepted."""
    result_file = tmp_path / "result.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--base-url", server, "--model", str(smollm2), "--served-model-name", "smollm2"),
        *("--dataset-name", "sharegpt"),
        *("--dataset-path", str(write_conversations(tmp_path / "conversations.json"))),
        *("--num-prompts", str(COUNT), "--sharegpt-output-len", str(bench_conversations.TOKENS)),
        *("--max-concurrency", "4", "--flush-cache", "--output-file", str(result_file)),
    ]
    stub = None if find_spec("datasets") else str(DATASETS_STUB)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), stub)))
    variables = os.environ | environment() | {"PYTHONPATH": path}
    run = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(result_file.read_text())
    assert result["completed"] == COUNT
    assert result["total_output_tokens"] == COUNT * bench_conversations.TOKENS
    assert result["accept_length"] > 1.2
    # The client flushes the cache before it measures, which sets the counters to zero.
    counters = counters_of(server)
    assert counters["non_first_child_accepted"] > 0
    assert counters["emitted"] >= COUNT * (bench_conversations.TOKENS - 1)


def test_beam_search_is_refused_and_the_server_goes_on(server: str) -> None:
    body = {"text": "Once", "sampling_params": {"beam_width": 2, "max_new_tokens": 4}}
    refused = httpx.post(f"{server}/generate", json=body, timeout=60)
    assert refused.status_code == 400
    assert "not supported with speculative decoding" in refused.text
    assert is_up(server)


def test_the_accept_length_is_in_the_metrics(server: str) -> None:
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    for _ in range(2):
        body = settings | request_of(QUESTIONS[0])
        httpx.post(f"{server}/v1/chat/completions", json=body, timeout=120)
    assert metric(server, "spec_accept_length") > 1.2
    assert counters_of(server)["non_first_child_accepted"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("ask", "least"), [(called_arguments, 1.0), (object_answer, 0.2)])
def test_bound_answers(ask: Callable[..., str], least: float, server: str) -> None:
    """With OpenAI's client: the same answers as without drafts, `least` drafts accepted a step."""
    client = OpenAI(base_url=f"{server}/v1", api_key="none")

    before = counters_of(server)
    plain = ask(client, 96, {"custom_params": {"drafttree": False}})
    undrafted = counters_of(server)
    assert undrafted["draft_tokens"] == before["draft_tokens"]
    drafted = ask(client, 96, {"custom_params": {"drafttree": True}})
    assert drafted == plain
    after = counters_of(server)
    accepted, steps = (
        after[name] - undrafted[name] for name in ("accepted_tokens", "drafted_steps")
    )
    assert accepted > least * steps > 0


def test_a_corpus_is_drafted_from_until_the_cache_is_flushed(server: str) -> None:
    poem = "Nine hundred violet otters paint the library ceiling while the harbour sleeps, " * 3
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    chat = [{"role": "user", "content": f"Say: {poem}"}]
    body = settings | {"messages": chat}

    def ask() -> str:
        answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=120).json()
        return str(answer["choices"][0]["message"]["content"])

    def corpora() -> dict[str, int]:
        listed = httpx.get(f"{server}/list_external_corpora", timeout=20).json()
        assert listed["success"], listed
        return dict(listed["corpus_token_counts"])

    plain = ask()
    given = {"corpus_id": "poem", "documents": [poem, "Another document."]}
    added = httpx.post(f"{server}/add_external_corpus", json=given, timeout=60).json()
    assert added["success"], added
    assert added["loaded_token_count"] > 40
    assert corpora() == {"poem": added["loaded_token_count"]}
    assert ask() == plain
    again = httpx.post(f"{server}/add_external_corpus", json=given, timeout=60).json()
    assert not again["success"]
    assert "already" in again["message"]
    removed = httpx.post(f"{server}/remove_external_corpus", json=given, timeout=60).json()
    assert not removed["success"]
    assert "flush_cache" in removed["message"]
    assert httpx.post(f"{server}/flush_cache", timeout=60).status_code == 200
    assert corpora() == {}
    assert ask() == plain
