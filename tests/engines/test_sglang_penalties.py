"""Penalties along trees in SGLang: those of its own penalizers, without a wait for a device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_penalty_requests import penalty_request

VOCABULARY = 40
KINDS: dict[str, dict[str, float]] = {
    "none": {},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.3},
    "least length": {"min_new_tokens": 9},
    "all": {
        "presence_penalty": -0.4,
        "frequency_penalty": 0.1,
        "repetition_penalty": 0.8,
        "min_new_tokens": 30,
    },
}


@dataclass
class Batch:
    """What SGLang's penalizers read of a batch, to which they keep a weak reference."""

    reqs: list[Any]
    device: str = "cpu"


def penalised_by_sglang(own: Any, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The logits of one request after it has emitted `tokens`."""
    from sglang.srt.sampling import penaltylib

    kinds = {getattr(penaltylib, name) for name in penaltylib.__all__ if "Penalizer" in name}
    kinds -= {penaltylib.BatchedPenalizerOrchestrator}
    batch = Batch([own])
    penalizers = penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, batch, kinds)
    for token in tokens:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
    penalised = logits[None].clone()
    penalizers.apply(penalised, repeat=1)
    return penalised[0]


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def test_logits_equal_those_of_sglangs_penalizers() -> None:
    from drafttree.sglang.penalties import Penalties

    draw = random.Random(2)

    def texts(longest: int) -> list[list[int]]:
        return [
            [draw.randrange(10) for _ in range(draw.randrange(longest + 1))] for _ in range(rows)
        ]

    def padded(texts: list[list[int]]) -> torch.Tensor:
        width = max(map(len, texts))
        return torch.tensor([[*text, *[-1] * (width - len(text))] for text in texts])

    rows = len(KINDS)
    before = texts(12)
    requests = [
        penalty_request(text, **given) for text, given in zip(before, KINDS.values(), strict=True)
    ]
    penalties = Penalties(rows + 3, VOCABULARY, torch.device("cpu"))
    slots = torch.tensor([draw.randrange(100) for _ in range(rows)]).argsort() + 2
    # An earlier request, which leaves nothing in its slot.
    penalties.start([(penalty_request([1, 2, 3] * 5, **KINDS["all"]), int(slots[0]))])
    penalties.start([*zip(requests, slots.tolist(), strict=True)])
    for _ in range(4):
        step, path = texts(4), texts(3)
        penalties.add(slots, padded(step))
        before = [[*text, *new] for text, new in zip(before, step, strict=True)]
        logits = torch.randn(rows, VOCABULARY)
        found = logits.clone()
        penalties.apply(found, slots, padded(path))
        for row, own in enumerate(requests):
            expected = penalised_by_sglang(own, [*before[row], *path[row]], logits[row])
            assert torch.equal(found[row], expected), list(KINDS)[row]


def test_a_request_without_penalties_that_was_there_first_is_left_alone() -> None:
    from drafttree.sglang.penalties import Penalties

    penalties = Penalties(4, VOCABULARY, torch.device("cpu"))
    penalties.start([(penalty_request([4, 5]), 2)])
    penalties.start([(penalty_request([], **KINDS["repetition"]), 1)])
    slots = torch.tensor([2, 1])
    penalties.add(slots, torch.tensor([[6], [6]]))
    logits = torch.randn(2, VOCABULARY)
    found = logits.clone()
    penalties.apply(found, slots, torch.tensor([[7], [7]]))
    assert torch.equal(found[0], logits[0])
    assert found[1, [6, 7]].ne(logits[1, [6, 7]]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_was_retracted_goes_on_with_its_penalties(kind: str) -> None:
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    from drafttree.sglang.penalties import Penalties

    emitted, slots = [[4, 4, 8, 5], []], torch.tensor([1, 3])
    requests = [penalty_request(tokens, **KINDS[kind]) for tokens in emitted]
    penalties = Penalties(4, VOCABULARY, torch.device("cpu"))
    penalties.start([*zip(requests, slots.tolist(), strict=True)])
    # SGLang's own penalties, of requests that have emitted nothing.
    logits = torch.randn(2, VOCABULARY)
    none = kind == "none"
    new = [penalised_by_sglang(own, [], torch.zeros(VOCABULARY)) for own in requests]
    info = SimpleNamespace(
        acc_additive_penalties=None if none else torch.stack(new),
        acc_scaling_penalties=None if none else torch.ones(2, VOCABULARY),
    )
    penalties.resume(SimpleNamespace(reqs=requests, req_pool_indices=slots, sampling_info=info))
    found = logits.clone()
    if not none:
        found += info.acc_additive_penalties
        apply_scaling_penalties(found, info.acc_scaling_penalties)
    for row, own in enumerate(requests):
        expected = penalised_by_sglang(own, emitted[row], logits[row])
        torch.testing.assert_close(found[row], expected)


def test_nothing_is_allocated_for_requests_without_penalties() -> None:
    from drafttree.sglang.penalties import Penalties

    penalties = Penalties(4, 1 << 60, torch.device("cpu"))
    penalties.start([(penalty_request([4, 5]), 2)])
    penalties.add(torch.tensor([2]), torch.tensor([[6]]))


def test_sampling_along_trees_with_penalties_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from forbid_waiting import NoWaiting
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from tree_kernels.mask import depths

    from drafttree.sglang import node_sampler
    from drafttree.sglang.penalties import Penalties
    from drafttree.sglang.sampling import _Draw
    from drafttree.sglang.state import Step
    from drafttree.tree import DraftTree
    from drafttree.verify import verify_sampled, verify_target

    rows = len(KINDS)
    requests = [penalty_request([4, 4, 8], **given) for given in KINDS.values()]
    penalties = Penalties(rows, VOCABULARY, torch.device("cpu"))
    penalties.start([*zip(requests, range(rows), strict=True)])
    parents = torch.tensor([-1, 0, 0, 1, 1, 2]).int().expand(rows, -1)
    tokens = torch.randint(VOCABULARY, parents.shape).int()
    trees = DraftTree(tokens, parents.contiguous(), torch.full((rows,), 6).int())
    info = SamplingBatchInfo(
        temperatures=torch.ones(rows, 1),
        top_ps=torch.ones(rows),
        top_ks=torch.full((rows,), VOCABULARY),
        min_ps=torch.zeros(rows),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCABULARY,
        device="cpu",
    )
    batch = SimpleNamespace(
        sampling_info=info,
        req_pool_indices=torch.arange(rows),
        seq_lens=torch.full((rows,), 5),
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )

    def greedy(output: Any, *given: Any) -> torch.Tensor:
        return output.next_token_logits.argmax(-1)

    step = Step.of(batch, trees, depths(trees.parents, trees.tree_size), penalties, None)
    logits = torch.randn(rows, 6, VOCABULARY)
    nodes = node_sampler.NodeSampler(greedy, step, logits)
    # Two requests at a time.
    monkeypatch.setattr(node_sampler, "_ROW_BYTES", 2 * logits[0].nbytes)
    for parent, child in ((0, 1), (1, 3)):
        tokens[:, child] = nodes.of_all(None)[:, parent]
    with NoWaiting():
        at_once = verify_target(trees, nodes.of_all(None), 2)
        verified = verify_sampled(trees, _Draw(nodes, batch, None), 2, waits=False)
        penalties.add(batch.req_pool_indices, verified.emitted)
    assert torch.equal(at_once.emitted, verified.emitted)
    assert torch.equal(at_once.path, verified.path)
    assert verified.num_emitted.eq(3).all()
    for row, own in enumerate(requests):
        expected = penalised_by_sglang(own, [4, 4, 8], logits[row, 0])
        assert verified.emitted[row, 0] == expected.argmax()


def test_a_draft_model_is_penalised_along_the_path_of_each_node() -> None:
    from drafttree.sglang.drafters.draft_model import _penalised
    from drafttree.sglang.penalties import Penalties
    from drafttree.tree import DraftTree

    rows = len(KINDS)
    requests = [penalty_request([4, 4, 8], **given) for given in KINDS.values()]
    penalties = Penalties(rows, VOCABULARY, torch.device("cpu"))
    penalties.start([*zip(requests, range(rows), strict=True)])
    parents = torch.tensor([-1, 0, 0, 1, 3]).int().expand(rows, -1).contiguous()
    # The root is the last token that has been emitted.
    tokens = torch.tensor([8, 4, 9, 9, 4]).int().expand(rows, -1)
    trees = DraftTree(tokens, parents, torch.full((rows,), 5).int())
    paths = {2: [9], 3: [4, 9], 4: [4, 9, 4]}
    logits = torch.randn(rows, 3, VOCABULARY)
    found = _penalised(logits.clone(), penalties, trees, torch.arange(rows), 2)
    for row, own in enumerate(requests):
        for column, path in paths.items():
            expected = penalised_by_sglang(own, [4, 4, 8, *path], logits[row, column - 2])
            assert torch.equal(found[row, column - 2], expected)
