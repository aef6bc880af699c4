"""Levels sampled without replacement, compared with sampling tokens or sequences one by one."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tree_kernels.gumbel_top import gumbel_top, perturbed_top

from rsd_plugin import sampling
from rsd_plugin.sampling import Level

DRAWS = 60_000
VOCAB = 3


def branch(level: Level, log_p: torch.Tensor, noise: torch.Tensor, count: int) -> Level:
    return sampling.branch(level, perturbed_top(log_p, noise, count))


def beam(
    level: Level, log_p: torch.Tensor, noise: torch.Tensor, width: int, sampled: torch.Tensor
) -> Level:
    children = perturbed_top(log_p, noise, min(width, log_p.shape[2]))
    return sampling.beam(level, children, width, sampled)


def gumbel(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -torch.empty(shape).exponential_(generator=generator).log()


def chain(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A two-step draft model: log-probabilities of the first token, and after each first token."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.log_softmax(torch.randn(VOCAB, generator=generator), -1)
    second = torch.log_softmax(2 * torch.randn(VOCAB, VOCAB, generator=generator), -1)
    return first, second


def roots(count: int) -> Level:
    return Level.root(torch.zeros(count, dtype=torch.int32))


def compare(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The p-value of counts against probabilities; every cell has an expected count above 5."""
    assert float(expected.min()) * DRAWS > 5
    expected = expected.double() / expected.double().sum()
    return float(chisquare(found.numpy(), (expected * DRAWS).numpy()).pvalue)


def without_replacement(probabilities: torch.Tensor, count: int) -> dict[tuple[int, ...], float]:
    law = {}
    for order in permutations(range(len(probabilities)), count):
        probability, left = 1.0, 1.0
        for each in order:
            probability *= float(probabilities[each]) / left
            left -= float(probabilities[each])
        law[order] = probability
    return law


def test_children_are_drawn_without_replacement_in_sampling_order() -> None:
    first, _ = chain()
    log_p = first.expand(DRAWS, 1, VOCAB)
    level = branch(roots(DRAWS), log_p, gumbel(DRAWS, 1, VOCAB), 2)
    law = without_replacement(first.double().exp(), 2)
    cells = level.tokens[:, 0] * VOCAB + level.tokens[:, 1]
    counts = torch.bincount(cells, minlength=VOCAB**2)
    found = torch.stack([counts[a * VOCAB + b] for a, b in law])
    assert compare(found, torch.tensor(list(law.values()))) > 1e-3
    with_replacement = torch.tensor([float((first[a] + first[b]).exp()) for a, b in law])
    assert compare(found, with_replacement) < 1e-6


def two_levels(width: int, seed: int = 0) -> tuple[Level, Level]:
    first, second = chain()
    drawn = torch.ones(DRAWS, dtype=torch.bool)
    upper = beam(
        roots(DRAWS), first.expand(DRAWS, 1, VOCAB), gumbel(DRAWS, 1, VOCAB, seed=seed), 3, drawn
    )
    log_p = second[upper.tokens.clamp(min=0).long()]
    lower = beam(upper, log_p, gumbel(*log_p.shape, seed=seed + 1), width, drawn)
    return upper, lower


def test_a_beam_is_sequences_drawn_without_replacement() -> None:
    first, second = chain()
    upper, lower = two_levels(2)
    sequences = (first[:, None] + second).double().exp().flatten()
    law = without_replacement(sequences, 2)
    cells = upper.tokens.gather(1, lower.parents) * VOCAB + lower.tokens
    cells = cells.gather(1, lower.scores.argsort(1, descending=True)).long()
    counts = torch.bincount(cells[:, 0] * VOCAB**2 + cells[:, 1], minlength=VOCAB**4)
    found = torch.stack([counts[a * VOCAB**2 + b] for a, b in law])
    assert compare(found, torch.tensor(list(law.values()))) > 1e-3


def test_the_first_child_of_a_parent_is_a_draw_of_its_own_distribution() -> None:
    """This holds over all parents in the beam, with or without a surviving child (theorem 3.2)."""
    first, second = chain()
    drawn = torch.ones(DRAWS, dtype=torch.bool)
    upper = beam(roots(DRAWS), first.expand(DRAWS, 1, VOCAB), gumbel(DRAWS, 1, VOCAB), 3, drawn)
    log_p = second[upper.tokens.long()]
    # The beam is wide enough for every child, so the first child of each parent is in it.
    lower = beam(upper, log_p, gumbel(*log_p.shape, seed=7), VOCAB * VOCAB, drawn)
    for parent_token in range(VOCAB):
        rows, parent = (upper.tokens == parent_token).nonzero(as_tuple=True)
        children = lower.tokens[rows][lower.parents[rows] == parent[:, None]].view(-1, VOCAB)
        found = torch.bincount(children[:, 0], minlength=VOCAB)
        assert compare(found, second[parent_token].double().exp()) > 1e-3
        law = without_replacement(second[parent_token].double().exp(), 2)
        counts = torch.bincount(children[:, 0] * VOCAB + children[:, 1], minlength=VOCAB**2)
        pairs = torch.stack([counts[a * VOCAB + b] for a, b in law])
        assert compare(pairs, torch.tensor(list(law.values()))) > 1e-3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.booleans())
