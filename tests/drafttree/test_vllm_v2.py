"""The parts of vLLM's V2 host that need no engine: tiers, kept trees, chains, and its checks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from random_parents import random_trees
from vllm.v1.outputs import LogprobsTensors

from drafttree.chains import first_paths
from drafttree.patches import check_first_parameters
from drafttree.tree import DraftTree
from drafttree.vllm.v2 import sampling
from drafttree.vllm.v2.hooks import check_forward, check_graphs, check_next_tokens, check_sampler
from drafttree.vllm.v2.kept_trees import KeptTrees
from drafttree.vllm.v2.tiers import Tiers, make_tiers, max_nodes, max_rows, sizes_of, sizes_up_to
from drafttree.vllm.versions import unknown
from rsd_plugin.config import RsdOptions

TREES = DraftTree(
    torch.tensor([[5, 6, 7, 8, 9], [5, 6, -1, -1, -1], [-1] * 5], dtype=torch.int32),
    torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, -1, -1, -1], [-1] * 5], dtype=torch.int32),
    torch.tensor([5, 2, 1], dtype=torch.int32),
)
"""A tree in which column 4 is below column 1, a chain of one draft token, and nothing."""


def size_of(tiers: Tiers, requests: int) -> int:
    """What the engine's scheduler looks up; the last tier goes on."""
    fits = [size for first, _, size in tiers if first <= requests]
    return fits[-1]


def test_adaptive_tiers() -> None:
    tiers = make_tiers(80, 8192, 256, sizes_up_to(80))
    assert tiers == [
        [1, 8, 63],
        [9, 16, 31],
        [17, 32, 15],
        [33, 64, 7],
        [65, 128, 3],
        [129, 129, 0],
    ]
    assert size_of(make_tiers(10, 8192, 256, sizes_up_to(10)), 2) == 10
    assert max_nodes(tiers, 256) == max_nodes(tiers, 8) == 512
    assert max_nodes(tiers, 3) == 192
    # Eight requests with 63 drafts each, beside 248 that have read their prompts.
    assert max_rows(tiers, 256) == 8 * 64 + 248
    assert max_rows(tiers, 8) == 512
    assert sizes_up_to(80) == (0, 3, 7, 15, 31, 63)
    assert sizes_up_to(10) == (0, 3, 7, 10)
    assert sizes_up_to(7) == (0, 3, 7)


def test_tiers_of_planned_shapes() -> None:
    sizes = sizes_of(RsdOptions(model="any", tree="auto"), 15)
    assert sizes == (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15)
    tiers = make_tiers(15, 8192, 256, sizes)
    assert tiers[0] == [1, 32, 15]
    assert {size for _, _, size in tiers} == {15, 6, 3, 1}
    assert sizes_of(RsdOptions(model="any"), 15) == ()


def test_a_fixed_number_of_nodes_is_limited_by_the_budget_alone() -> None:
    tiers = make_tiers(15, 1024, 64)
    assert [size_of(tiers, requests) for requests in (1, 48, 63, 64)] == [15, 15, 7, 15]
    assert max_nodes(tiers, 64) == max_rows(tiers, 64) == 1024


@CASES
@given(st.integers(1, 255), st.integers(2, 4096), st.integers(1, 200), st.booleans())
def test_no_running_request_waits_and_prompts_get_room(
    nodes: int, budget: int, max_requests: int, adaptive: bool
) -> None:
    sizes = sizes_up_to(nodes) if adaptive else ()
    tiers = make_tiers(nodes, budget, max_requests, sizes)
    assert size_of(tiers, 1) >= 1
    for requests in range(1, max_requests + 1):
        size = size_of(tiers, requests)
        assert 0 <= size <= nodes
        if size:
            most = budget if requests == max_requests else budget - budget // 4
            assert requests * (1 + size) <= most


def test_trees_are_kept_by_row() -> None:
    kept = KeptTrees(8, 6, torch.device("cpu"))
    rows, last = torch.tensor([3, 0, 7]), torch.tensor([5, 5, 9], dtype=torch.int32)
    assert kept.keep(rows, TREES, last).tolist() == [
        [6, 7, 8, 9, 5, 5],
        [6, 5, 5, 5, 5, 5],
        [9, 9, 9, 9, 9, 9],
    ]
    assert kept.parents[rows].tolist() == [
        [-1, 0, 0, 2, 1, -1, -1],
        [-1, 0, -1, -1, -1, -1, -1],
        [-1] * 7,
    ]
    kept.keep(rows[:1], DraftTree.of_roots(last[:1]), last[:1])
    assert kept.parents[3].tolist() == [-1] * 7


def test_chains_follow_first_children() -> None:
    chains, columns = first_paths(TREES, torch.tensor([True, True, True]), 4)
    assert chains.tokens.tolist() == [[5, 6, 9, -1, -1], [5, 6, -1, -1, -1], [-1] * 5]
    assert chains.parents.tolist() == [[-1, 0, 1, -1, -1], [-1, 0, -1, -1, -1], [-1] * 5]
    assert columns.tolist() == [[0, 1, 4, -1, -1], [0, 1, -1, -1, -1], [0, -1, -1, -1, -1]]


