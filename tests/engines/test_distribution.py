"""Sampling with draft trees follows the target's distribution, end to end, in both engines.

The joint distribution of the first three tokens of 20,000 requests is compared with the exact one,
computed from the target by enumeration. Planted faults show that the test can fail.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import draw_ahead_on_cpu
import hot_drafts
import pytest
import scripted_shapes
from hosts import VLLM_V2, Answer, Case, Host
from joint_distribution import Joint, exact_joint, p_value
from lyanna_parts import drafter_for
from tiny_models import make_first_layers, make_tiny_llama

from lyanna_plugin.checkpoint import save

VOCAB = 10
PROMPT = [3, 7, 4]
REQUESTS = 20_000
FAULTY = 5_000
AHEAD = 10_000
ON_V2 = 6_000
TRAVERSED = 6_000
HOT = 10_000
FREE: dict[str, Any] = {"temperature": 1.3, "max_tokens": 4, "ignore_eos": True}
SAMPLING = {**FREE, "top_k": 8}
GREEDY = {**FREE, "temperature": 0.0}
RECYCLE = {"tree": "branch:3-2-1"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a small vocabulary."""
    folder = tmp_path_factory.mktemp("small-vocabulary")
    return make_tiny_llama(folder, vocab_size=VOCAB, sharpness=3.0)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RSD's draft model: the target's first layer."""
    return make_first_layers(target, tmp_path_factory.mktemp("small-draft"), 1)


def serve(
    host: Host, target: Path, cases: list[Case], method: str, *arguments: Any, **more: Any
) -> tuple[list[Answer], str]:
    return host.run(
        target,
        cases,
        method,
        *arguments,
        running=64,
        length=128,
        vllm={"max_num_batched_tokens": 2048},
        sglang={"log_level": "error"},
        **more,
    )


@cache
def joint(target: Path, top_k: int) -> Joint:
    return exact_joint(target, PROMPT, VOCAB, FREE["temperature"], top_k)


def check_drafting(answer: Answer) -> None:
    accepted_per_step = answer.counters["accepted_tokens"] / answer.counters["steps"]
    assert 0.3 < accepted_per_step < 0.9
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0


def test_token_recycling(host: Host, target: Path) -> None:
    case = Case([PROMPT] * REQUESTS, SAMPLING)
    (answer,), _ = serve(host, target, [case], "token-recycling", RECYCLE)
    check_drafting(answer)
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) > 0.001


@pytest.mark.full
@pytest.mark.parametrize("host", [VLLM_V2], indirect=True, ids=str)
def test_token_recycling_on_v2(host: Host, target: Path) -> None:
    """With fewer requests, as each row of logits takes a millisecond in Triton's interpreter."""
    case = Case([PROMPT] * ON_V2, FREE)
    (answer,), _ = serve(host, target, [case], "token-recycling", RECYCLE)
    check_drafting(answer)
    assert p_value(answer.tokens, joint(target, VOCAB)) > 0.001


@pytest.mark.full
def test_token_recycling_where_tokens_are_drawn_ahead(host: Host, target: Path) -> None:
    case = Case([PROMPT] * AHEAD, FREE)
    (free,), log = serve(
        host, target, [case], "token-recycling", RECYCLE, environment=draw_ahead_on_cpu.ENVIRONMENT
    )
    check_drafting(free)
    assert p_value(free.tokens, joint(target, VOCAB)) > 0.001
    assert log.count(draw_ahead_on_cpu.DRAWN) >= free.counters["steps"] / 64


@pytest.mark.full
def test_greedy_requests_beside_sampled_ones_drawn_ahead(host: Host, target: Path) -> None:
    """They stay greedy. The engine runs no other cases, whose steps its log would count too."""
    cases = [Case([PROMPT], GREEDY), Case([PROMPT] * 64, [FREE, GREEDY] * 32)]
    (greedy, mixed), log = serve(
        host, target, cases, "token-recycling", RECYCLE, environment=draw_ahead_on_cpu.ENVIRONMENT
    )
    assert mixed.tokens[1::2] == greedy.tokens * 32
    assert mixed.tokens[0::2] != greedy.tokens * 32
    if host.name == "vllm":  # SGLang gives greedy requests a top-k of 1, so it draws nothing ahead
        assert log.count(draw_ahead_on_cpu.DRAWN) >= mixed.counters["steps"] / 64


