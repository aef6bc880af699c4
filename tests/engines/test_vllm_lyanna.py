"""Lyanna in vLLM with shapes of trees that change from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scripted_shapes
from lyanna_parts import drafter_for
from overfitted_drafter import LENGTH, PROMPTS, make_overfitted
from random_prompts import some_prompts
from vllm_runs import Case, run_vllm

from lyanna_plugin import LyannaOptions
from lyanna_plugin.checkpoint import save

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}
SHARED = LyannaOptions(model="any", nodes="auto", tables=True).shapes
DEPTHS = {shape.nodes: shape.depth for shape in LyannaOptions(model="any", nodes="auto").shapes}


@pytest.mark.full
def test_a_drafter_that_has_memorised_the_answers_is_accepted_after_rests(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """While nothing is drafted the layer reads several tokens at a time, and nothing is lost.

    More requests arrive than run at a time, so some arrive meanwhile.
    """
    make_overfitted(tiny_llama, tmp_path)
    cases = [Case(PROMPTS, GREEDY), Case(PROMPTS[::-1], GREEDY)]
    method = {"method": "lyanna", "model": str(tmp_path), "nodes": "auto"}
    plain, _ = run_vllm(tiny_llama, cases, max_num_seqs=5)
    drafted, _ = run_vllm(tiny_llama, cases, method, scripted_shapes.ENVIRONMENT, max_num_seqs=5)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert drafted[-1].counters["kv_rows_moved"] > 0
    emitted = {row["num_draft_tokens"]: row["realised_tokens"] for row in drafted[-1].explained}
    assert len(emitted) >= 4
    for nodes, tokens in emitted.items():
        assert tokens >= 1 + 0.7 * DEPTHS.get(nodes, 0)


@pytest.mark.full
def test_shapes_that_change_leave_the_answers(tiny_llama: Path, tmp_path: Path) -> None:
    """Prompts are read in chunks, and requests are preempted."""
    save(drafter_for(tiny_llama), tmp_path)
    case = Case(some_prompts(6, longest=200), {**GREEDY, "max_tokens": 200})
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 160}
    plain, _ = run_vllm(tiny_llama, [case], **limits)
    method = {"method": "lyanna", "model": str(tmp_path), "nodes": "auto"}
    drafted, _ = run_vllm(
        *(tiny_llama, [case], method, scripted_shapes.ENVIRONMENT),
        num_gpu_blocks_override=9,
        **limits,
    )
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].preemptions > 0
    assert drafted[0].counters["accepted_tokens"] > 0
    assert len(drafted[0].explained) >= 4


def test_tables_share_the_trees(tiny_llama: Path, tmp_path: Path) -> None:
    """The layer's nodes, at most three deep, and the tables', which copy what was answered before.

    Prompts of the second case are read in chunks.
    """
    make_overfitted(tiny_llama, tmp_path)
    seeded = [{**GREEDY, "temperature": 0.8, "seed": row} for row in range(len(PROMPTS))]
    cases = [
        Case(PROMPTS, GREEDY),
        Case(some_prompts(8, seed=5, longest=400), GREEDY),
        Case(PROMPTS, seeded),
        Case(PROMPTS[::-1], GREEDY),
    ]
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 160}
    method = {"method": "lyanna", "model": str(tmp_path), "nodes": 12, "tables": True}
    plain, _ = run_vllm(tiny_llama, cases, **limits)
    drafted, log = run_vllm(tiny_llama, cases, method, **limits)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert "Token Recycling's tables take" in log
    again = drafted[-1].counters
    assert again["emitted"] / again["steps"] > 1 + max(DEPTHS.values())
    sources = ("tables", "draft layer", "draft layer and tables")
    assert min(drafted[-1].hits[name] for name in sources) > 0


@pytest.mark.full
def test_tables_draft_alone_in_some_steps(tiny_llama: Path, tmp_path: Path) -> None:
    """The layer reads later what was accepted meanwhile, and then drafts as well as ever.

    More requests arrive than run at a time, and prompts of the second case are read in chunks. One
    request opts out.
    """
    make_overfitted(tiny_llama, tmp_path)
    seeded = [{**GREEDY, "temperature": 0.8, "seed": row} for row in range(len(PROMPTS))]
    off = {**GREEDY, "extra_args": {"drafttree": False}}
    cases = [
        Case(PROMPTS, GREEDY, rounds=2),
        Case(some_prompts(8, seed=5, longest=400), [GREEDY] * 7 + [off]),
        Case(PROMPTS, seeded),
        Case(PROMPTS[::-1], GREEDY, reset=True),
    ]
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 160}
    method = {
        "method": "lyanna",
        "model": str(tmp_path),
        "nodes": "auto",
        # With a memory the tables would copy the answers, which the layer is to draft.
        "tables": {"memory": 0},
    }
    plain, _ = run_vllm(tiny_llama, cases, **limits)
    drafted, _ = run_vllm(tiny_llama, cases, method, scripted_shapes.ENVIRONMENT, **limits)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    rows = {row["num_draft_tokens"]: row for row in drafted[0].explained}
    for shape in SHARED:
        # Nothing is lost that the layer has to read.
        assert rows[shape.nodes]["realised_tokens"] >= 1 + 0.8 * shape.depth
    assert rows.keys() >= {0, 3, 7, 15, 31}
    assert all(rows[nodes]["rows"] > 2 for nodes in (3, 7, 15, 31))
    assert min(drafted[-1].hits[name] for name in ("tables", "draft layer")) > 0
    assert all(each.counters["accepted_tokens"] for each in drafted)
    assert drafted[-1].counters["kv_rows_moved"] > 0


@pytest.mark.full
def test_tables_alone_or_with_the_layer_by_what_they_cost(tiny_llama: Path, tmp_path: Path) -> None:
    """Requests are preempted. The answers are those of plain decoding whatever is chosen."""
    make_overfitted(tiny_llama, tmp_path)
    case = Case(some_prompts(6, longest=200), {**GREEDY, "max_tokens": 200}, rounds=2)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 160}
    method = {"method": "lyanna", "model": str(tmp_path), "nodes": "auto", "tables": True}
    plain, _ = run_vllm(tiny_llama, [case], **limits)
    drafted, _ = run_vllm(tiny_llama, [case], method, num_gpu_blocks_override=9, **limits)
    assert drafted[0].tokens == plain[0].tokens
    assert drafted[0].preemptions > 0
    assert drafted[0].counters["accepted_tokens"] > 0


@pytest.mark.full
def test_as_much_is_accepted_after_the_same_weights_were_loaded_again(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The table of token info is then computed again."""
    make_overfitted(tiny_llama, tmp_path)
    method = {"method": "lyanna", "model": str(tmp_path), "nodes": 12}
    cases = [Case(PROMPTS, GREEDY), Case(PROMPTS, GREEDY, reset=True, reload=True)]
    (before, after), _ = run_vllm(tiny_llama, cases, method)
    assert after.tokens == before.tokens
    assert after.counters["accepted_tokens"] == before.counters["accepted_tokens"] > 0