@pytest.mark.parametrize("kind", ["chain", "star", "any"])
@pytest.mark.parametrize("max_depth", [0, 3, 8, 60])
def test_a_chain_leads_from_first_child_to_first_child(kind: str, max_depth: int) -> None:
    widths = [1, 40, 2, 33, 17, 9]
    parents, sizes = random_trees(3, widths, kind)
    tokens = torch.arange(40).masked_fill(torch.arange(40) >= sizes[:, None], -1).int()
    trees = DraftTree(tokens, parents, sizes)
    chains, columns = first_paths(trees, torch.ones(len(widths), dtype=torch.bool), max_depth)
    for request, line in enumerate(parents.tolist()):
        path = [0]
        while len(path) <= max_depth and path[-1] in line:
            path.append(line.index(path[-1]))
        # Each node's token is its column.
        padded = path + [-1] * (40 - len(path))
        assert chains.tokens[request].tolist() == columns[request].tolist() == padded


def test_other_trees_stay_as_they_are() -> None:
    some, columns = first_paths(TREES, torch.tensor([False, True, False]), 4)
    assert some.tokens.tolist() == TREES.tokens.tolist()
    assert some.parents.tolist() == TREES.parents.tolist()
    assert columns[::2].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_hooks_with_other_parameters_are_refused() -> None:
    def hook(first: int, second: int, third: int = 0) -> None:
        pass

    check_first_parameters("hook", hook, ["first", "second"], unknown)
    for expected in (["first"], ["second", "first"], ["first", "second", "third", "fourth"]):
        with pytest.raises(RuntimeError, match="hook takes"):
            check_first_parameters("hook", hook, expected, unknown)
    with pytest.raises(RuntimeError, match="there is no hook"):
        check_first_parameters("hook", None, [], unknown)


def test_requests_whose_logits_depend_on_their_text_get_chains() -> None:
    pytest.importorskip("vllm")
    from drafttree.vllm.v2.requests import RequestRules

    def flags(*rows: int) -> np.ndarray:
        return np.isin(np.arange(8), rows)

    def chained(sampler: SimpleNamespace, *rows: int) -> list[bool] | None:
        rules = RequestRules(8)
        for row in rows:
            rules.start("a", row, None, sampler)
        found = rules.chained(np.array(rows))
        return None if found is None else found.tolist()

    sampler = SimpleNamespace(
        logits_processors=[
            SimpleNamespace(),
            SimpleNamespace(use_penalty=flags(1)),
            SimpleNamespace(num_bad_words=SimpleNamespace(np=2 * flags(2))),
        ],
        thinking_budget_state=SimpleNamespace(enabled=True, use_thinking_budget=flags(3)),
    )
    assert chained(sampler, 3, 0, 2, 1) == [True, False, True, True]
    assert chained(sampler, 0, 4) is None
    sampler.thinking_budget_state.enabled = False
    assert chained(sampler, 3, 0, 2, 1) == [False, False, True, True]
    sampler.logits_processors.append(SimpleNamespace())
    assert chained(sampler, 3, 0) == [True, True]


@pytest.mark.parametrize("max_rows", [1, 4, 7, 8, 100])
def test_chunks_are_the_requests_in_order(max_rows: int) -> None:
    pytest.importorskip("vllm")
    from drafttree.vllm.v2.chunks import chunks_of

    ends = np.array([0, 3, 4, 8, 8, 9])
    chunks = [*chunks_of(ends, max_rows)]
    values = np.arange(9)
    assert np.concatenate([chunk.rows_of(values) for chunk in chunks]).tolist() == [*range(9)]
    requests = np.concatenate([chunk.requests_of(np.arange(5)) for chunk in chunks])
    assert requests.tolist() == [*range(5)]
    for chunk in chunks:
        rows = chunk.rows.stop - chunk.rows.start
        assert rows <= max_rows or chunk.requests.stop - chunk.requests.start == 1
        assert chunk.rows == slice(ends[chunk.requests.start], ends[chunk.requests.stop])
        assert chunk.is_whole == (max_rows >= 9)


def test_a_row_has_the_flags_of_the_request_that_started_in_it_last() -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from drafttree.vllm.v2.requests import RequestRules

    rules, rows = RequestRules(4), np.array([2, 1])
    sampler = SimpleNamespace(
        logits_processors=[
            SimpleNamespace(),
            SimpleNamespace(use_penalty=np.zeros(4, np.bool_)),
            SimpleNamespace(num_bad_words=SimpleNamespace(np=np.zeros(4, np.int32))),
        ],
        thinking_budget_state=SimpleNamespace(enabled=False),
    )
    opted_out = SamplingParams(extra_args={"drafttree": False})
    for row in (1, 2):
        rules.start(f"{row}", row, SamplingParams(), sampler)
    assert rules.undrafted(rows) is None
    rules.start("a", 2, opted_out, sampler)
    undrafted = rules.undrafted(rows)
    assert undrafted is not None
    assert undrafted.tolist() == [True, False]
    assert rules.undrafted(rows[1:]) is None
    rules.start("b", 2, SamplingParams(), sampler)
    assert rules.undrafted(rows) is None
    # A session keeps the grammar of its first turn, wherever it goes on.
    bound = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    rules = RequestRules(4, "some reason")
    for row, parameters in ((1, bound), (2, SamplingParams())):
        rules.start("session", row, parameters, sampler)
        assert rules.undrafted(np.array([row])) is not None
    rules.finish(["session"])
    for parameters in (SamplingParams(), bound):
        rules.start("session", 2, parameters, sampler)
        assert rules.undrafted(rows[:1]) is None


