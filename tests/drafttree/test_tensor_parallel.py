"""Ranks of a tensor-parallel group agree on trees, on outcomes and on what is primed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from rank_threads import Ranks, on_ranks

from drafttree.drafter import ModelFreeDrafter, PrimeForward
from drafttree.tensor_parallel import (
    NonDraftingRank,
    broadcast_trees,
    broadcast_verified,
    follow_measurements,
    is_drafting_rank,
    leading_measurements,
    prime_ranks,
)
from drafttree.tree import DraftTree, Verified

CPU = torch.device("cpu")


def integers(*rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


TREES = DraftTree(
    integers([7, 8, 9], [5, 6, -1]), integers([-1, 0, 0], [-1, 0, -1]), integers(3, 2)
)


def test_all_ranks_get_the_first_ones_trees() -> None:
    def run(group: Ranks) -> DraftTree:
        roots = DraftTree.of_roots(integers(7, 5))
        return broadcast_trees(roots if group.rank_in_group else TREES, 4, group)

    for trees in on_ranks(run):
        assert trees.tokens.tolist() == [[7, 8, 9, -1, -1], [5, 6, -1, -1, -1]]
        assert trees.parents.tolist() == [[-1, 0, 0, -1, -1], [-1, 0, -1, -1, -1]]
        assert trees.tree_size.tolist() == [3, 2]


def test_all_ranks_get_the_first_ones_outcome() -> None:
    def run(group: Ranks) -> Verified:
        drawn = 20 + group.rank_in_group
        return broadcast_verified(
            Verified(integers([0, 2], [0, -1]), integers([9, drawn], [drawn, -1]), integers(2, 1)),
            group,
        )

    for verified in on_ranks(run):
        assert verified.path.tolist() == [[0, 2], [0, -1]]
        assert verified.emitted.tolist() == [[9, 20], [20, -1]]
        assert verified.num_emitted.tolist() == [2, 1]


class Primed(ModelFreeDrafter):
    """Runs two forwards, and then fails if it has to."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def prime(self, forward: PrimeForward, max_tokens: int, *, idle: bool) -> tuple[int, int]:
        forward(None, integers(4, 5, 6))
        forward(0, torch.arange(max_tokens, dtype=torch.int32))
        if self.fails:
            raise RuntimeError("no memory")
        return 3, 8


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_run_the_forwards_of_the_first_ones_drafter(fails: bool) -> None:
    def run(group: Ranks) -> tuple[object, object]:
        ran: list[tuple[int | None, list[int]]] = []

        def forward(root: int | None, tokens: torch.Tensor) -> torch.Tensor:
            ran.append((root, tokens.tolist()))
            return tokens

        drafter = NonDraftingRank(1) if group.rank_in_group else Primed(fails)
        try:
            return prime_ranks(drafter, forward, 4, group, CPU, idle=True), ran
        except RuntimeError as error:
            return str(error), ran

    (first, of_first), (second, of_second) = on_ranks(run)
    assert of_first == of_second == [(None, [4, 5, 6]), (0, [0, 1, 2, 3])]
    assert [first, second] == (["no memory", (0, 0)] if fails else [(3, 8)] * 2)


def broken(*given: object) -> Any:
    raise AttributeError("no head")


class Persistent(ModelFreeDrafter):
    """Goes on where a forward fails, as drafters do."""

    def prime(self, forward: PrimeForward, max_tokens: int, *, idle: bool) -> tuple[int, int]:
        for tokens in (integers(4, 5), integers(6)):
            with suppress(AttributeError):
                forward(None, tokens)
        return 3, 8


@pytest.mark.parametrize("failing", [{0, 1}, {1}])
def test_forwards_that_fail_on_other_ranks_end_nothing(
    failing: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: Ranks) -> tuple[object, list[float]]:
        fails = group.rank_in_group in failing
        drafter = NonDraftingRank(1) if group.rank_in_group else Persistent()
        forward = broken if fails else lambda root, tokens: tokens
        progress = prime_ranks(drafter, forward, 4, group, CPU, idle=True)
        measure = broken if fails else float
        if not is_drafting_rank(group):
            follow_measurements(measure, group, CPU)
            return progress, []
        measured: list[float] = []
        with leading_measurements(measure, group, CPU) as led:
            for tokens in (1, 8):
                with suppress(AttributeError):
                    measured.append(led(tokens))
        return progress, measured

    measured = [] if 0 in failing else [1, 8]
    assert on_ranks(run) == [((3, 8), measured), ((3, 8), [])]
    assert caplog.text.count("A forward that the first rank asked for has failed") == 4


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_run_the_forwards_that_the_first_one_measures(fails: bool) -> None:
    def run(group: Ranks) -> tuple[object, object, object]:
        ran: list[float] = []
        measured: list[float] = []

        def measure(tokens: int) -> float:
            ran.append(tokens)
            return tokens + group.rank_in_group / 2

        if not is_drafting_rank(group):
            follow_measurements(measure, group, CPU)
            return None, ran, measured
        try:
            with leading_measurements(measure, group, CPU) as led:
                measured += [led(1), led(8)]
                if fails:
                    raise RuntimeError("no time")
        except RuntimeError as error:
            return str(error), ran, measured
        return None, ran, measured

    assert on_ranks(run) == [("no time" if fails else None, [1, 8], [1, 8]), (None, [1, 8], [])]