@pytest.mark.full
def test_a_fault_planted_into_token_recycling_is_found(host: Host, target: Path) -> None:
    case = Case([PROMPT] * FAULTY, SAMPLING)
    (answer,), _ = serve(
        host, target, [case], "token-recycling", RECYCLE, planted_fault="most likely"
    )
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) < 1e-6


RSD_TREES = {"vllm": "beam:3x3", "sglang": "branch:2-2"}


def test_rsd(host: Host, target: Path, draft: Path) -> None:
    case = Case([PROMPT] * REQUESTS, SAMPLING)
    (answer,), _ = serve(host, target, [case], "rsd", {"tree": RSD_TREES[host.name]}, draft)
    assert answer.counters["accepted_tokens"] > 0.3 * answer.counters["steps"]
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) > 0.001


def test_rsd_of_frequent_tokens(host: Host, target: Path, draft: Path, tmp_path: Path) -> None:
    """Tokens that are not drafted are sampled as often as without drafts.

    Greedy requests in the batches stay greedy.
    """
    # Those of the last merges are left out.
    names = ["a", "ab", "b", "bc", "c", "cd", "d", "de", "e", "ea"]
    merges = [["e", "a"], ["c", "d"], ["d", "e"], ["a", "b"], ["b", "c"]]
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    for file in target.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = {"tree": RSD_TREES[host.name], "head": 7}
    cases = [
        Case([PROMPT] * HOT, SAMPLING),
        Case([PROMPT], GREEDY),
        Case([PROMPT] * 64, [SAMPLING, GREEDY] * 32),
    ]
    (answer, greedy, mixed), log = serve(
        host, tmp_path, cases, "rsd", options, draft, environment=hot_drafts.ENVIRONMENT
    )
    hot_drafts.check_drafts(log)
    assert answer.counters["accepted_tokens"] > 0.2 * answer.counters["steps"]
    assert answer.counters["non_first_child_accepted"] > 0
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) > 0.001
    assert mixed.tokens[1::2] == greedy.tokens * 32
    assert mixed.tokens[0::2] != greedy.tokens * 32


@pytest.mark.full
@pytest.mark.parametrize("planned", [False, True], ids=["one shape", "tables alone or with it"])
def test_rsd_with_tables(host: Host, target: Path, draft: Path, planned: bool) -> None:
    """The tables' nodes are looked up in what recursive rejection leaves of the target.

    Greedy requests in the batches stay greedy.
    """
    options: dict[str, Any] = {
        "tree": "auto" if planned else RSD_TREES[host.name],
        "tables": {"prime": False, "memory": 0} if planned else {"prime": False, "nodes": 6},
    }
    environment = scripted_shapes.ENVIRONMENT if planned else {}
    cases = [
        Case([PROMPT] * REQUESTS, SAMPLING),
        Case([PROMPT], GREEDY),
        Case([PROMPT] * 64, [SAMPLING, GREEDY] * 32),
        # Steps at the end of a request are not measured, so others have few.
        Case([PROMPT], {**GREEDY, "max_tokens": 100}),
    ]
    (answer, greedy, mixed, _), log = serve(
        host, target, cases, "rsd", options, draft, environment=environment
    )
    least = 0.15 if planned else 0.5  # rests and trees of a few nodes are among the shapes
    assert answer.counters["accepted_tokens"] > least * answer.counters["steps"]
    assert len(scripted_shapes.kinds(log)) == 3 * planned
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) > 0.001
    assert mixed.tokens[1::2] == greedy.tokens * 32
    assert mixed.tokens[0::2] != greedy.tokens * 32


TRAVERSAL = {"tree": "beam:3x3", "verify": "traversal"}


