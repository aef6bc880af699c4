"""Rules for whole trees with vLLM's own sampler: distributions along each node's path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from drafttree.acceptance_rules import TreeRule
from drafttree.tree import DraftTree
from drafttree.vllm import tree_rules
from drafttree.vllm.acceptance_sampler import AcceptanceSampler
from drafttree.vllm.sampling import sample_trees
from drafttree.vllm.step import StepTrees
from drafttree.vllm.step_logits import StepLogits
from rsd_plugin import RsdDrafter, RsdOptions

VOCAB, REQUESTS, DEPTH, ROOT, PENALTY = 6, 4_000, 2, 3, 1.7


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """The target's and the draft model's logits after each token."""
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(VOCAB, VOCAB, generator=generator)
    return target, target + torch.randn(VOCAB, VOCAB, generator=generator)


def after(*path: int) -> torch.Tensor:
    """The target's distribution after a text of the root and these tokens, with the penalty."""
    text = [ROOT, *path]
    logits = tables()[0][text[-1]].clone()
    seen = logits[text]
    logits[text] = torch.where(seen > 0, seen / PENALTY, seen * PENALTY)
    return logits.softmax(0)


class CountingSampler(AcceptanceSampler):
    """A sampler that counts its calls."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def verified(sampler: AcceptanceSampler | None = None, **settings: Any) -> tuple[Any, Any]:
    """One step of requests with a repetition penalty, every second one greedy."""
    target, draft = tables()
    drafter = RsdDrafter(RsdOptions(model="", tree=f"beam:3x{DEPTH}", verify="traversal"), VOCAB)
    temperature = torch.tensor([1.0, 0.0]).repeat(REQUESTS // 2)
    seeds = torch.arange(REQUESTS)

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return draft[trees.tokens[:, first:].clamp(min=0).long()].softmax(-1)

    roots = torch.full((REQUESTS,), ROOT, dtype=torch.int32)
    ones = torch.ones_like(seeds)
    trees, drawn = drafter.propose(seeds, roots, seeds, ones, temperature > 0, forward)
    rule = drafter.acceptance_rule(trees, drawn)
    assert isinstance(rule, TreeRule)
    width = trees.tokens.shape[1]
    rows = REQUESTS * width
    step = StepTrees(
        rows=torch.arange(rows),
        starts=np.arange(REQUESTS) * width,
        tree_sizes=np.full(REQUESTS, width),
        request_of_row=np.repeat(np.arange(REQUESTS), width),
        counted=np.ones(REQUESTS, np.bool_),
        parents=trees.parents.numpy(),
        position_offsets=np.zeros(rows, np.int64),
        max_depth=DEPTH,
    )
    outputs = [[ROOT] for _ in range(REQUESTS)]
    given: dict[str, Any] = {
        "temperature": temperature,
        "all_greedy": False,
        "all_random": False,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": False,
        "prompt_token_ids": torch.full((REQUESTS, 1), VOCAB),
        "frequency_penalties": torch.zeros(REQUESTS),
        "presence_penalties": torch.zeros(REQUESTS),
        "repetition_penalties": torch.full((REQUESTS,), PENALTY),
        "output_token_ids": outputs,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
        "spec_token_ids": [],
    }
    batch: Any = SimpleNamespace(
        sampling_metadata=SamplingMetadata(**given | settings),
        req_output_token_ids=outputs,
        num_reqs=REQUESTS,
    )
    logits = StepLogits(target[trees.tokens.clamp(min=0).long()].flatten(0, 1), torch.clone, rows)
    sampler = sampler or AcceptanceSampler(Sampler())
    output, outcome = sample_trees(batch, sampler, step, trees, logits, DEPTH, rule=rule)
    assert outputs == [[ROOT]] * REQUESTS
    return output, outcome


def test_penalties_follow_each_path() -> None:
    """The first two tokens have the target's law, and greedy requests get its likeliest tokens."""
    _, outcome = verified()
    sampled = outcome.emitted[::2]
    assert float((outcome.num_emitted[::2] > 1).float().mean()) > 0.5
    generator = torch.Generator().manual_seed(1)
    law = torch.stack([after()[first] * after(first) for first in range(VOCAB)])
    # The next step would sample the second token where this one has not.
    second = torch.stack([after(first) for first in range(VOCAB)])[sampled[:, 0].long()]
    drawn = torch.multinomial(second, 1, generator=generator)[:, 0]
    second_tokens = torch.where(sampled[:, 1] >= 0, sampled[:, 1].long(), drawn)
    cells = sampled[:, 0].long() * VOCAB + second_tokens
    found, expected = torch.bincount(cells, minlength=VOCAB**2).double(), law.flatten().double()
    expected *= len(cells) / expected.sum()
    often = expected >= 5
    found, expected = (torch.cat([x[often], x[~often].sum()[None]]) for x in (found, expected))
    assert float(chisquare(found.numpy(), expected.numpy()).pvalue) > 1e-3
    likeliest: list[int] = []
    while len(likeliest) <= DEPTH:
        likeliest.append(int(after(*likeliest).argmax()))
    for tokens, count in zip(
        outcome.emitted[1::2].tolist(), outcome.num_emitted[1::2], strict=True
    ):
        assert tokens[:count] == likeliest[:count]


