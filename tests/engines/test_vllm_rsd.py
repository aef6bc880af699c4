"""RSD in vLLM: what the draft model reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_rows
import pytest
import scripted_shapes
from random_prompts import some_prompts
from simulated_drafting import BEAMS
from tiny_models import make_first_layers
from vllm_runs import Answer, Case, run_vllm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}


@pytest.mark.full
def test_a_draft_model_reads_each_row_of_a_step_once(
    tiny_llama: Path, tmp_path: Path, proves_drafting: Callable[[Answer], None]
) -> None:
    """A request decodes while the prompts of others are read in chunks."""
    prompts = some_prompts(1, longest=9) + some_prompts(3, longest=500, shortest=400)
    case = Case(prompts, GREEDY)
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 96}
    (plain,), _ = run_vllm(tiny_llama, [case], **limits)
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x4"}
    (drafted,), log = run_vllm(tiny_llama, [case], method, draft_rows.ENVIRONMENT, **limits)
    assert drafted.tokens == plain.tokens
    proves_drafting(drafted)
    draft_rows.check_levels(log, [3, 3, 3, 3])


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.full)], ids=["eager", "compiled"]
)
def test_trees_of_shapes_that_change_from_step_to_step(tiny_llama: Path, compiled: bool) -> None:
    """A draft model that equals the target: all its drafts are accepted if it has read the texts.

    In several steps nothing is drafted, so that it falls behind, with prompts that are read in
    chunks, more requests than run at a time, and cached prefixes.
    """
    case = Case(some_prompts(10, longest=300), {**GREEDY, "max_tokens": 80})
    again = Case([*case.prompts[5:], *case.prompts[:5]], case.sampling)
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 160}
    limits["enforce_eager"] = not compiled
    plain, _ = run_vllm(tiny_llama, [case, again], **limits)
    method = {"method": "rsd", "model": str(tiny_llama), "tree": "auto"}
    drafted, _ = run_vllm(tiny_llama, [case, again], method, scripted_shapes.ENVIRONMENT, **limits)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    # All accepted nodes are first children, but not all of them are next to their parents.
    assert drafted[-1].counters["kv_rows_moved"] > 0
    depths = {shape.nodes: shape.depth for shape in BEAMS}
    emitted = {row["num_draft_tokens"]: row["realised_tokens"] for row in drafted[-1].explained}
    assert len(emitted) >= 5
    for nodes, tokens in emitted.items():
        assert tokens >= 1 + 0.6 * depths.get(nodes, 0)


@pytest.mark.full
def test_shapes_that_are_chosen_by_their_costs(tiny_llama: Path, tmp_path: Path) -> None:
    """In a tiny model whatever is chosen costs little; answers are those of plain decoding."""
    case = Case(some_prompts(12), {**GREEDY, "max_tokens": 200})
    plain, _ = run_vllm(tiny_llama, [case])
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    drafted, _ = run_vllm(
        tiny_llama, [case], {"method": "rsd", "model": str(draft), "tree": "auto"}
    )
    assert drafted[0].tokens == plain[0].tokens
    sizes = {row["num_draft_tokens"] for row in drafted[0].explained}
    assert 0 in sizes
    assert max(sizes) > 0
    assert drafted[0].counters["draft_tokens"] > 0


def test_tables_share_the_trees(tiny_llama: Path, tmp_path: Path) -> None:
    """Nodes of the draft model, of the tables, and of both are accepted, also in what is sampled.

    Seeds give other tokens as the tables learn, so sampled answers are not compared here.
    """
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    sampled = {**GREEDY, "temperature": 0.7}
    prompts = some_prompts(10)
    cases = [Case(prompts, sampled), Case(prompts, GREEDY, reset=True), Case(prompts, GREEDY)]
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 160}
    plain, _ = run_vllm(tiny_llama, cases, **limits)
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x3", "tables": True}
    drafted, log = run_vllm(tiny_llama, cases, method, **limits)
    assert [each.tokens for each in drafted[1:]] == [each.tokens for each in plain[1:]]
    assert "Token Recycling's tables take" in log
    for answer in (drafted[0], drafted[2]):
        sources = ("tables", "draft model", "draft model and tables")
        assert min(answer.hits[name] for name in sources) > 0
    assert drafted[0].counters["kv_rows_moved"] > 0


@pytest.mark.full
def test_a_request_may_leave_no_token_allowed(tiny_llama: Path, tmp_path: Path) -> None:
    """The engine then emits the first token; another request is answered as always."""
    prompts = some_prompts(2)
    stop, least = 7, 3
    impossible = {
        **{"temperature": 1.0, "max_tokens": 8, "min_tokens": least},
        **{"allowed_token_ids": [stop], "stop_token_ids": [stop]},
    }
    case = Case(prompts, [impossible, GREEDY])
    (plain,), _ = run_vllm(tiny_llama, [case])
    draft = make_first_layers(tiny_llama, tmp_path, 1)
    method = {"method": "rsd", "model": str(draft), "tree": "beam:3x3", "verify": "traversal"}
    (drafted,), _ = run_vllm(tiny_llama, [case], method)
    assert plain.tokens[0] == [[0] * least + [stop]]
    assert drafted.tokens == plain.tokens
    assert drafted.reasons == [["stop"], ["length"]]
    assert drafted.counters["accepted_tokens"] > 0