@pytest.mark.full
def test_rsd_by_traversal(host: Host, target: Path, draft: Path) -> None:
    """Greedy requests in the batches stay greedy."""
    cases = [
        Case([PROMPT] * TRAVERSED, SAMPLING),
        Case([PROMPT], GREEDY),
        Case([PROMPT] * 64, [SAMPLING, GREEDY] * 32),
    ]
    (answer, greedy, mixed), _ = serve(host, target, cases, "rsd", TRAVERSAL, draft)
    assert answer.counters["accepted_tokens"] > 0.3 * answer.counters["steps"]
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) > 0.001
    assert mixed.tokens[1::2] == greedy.tokens * 32
    assert mixed.tokens[0::2] != greedy.tokens * 32
    assert mixed.counters["accepted_tokens"] > 0


@pytest.mark.full
def test_a_fault_planted_into_traversal_is_found(host: Host, target: Path, draft: Path) -> None:
    """It is planted into this rule alone, so the rule has chosen the tokens."""
    case = Case([PROMPT] * FAULTY, SAMPLING)
    (answer,), _ = serve(
        host, target, [case], "rsd", TRAVERSAL, draft, planted_fault="another draft"
    )
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("verify", ["recursive", "traversal"])
def test_seeds_of_rsd_do_not_depend_on_the_batch(
    host: Host, target: Path, draft: Path, verify: str
) -> None:
    if host.name == "sglang":
        pytest.skip("SGLang uses seeds in its deterministic mode only, which it refuses on a CPU")
    long = {**SAMPLING, "max_tokens": 40, "min_p": 0.01}
    seeded = [{**long, "seed": seed} for seed in (1, 2, 3)]
    others = [PROMPT[:1] * length for length in (5, 9, 17)]
    cases = [
        Case([PROMPT] * 3, seeded),
        Case([*others, *([PROMPT] * 3)], [long, long, long, *seeded]),
        Case([PROMPT] * 3, seeded, together=False),
    ]
    options = {"tree": "beam:3x3", "verify": verify}
    (together, mixed, alone), _ = serve(host, target, cases, "rsd", options, draft)
    assert together.counters["accepted_tokens"] > 0
    assert mixed.tokens[3:] == together.tokens == alone.tokens
    assert len({tuple(tokens) for tokens in together.tokens}) == 3


@pytest.mark.full
def test_a_fault_planted_into_rsd_is_found(host: Host, target: Path, draft: Path) -> None:
    case = Case([PROMPT] * FAULTY, SAMPLING)
    (answer,), _ = serve(
        host, target, [case], "rsd", {"tree": "beam:3x3"}, draft, planted_fault="residual"
    )
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("verify", ["recursive", "traversal"])
def test_rsd_in_shapes_that_change(host: Host, target: Path, draft: Path, verify: str) -> None:
    (answer,), _ = serve(
        *(host, target, [Case([PROMPT] * TRAVERSED, SAMPLING)], "rsd"),
        {"tree": "auto", "verify": verify},
        draft,
        environment=scripted_shapes.ENVIRONMENT,
    )
    assert answer.counters["accepted_tokens"] > 0.2 * answer.counters["steps"]
    assert answer.counters["non_first_child_accepted"] > 0
    assert answer.counters["kv_rows_moved"] > 0
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) > 0.001


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ({"nodes": 6}, {}),
        ({"nodes": "auto", "tables": {"memory": 0}}, scripted_shapes.ENVIRONMENT),
    ],
    ids=["layer", "tables alone or with the layer"],
)
def test_lyanna(
    host: Host,
    target: Path,
    tmp_path: Path,
    options: dict[str, Any],
    environment: dict[str, str],
) -> None:
    save(drafter_for(target, hot_tokens=VOCAB), tmp_path)
    case = Case([PROMPT] * 8_000, SAMPLING)
    (answer,), _ = serve(host, target, [case], "lyanna", options, tmp_path, environment=environment)
    assert answer.counters["accepted_tokens"] > 0.1 * answer.counters["steps"]
    assert p_value(answer.tokens, joint(target, SAMPLING["top_k"])) > 0.001