def test_levels_are_well_formed(seed: int, width: int, drawn: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests, vocab = 3, 5
    rows = torch.full((requests,), drawn)
    level = Level.root(torch.arange(requests, dtype=torch.int32))
    before = level
    for depth in range(3):
        logits = 4 * torch.randn(requests, level.tokens.shape[1], vocab, generator=generator)
        # Filters leave few tokens.
        logits[logits < 2] = -torch.inf
        logits[:, :, 0] = 0.0
        log_p = torch.log_softmax(logits, -1)
        noise = gumbel(*log_p.shape, seed=seed + depth) * drawn
        before, level = level, beam(level, log_p, noise, width, rows)
        assert level.tokens.shape[1] <= width
        assert not torch.isnan(level.scores).any()
        for row in range(requests):
            real = level.tokens[row] >= 0
            count = int(real.sum())
            assert real[:count].all()
            parents, tokens = level.parents[row, :count], level.tokens[row, :count]
            pairs = list(zip(parents.tolist(), tokens.tolist(), strict=True))
            assert len(set(pairs)) == count
            assert (before.tokens[row, parents] >= 0).all()
            scores = level.scores[row, :count].tolist()
            assert scores == sorted(scores, reverse=True)
            chosen = log_p[row, parents, tokens.long()].double()
            expected = before.log_probs[row, parents] + chosen
            assert level.log_probs[row, :count].tolist() == pytest.approx(expected.tolist())


def test_a_level_without_its_last_nodes_is_a_narrower_beam() -> None:
    """Engines cut trees by count. In another order than the sampling order, what is kept of a
    node's children would depend on those that are not."""
    _, lower = two_levels(5)
    _, narrower = two_levels(3)
    assert lower.tokens[:, :3].tolist() == narrower.tokens.tolist()
    assert lower.parents[:, :3].tolist() == narrower.parents.tolist()


def test_without_noise_a_beam_takes_the_most_likely_sequences() -> None:
    first, second = chain()
    upper = beam(roots(1), first.view(1, 1, -1), torch.zeros(1, 1, VOCAB), 3, torch.tensor([False]))
    log_p = second[upper.tokens.long()]
    lower = beam(upper, log_p, torch.zeros_like(log_p), 4, torch.tensor([False]))
    best = (first[:, None] + second).flatten().topk(4).values
    assert sorted(lower.log_probs[0].tolist(), reverse=True) == pytest.approx(best.tolist())


def test_fewer_tokens_than_children_leave_padding_at_the_end() -> None:
    log_p = torch.tensor([[[0.0, -torch.inf, -torch.inf], [-0.7, -torch.inf, -0.69]]])
    level = Level.root(torch.zeros(1, dtype=torch.int32))
    two = Level(
        tokens=torch.tensor([[0, 1]], dtype=torch.int32),
        parents=torch.zeros(1, 2, dtype=torch.int64),
        log_probs=level.log_probs.expand(1, 2),
        scores=level.scores.expand(1, 2),
    )
    found = branch(two, log_p, torch.zeros_like(log_p), 2)
    assert found.tokens.tolist() == [[0, 2, 0, -1]]
    assert found.parents[:, :3].tolist() == [[0, 1, 1]]


def test_the_tail_keeps_its_order() -> None:
    """Scores far below the best sibling's, where differences of exponentials would vanish."""
    level = Level.root(torch.zeros(1, dtype=torch.int32))
    log_p = torch.tensor([[[-1e-7, -16.2, -40.0, -41.0, -80.0]]])
    found = beam(level, log_p, torch.zeros_like(log_p), 5, torch.tensor([True]))
    assert found.tokens.tolist() == [[0, 1, 2, 3, 4]]
    assert found.scores[0, 0] == 0.0
    assert (found.scores[0, :-1] > found.scores[0, 1:]).all()
    assert torch.isfinite(found.scores).all()


def test_children_without_a_probability_are_left_out() -> None:
    """A draft model that overflows gives NaN, which no token can be sampled from."""
    probs = torch.tensor([[[0.5, 0.5, 0.0]], [[torch.nan] * 3]])
    seeds, lengths, draws = torch.tensor([1, 2]), torch.tensor([5, 5]), torch.tensor([True, True])
    level = sampling.branch(roots(2), gumbel_top(probs, seeds, lengths, draws, 0, 3))
    assert sorted(level.tokens[0].tolist()) == [-1, 0, 1]
    assert level.tokens[1].tolist() == [-1, -1, -1]
