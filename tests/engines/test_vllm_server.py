"""vLLM's OpenAI server with draft trees: chats of many clients, metrics, and vLLM's benchmark."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

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
from v2_on_cpu import check_runner, for_runner
from vllm_runs import ENVIRONMENT, Answer, Case, run_vllm

from scripts.benchmarks.server_load import Load, run_round
from scripts.server_process import free_port, wait_until_up

NODES = 15
SAMPLED = {"n": 3, "temperature": 0.8, "seed": 5}
# What `vllm serve` runs; that command fails in the CPU build, whose package is not `vllm`.
PROGRAMS = {
    "v1": ("-m", "vllm.entrypoints.openai.api_server"),
    "v2": (str(Path(__file__).parents[1] / "support/v2_server.py"),),
}
"""Programs by vLLM's model runner."""
BENCH_SERVE = Path(__file__).parents[2] / "scripts/benchmarks/bench_serve.py"


on_v1 = pytest.mark.parametrize("server", ["v1"], indirect=True, scope="module")
"""On the V1 model runner alone: in Triton's interpreter hundreds of steps take too long."""


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.full)])
def server(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    runner = request.param
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        *(sys.executable, *PROGRAMS[runner]),
        *("--model", str(smollm2), "--served-model-name", "smollm2"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "1024", "--max-num-seqs", "4", "--max-num-batched-tokens", "1024"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--speculative-config", json.dumps({"method": "token_recycling", "nodes": NODES})),
    ]
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if runner == "v2":
        environment |= for_runner(runner)
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(address, process, log)
        check_runner(runner, log.read_text())
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def metric(address: str, name: str) -> float:
    page = httpx.get(f"{address}/metrics", timeout=10).text
    found = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page, re.MULTILINE)
    assert len(found) == 1, page[-2000:]
    return float(found[0])