def test_the_next_tokens_of_prompts() -> None:
    check_next_tokens(SimpleNamespace(next_prefill_tokens=torch.zeros(1, 4)), 4)
    for states in (
        SimpleNamespace(),
        SimpleNamespace(next_prefill_tokens=torch.zeros(0, 4)),
        SimpleNamespace(next_prefill_tokens=torch.zeros(4)),
        SimpleNamespace(next_prefill_tokens=torch.zeros(1, 5)),
    ):
        with pytest.raises(RuntimeError, match="next_prefill_tokens of shape"):
            check_next_tokens(states, 4)


def test_the_flags_of_the_sampler() -> None:
    check_sampler(SimpleNamespace(needs_logits_processing=np.zeros(4, np.bool_)), 4)
    for sampler in (
        SimpleNamespace(),
        SimpleNamespace(needs_logits_processing=np.zeros(5, np.bool_)),
        SimpleNamespace(needs_logits_processing=np.zeros(4, np.int32)),
        SimpleNamespace(needs_logits_processing=torch.zeros(4, dtype=torch.bool)),
    ):
        with pytest.raises(RuntimeError, match="its sampler has needs_logits_processing"):
            check_sampler(sampler, 4)


def test_graphs_that_pass_the_hook_by() -> None:
    for manager in (None, SimpleNamespace(), SimpleNamespace(use_breakable_cg=False)):
        check_graphs(SimpleNamespace(cudagraph_manager=manager))
    with pytest.raises(ValueError, match="set VLLM_USE_BREAKABLE_CUDAGRAPH=0"):
        check_graphs(SimpleNamespace(cudagraph_manager=SimpleNamespace(use_breakable_cg=True)))


def test_a_forward_that_no_hook_has_seen() -> None:
    batch = SimpleNamespace()
    check_forward(batch, batch)
    for seen in (None, SimpleNamespace()):
        with pytest.raises(RuntimeError, match="without calling it as a module"):
            check_forward(seen, batch)


def test_logprobs_are_computed_from_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight chains of 63 draft tokens beside 40 requests without: all paths have 64 rows."""
    sizes, vocab = [64] * 8 + [1] * 40, 16
    ends = np.cumsum([0, *sizes]).astype(np.int32)
    logits = torch.arange(int(ends[-1]), dtype=torch.float32)[:, None].expand(-1, vocab)
    gathered: list[int] = []

    def scores(rows: torch.Tensor, *arguments: object) -> LogprobsTensors:
        gathered.append(len(rows))
        return LogprobsTensors(rows[:, :2].int(), rows[:, :2], rows[:, 0])

    monkeypatch.setattr(sampling, "compute_topk_scores", scores)
    columns = torch.arange(64)
    inside = columns < torch.tensor(sizes)[:, None]
    parents = torch.where(inside, columns - 1, -1).int()
    trees = DraftTree(inside.int() - 1, parents, torch.tensor(sizes, dtype=torch.int32))
    firsts = torch.from_numpy(ends[:-1].astype(np.int64))
    row_of_node = firsts[:, None] + columns.clamp(max=inside.sum(1)[:, None] - 1)
    each_row, each_request = torch.zeros(len(logits)), torch.arange(len(sizes))
    sampler = SimpleNamespace(
        get_logprobs_dims=lambda slots: (1, 0),
        logprobs_mode="raw_logprobs",
        logprob_token_ids_state=None,
        # The chains' draft tokens are all 0, and all are accepted.
        sample=lambda rows, *others, return_logprobs: (torch.zeros(len(rows)).int(), rows),
    )
    batch = SimpleNamespace(
        idx_mapping=each_request,
        idx_mapping_np=each_request.numpy(),
        positions=each_row,
        logits_indices=torch.arange(len(logits)),
        seq_lens_cpu_upper_bound=each_request,
        expanded_idx_mapping=each_row,
        expanded_local_pos=each_row,
        cu_num_logits_np=ends,
        num_reqs=len(sizes),
    )
    step = SimpleNamespace(width=64, row_of_node=row_of_node)
    outcome, logprobs = sampling.sample_trees(
        sampler,
        batch,
        step,
        trees,
        lambda chunk: logits[chunk.rows],
        each_row,
        64,
        150,
        lambda trees, requests: None,
    )
    assert max(gathered) <= 150
    assert outcome.num_emitted.tolist() == sizes
    assert logprobs is not None
    ranks = logprobs.selected_token_ranks.view(len(sizes), 64)
    assert torch.equal(ranks[inside], torch.arange(len(logits), dtype=torch.float32))
