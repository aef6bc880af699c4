"""RSD in both engines with Token Recycling's tables."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import scripted_shapes
from hosts import Answer, Case, Host
from random_prompts import some_prompts
from tiny_models import make_first_layers, make_tiny_llama

from rsd_plugin import RsdOptions

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
PROMPTS = some_prompts(12)
CASES = {
    "the first time": Case(PROMPTS, GREEDY),
    "chunked prefill": Case(some_prompts(6, seed=5, longest=400), GREEDY),
    "penalties": Case(PROMPTS, {**GREEDY, "repetition_penalty": 1.2}),
    "logprobs": Case(PROMPTS[:4], {**GREEDY, "logprobs": 2}),
    "greedy beside sampled": Case(
        PROMPTS, [GREEDY if row % 2 else {**GREEDY, "temperature": 1.0} for row in range(12)]
    ),
    "the same again": Case(PROMPTS[::-1], GREEDY),
}
CHUNKS = {"vllm": 200, "sglang": 32}
DEPTH = 3


AUTO = {"tree": "auto", "tables": {"prime": False, "memory": 0}}
OVERCOMMITTED: dict[str, dict[str, str]] = {
    "vllm": {},
    "sglang": {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
}
"""SGLang admits requests as if each would generate 16 tokens."""

KINDS = {scripted_shapes.WITH_MODEL, scripted_shapes.WITHOUT_MODEL, scripted_shapes.PLAIN}


@pytest.mark.parametrize("memory", [0, 1 << 16])
def test_greedy_tokens_equal_plain_decoding(
    host: Host,
    tiny_llama: Path,
    proves_drafting: Callable[[Answer], None],
    tmp_path: Path,
    memory: int,
) -> None:
    """With a memory, answers that were given before are copied, deeper than the draft model's
    nodes."""
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    served: dict[str | None, list[Answer]] = {}
    tables = {"prime": bool(memory), "nodes": 10, "memory": memory}
    for method in (None, "rsd"):
        served[method], log = host.run(
            tiny_llama,
            [*CASES.values()],
            method,
            method and {"tree": f"beam:2x{DEPTH}", "tables": tables},
            method and draft,
            running=5,
            chunk=CHUNKS[host.name],
            # With overlapping scheduling plain SGLang's penalties lag by one token.
            sglang={"disable_overlap_schedule": True},
        )
    assert "Token Recycling's tables take" in log
    for name, without, drafted in zip(CASES, served[None], served["rsd"], strict=True):
        greedy = slice(1, None, 2) if name == "greedy beside sampled" else slice(None)
        assert drafted.tokens[greedy] == without.tokens[greedy], name
        if not memory:
            proves_drafting(drafted)
    again = served["rsd"][-1].counters
    if memory:
        assert again["emitted"] / again["steps"] > 1 + DEPTH


def test_tables_draft_alone_in_some_steps(
    host: Host, tiny_llama: Path, proves_drafting: Callable[[Answer], None], tmp_path: Path
) -> None:
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    given: dict[str, Any] = {
        "running": 5,
        "chunk": CHUNKS[host.name],
        "sglang": {"disable_overlap_schedule": True},
    }
    plain, _ = host.run(tiny_llama, [*CASES.values()], **given)
    drafted, log = host.run(
        *(tiny_llama, [*CASES.values()], "rsd", AUTO, draft),
        environment=scripted_shapes.ENVIRONMENT,
        **given,
    )
    for name, without, answer in zip(CASES, plain, drafted, strict=True):
        greedy = slice(1, None, 2) if name == "greedy beside sampled" else slice(None)
        assert answer.tokens[greedy] == without.tokens[greedy], name
        proves_drafting(answer)
    assert scripted_shapes.kinds(log).keys() == KINDS


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_the_draft_model_reads_what_was_accepted_without_it(
    host: Host, tmp_path: Path, temperature: float
) -> None:
    """The target is its own draft model, whose drafts are all accepted if it has read the texts.

    Prompts are read in chunks, more requests arrive than run at a time, and prefixes are cached.
    """
    target = make_tiny_llama(tmp_path, sharpness=400.0)
    sampling = {**GREEDY, "temperature": temperature, "max_tokens": 100}
    cases = [
        Case(some_prompts(6, seed=6, longest=300), sampling),
        Case([[*prompt, 5, 6] for prompt in PROMPTS[:6]], sampling),
    ]
    _, log = host.run(
        *(target, [*cases, cases[0]], "rsd", AUTO, target),
        running=4,
        chunk={"vllm": 300, "sglang": 32}[host.name],
        environment=scripted_shapes.ENVIRONMENT,
    )
    assert scripted_shapes.kinds(log).keys() == KINDS
    emitted = scripted_shapes.emitted(log)
    shapes = [each for each in RsdOptions(model="", **AUTO).shapes if each.nodes in emitted]
    assert len(shapes) >= 5
    for shape in shapes:
        assert emitted[shape.nodes] >= 1 + 0.8 * shape.depth


@pytest.mark.full
@pytest.mark.parametrize("shapes", [{}, scripted_shapes.ENVIRONMENT], ids=["by costs", "scripted"])
def test_requests_that_are_preempted(
    host: Host, tiny_llama: Path, tmp_path: Path, shapes: dict[str, str]
) -> None:
    """The answers are those of plain decoding whatever is chosen."""
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    case = Case(some_prompts(8, longest=30), {**GREEDY, "max_tokens": 200}, rounds=2)
    (plain,), _ = host.run(tiny_llama, [case])
    (drafted,), log = host.run(
        *(tiny_llama, [case], "rsd", AUTO, draft),
        running=6,
        chunk={"vllm": 160, "sglang": 32}[host.name],
        environment=shapes | OVERCOMMITTED[host.name],
        vllm={"num_gpu_blocks_override": 9},
        sglang={"max_total_tokens": 900, "schedule_conservativeness": 0.01},
    )
    assert drafted.tokens == plain.tokens
    assert drafted.preemptions > 0
    assert drafted.counters["accepted_tokens"] > 0
    assert len(scripted_shapes.kinds(log)) == (3 if shapes else 0)


@pytest.mark.full
def test_the_draft_model_knows_what_tables_have_drafted(host: Host, tmp_path: Path) -> None:
    """The target is its own draft model, so that sampled requests accept all of its drafts.

    They do as long as the draft model's KV of all accepted tokens is right; the cases end inside
    trees, read prompts in chunks, and find prefixes in the cache. More tokens than those four and
    the bonus token are the tables', of answers that are nearly always the same.
    """
    target = make_tiny_llama(tmp_path, sharpness=400.0)
    sampled = {**GREEDY, "temperature": 0.1, "max_tokens": 203}
    cases = [
        Case(PROMPTS[:6], sampled),
        Case(some_prompts(4, seed=6, longest=400), sampled),
        Case([[*prompt, 5, 6] for prompt in PROMPTS[:6]], sampled),
        Case(PROMPTS[:6], sampled),
    ]
    options = {"tree": "branch:1-1-1-1", "tables": {"nodes": 6, "prime": False}}
    served, _ = host.run(
        target, cases, "rsd", options, target, chunk={"vllm": 300, "sglang": 32}[host.name]
    )
    for case, answer in zip(cases, served, strict=True):
        assert answer.counters["steps"] <= ceil(202 / 5) * len(case.prompts)
    again = served[-1].counters
    assert again["emitted"] > 5.5 * again["steps"]
