"""vLLM's OpenAI server with draft trees: chat over HTTP, streamed, and the engine's metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from bound_answers import called_arguments, object_answer
from openai import OpenAI
from server_process import free_port, wait_until_up
from v2_on_cpu import check_runner, for_runner
from vllm_runs import ENVIRONMENT, Case, run_vllm

MESSAGES = [{"role": "user", "content": "Count from one to twelve in words."}]
TOKENS = 48
NODES = 15
# What `vllm serve` runs; that command fails in the CPU build, whose package is not `vllm`.
PROGRAMS = {
    "v1": ("-m", "vllm.entrypoints.openai.api_server"),
    "v2": (str(Path(__file__).parents[1] / "support/v2_server.py"),),
}
"""Programs by vLLM's model runner."""


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
    found = re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", page, re.MULTILINE)
    assert len(found) == 1, page[-2000:]
    return float(found[0])


def test_a_streamed_chat_equals_plain_decoding(server: str, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rendered = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    (plain,), _ = run_vllm(smollm2, [Case([rendered], {"temperature": 0.0, "max_tokens": TOKENS})])
    expected = tokenizer.decode(plain.tokens[0][0], skip_special_tokens=True)

    body = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}
    whole = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=120).json()
    assert whole["choices"][0]["message"]["content"] == expected

    pieces = []
    request = body | {"stream": True}
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=request, timeout=120) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    assert "".join(pieces) == expected
    assert len(pieces) > 2

    drafts = metric(server, "spec_decode_num_drafts")
    drafted = metric(server, "spec_decode_num_draft_tokens")
    accepted = metric(server, "spec_decode_num_accepted_tokens")
    assert 0 < accepted < drafted <= NODES * drafts
    # Each answer consists of its first token and the tokens that later steps emitted.
    emitted = 2 * (len(plain.tokens[0][0]) - 1)
    # V2 counts what is accepted beyond an answer's end too, of one tree for each answer.
    assert drafts + accepted <= emitted + 2 * NODES
    assert drafts + accepted > emitted / 2


@pytest.mark.full
@pytest.mark.parametrize(("ask", "least"), [(called_arguments, 1.0), (object_answer, 0.2)])
def test_bound_answers(
    ask: Callable[..., str], least: float, server: str, request: pytest.FixtureRequest
) -> None:
    """With OpenAI's client: the same answers as without drafts, `least` drafts accepted a step."""
    client = OpenAI(base_url=f"{server}/v1", api_key="none")

    def call(drafted: int) -> str:
        return ask(client, 4 * TOKENS, {"vllm_xargs": {"drafttree": drafted}})

    def counts() -> tuple[float, float]:
        """Draft trees and accepted draft tokens."""
        names = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
        steps, accepted = (metric(server, name) for name in names)
        return steps, accepted

    _, before = counts()
    plain = call(0)
    # V2 counts the rows that it schedules, which have no nodes here.
    steps, accepted = counts()
    assert accepted == before
    drafted = call(1)
    steps, accepted = (now - then for now, then in zip(counts(), (steps, accepted), strict=True))
    assert drafted == plain
    assert steps > 0
    if request.node.callspec.params["server"] == "v1":
        assert accepted > least * steps
    else:
        # A server's worker is in another process than its scheduler on a CPU, though not on a GPU.
        assert accepted == 0