def draft_counts(address: str) -> dict[str, float]:
    """Draft trees, draft tokens and accepted ones since the server's start."""
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return {name: metric(address, f"spec_decode_num_{name}_total") for name in names}


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> dict[str, list[list[Reply]]]:
    """Answers without a method, greedy ones and three samples each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = chat_prompts(tokenizer)
    settings = {"temperature": 0.0, "max_tokens": TOKENS, "logprobs": BEST}
    cases = [Case(prompts, settings), Case(prompts, settings | SAMPLED)]
    answers, _ = run_vllm(smollm2, cases)

    def reply(answer: Answer, row: int, sample: int) -> Reply:
        tokens = answer.tokens[row][sample]
        positions = answer.logprobs[row][sample]
        return Reply(
            tokenizer.decode(tokens, skip_special_tokens=True),
            answer.reasons[row][sample],
            [position[token] for token, position in zip(tokens, positions, strict=True)],
            # The server's list begins with the chosen token, as the engine's own does.
            [best_of([*position.values()][:BEST]) for position in positions],
        )

    return {
        name: [
            [reply(answer, row, sample) for sample in range(len(answer.tokens[row]))]
            for row in range(len(prompts))
        ]
        for name, answer in zip(("greedy", "sampled"), answers, strict=True)
    }


def test_a_streamed_chat_equals_plain_decoding(
    server: str, plain: dict[str, list[list[Reply]]]
) -> None:
    expected = plain["greedy"][0][0]
    before = draft_counts(server)
    body = request_of(QUESTIONS[0]) | {"temperature": 0, "max_tokens": TOKENS}
    whole = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=120).json()
    assert whole["choices"][0]["message"]["content"] == expected.text

    pieces = []
    request = body | {"stream": True}
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=request, timeout=120) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    assert "".join(pieces) == expected.text
    assert len(pieces) > 2

    after = draft_counts(server)
    drafts, drafted, accepted = (after[name] - before[name] for name in before)
    assert 0 < accepted < drafted <= NODES * drafts
    # Each answer consists of its first token and the tokens that later steps emitted.
    emitted = 2 * (len(expected.logprobs) - 1)
    # V2 counts what is accepted beyond an answer's end too, of one tree for each answer.
    assert drafts + accepted <= emitted + 2 * NODES
    assert drafts + accepted > emitted / 2


@on_v1
@pytest.mark.parametrize(
    ("name", "settings"),
    [("greedy", {}), pytest.param("sampled", SAMPLED, marks=pytest.mark.full)],
)
def test_many_clients_at_once(
    name: str, settings: dict[str, Any], server: str, plain: dict[str, list[list[Reply]]]
) -> None:
    """With OpenAI's client, streamed and whole, logprobs included: plain decoding's answers."""
    before = draft_counts(server)
    check_equal(ask_at_once(server, **settings), plain[name])
    after = draft_counts(server)
    assert after["accepted_tokens"] - before["accepted_tokens"] > len(QUESTIONS)


@on_v1
def test_clients_that_hang_up(server: str, plain: dict[str, list[list[Reply]]]) -> None:
    """Their requests end, the KV cache is free again, and later answers are right."""
    before, tokens_before = draft_counts(server), metric(server, "generation_tokens_total")
    left = hang_up(server)
    short = request_of(QUESTIONS[0]) | {"max_tokens": 2}

    def is_idle() -> bool:
        # The gauges are written by steps alone.
        httpx.post(f"{server}/v1/chat/completions", json=short, timeout=120).raise_for_status()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(metric(server, name) for name in names)

    wait_until(is_idle, "a request that was left did not end, or keeps its KV cache")
    assert metric(server, "generation_tokens_total") - tokens_before < left * LONG / 2
    assert draft_counts(server)["accepted_tokens"] > before["accepted_tokens"]
    check_equal(ask_at_once(server), plain["greedy"])


@pytest.mark.full
@on_v1
def test_users_who_ask_at_the_same_time(server: str) -> None:
    """The load of `bench_servers`: each reply that ends makes room for the next request."""
    before = draft_counts(server)
    began = perf_counter()
    topics = ("a lighthouse", "the sea", "a long winter", "two brothers", "an old train")
    prompts = [f"Write a long story about {topic}." for topic in topics]
    found = run_round(server, "smollm2", prompts, Load(users=2), 24)
    assert [reply.tokens for reply in found.replies] == 5 * [24]
    assert all(0 < reply.first < reply.seconds < found.seconds for reply in found.replies)
    assert found.seconds <= perf_counter() - began
    # Never more than two at a time, and mostly two.
    busy = sum(reply.seconds for reply in found.replies) / found.seconds
    assert 1 < busy <= 2
    assert draft_counts(server)["accepted_tokens"] > before["accepted_tokens"]


@on_v1
@pytest.mark.full
def test_its_own_benchmark(server: str, smollm2: Path, tmp_path: Path) -> None:
    """`vllm bench serve`: all requests are answered, and it finds that drafts are accepted."""
    command = [
        *(sys.executable, str(BENCH_SERVE), "--backend", "openai", "--base-url", server),
        *("--model", str(smollm2), "--served-model-name", "smollm2"),
        *("--dataset-name", "sharegpt"),
        *("--dataset-path", str(write_conversations(tmp_path / "conversations.json"))),
        *("--num-prompts", str(COUNT), "--sharegpt-output-len", str(bench_conversations.TOKENS)),
        *("--max-concurrency", "4", "--temperature", "0", "--ignore-eos", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    before = draft_counts(server)
    run = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (COUNT, 0)
    assert result["total_output_tokens"] == COUNT * bench_conversations.TOKENS
    after = draft_counts(server)
    found = {name: result[f"spec_decode_{name}"] for name in ("draft_tokens", "accepted_tokens")}
    assert found == {name: after[name] - before[name] for name in found}
    assert result["spec_decode_acceptance_length"] > 1.2


@pytest.mark.full
@pytest.mark.parametrize(("ask", "least"), [(called_arguments, 1.0), (object_answer, 0.2)])
def test_bound_answers(
    ask: Callable[..., str], least: float, server: str, request: pytest.FixtureRequest
) -> None:
    """With OpenAI's client: the same answers as without drafts, `least` drafts accepted a step."""
    client = OpenAI(base_url=f"{server}/v1", api_key="none")

    def call(drafted: int) -> str:
        return ask(client, 192, {"vllm_xargs": {"drafttree": drafted}})

    def counts() -> tuple[float, float]:
        """Draft trees and accepted draft tokens."""
        found = draft_counts(server)
        return found["drafts"], found["accepted_tokens"]

    _, before = counts()
    plain = call(0)
    # V2 counts the rows that it schedules, which have no nodes here.
    steps, accepted = counts()
    assert accepted == before
    drafted = call(1)
    steps, accepted = (now - then for now, then in zip(counts(), (steps, accepted), strict=True))
    assert drafted == plain
    assert steps > 0
    # On V2 no tokens are added that the grammar forces.
    assert accepted > (least * steps if request.node.callspec.params["server"] == "v1" else 0)
