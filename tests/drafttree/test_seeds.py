"""Seeds of requests: those that users gave, and random ones."""

from __future__ import annotations

import torch

from drafttree.seeds import Seeds

CPU = torch.device("cpu")


def test_given_seeds_are_kept_and_others_change_with_each_step() -> None:
    seeds = Seeds(CPU)
    first, second = seeds.of([7, None, 7, None]), seeds.of([7, None, 7, None])
    assert first[::2].tolist() == second[::2].tolist() == [7, 7]
    assert len({*first[1::2].tolist(), *second[1::2].tolist()}) == 4
    assert Seeds(CPU).of([None, None]).tolist() == Seeds(CPU).of([None, None]).tolist()


def test_seeds_of_any_size_are_taken() -> None:
    large = [2**63, 2**64 - 1, -(2**63), 2**70 + 3]
    assert Seeds(CPU).of(large).tolist() == [-(2**63), -1, -(2**63), 3]


def test_engines_of_other_seeds_and_replicas_draw_other_numbers() -> None:
    engines = (0, 0), (0, 1), (0, 2), (5, 0), (-5, 1)
    drawn = [Seeds(CPU, *each).of([None]).item() for each in engines]
    assert len({*drawn}) == 5
    assert Seeds(CPU, 0, 1).of([None]).item() == drawn[1]


def test_there_may_be_no_requests() -> None:
    assert Seeds(CPU).of([]).dtype == torch.int64