def test_logprobs_do_not_change_the_tokens() -> None:
    _, plain = verified()
    output, outcome = verified(max_num_logprobs=0)
    assert outcome.path.tolist() == plain.path.tolist()
    assert outcome.emitted.tolist() == plain.emitted.tolist()
    levels = output.sampled_token_ids.shape[1]
    chosen = output.logprobs_tensors.logprob_token_ids[:, 0].view(REQUESTS, levels)
    there = outcome.emitted[:, :levels] >= 0
    assert chosen[there].tolist() == outcome.emitted[:, :levels][there].tolist()


def processors() -> LogitsProcessors:
    """A bias for every third request, and a least probability for every fifth."""
    bias = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    biased = torch.arange(0, REQUESTS, 3)
    bias.biases = {request: {2: 3.0} for request in biased.tolist()}
    bias.logits_slice = biased.int(), torch.full_like(biased, 2).int()
    bias.bias_tensor = torch.full((len(biased),), 3.0)
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS))
    least = MinPLogitsProcessor(config, torch.device("cpu"), False)
    least.min_p_device[::5] = 0.3
    least.min_p, least.min_p_count = least.min_p_device[:, None], REQUESTS // 5
    return LogitsProcessors([bias, least])


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_sampler_is_called_once_for_all_nodes(
    monkeypatch: pytest.MonkeyPatch, filtered: bool, chunks: int
) -> None:
    """Or once for each chunk of them, without penalties, which make it one call for each column."""
    settings: dict[str, Any] = {"repetition_penalties": torch.ones(REQUESTS)}
    if filtered:
        allowed = torch.zeros(REQUESTS, VOCAB, dtype=torch.bool)
        allowed[1::7, 4] = True  # these tokens are not allowed
        settings |= {
            "top_k": (torch.arange(REQUESTS) % VOCAB + 1).int(),
            "top_p": torch.linspace(0.5, 1.0, REQUESTS),
            "allowed_token_ids_mask": allowed,
            "logitsprocs": processors(),
        }
    columns = CountingSampler(Sampler())
    _, expected = verified(columns, **settings)
    width = 1 + 3 * DEPTH
    assert columns.calls == width
    rows = REQUESTS * width
    monkeypatch.setattr(tree_rules, "max_rows", lambda _: -(-rows // chunks))
    once = CountingSampler(Sampler())
    _, found = verified(once, **settings, no_penalties=True)
    assert once.calls == chunks
    assert found.path.tolist() == expected.path.tolist()
    assert found.emitted.tolist() == expected.emitted.tolist()
    assert float((found.num_emitted > 1).float().mean()) > 0.3


def test_logits_that_are_read_again_stay_as_they_are() -> None:
    """Logprobs are those of the raw logits, although the sampler works in place."""
    sampler = CountingSampler(Sampler())
    output, outcome = verified(sampler, no_penalties=True, max_num_logprobs=0)
    levels = output.sampled_token_ids.shape[1]
    assert sampler.calls == 1 + levels
    raw = tables()[0].log_softmax(1)
    roots = torch.arange(REQUESTS) * levels
    first = output.logprobs_tensors.logprobs[roots, 0]
    torch.testing.assert_close(first, raw[ROOT, outcome.emitted[:, 0].long()])
