"""Rules for whole trees with vLLM's own sampler: distributions along each node's path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from drafttree.drafter import TreeRule
from drafttree.tree import DraftTree
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


def verified(**settings: Any) -> tuple[Any, Any]:
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
    sampler = AcceptanceSampler(Sampler())
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
