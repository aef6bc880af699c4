"""Which steps have a CUDA graph in SGLang, by requests and draft tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from drafttree.sglang.graphs.sizes import MOST_ROWS, GraphSizes

STOCK = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4)]
"""The numbers of requests for which SGLang captures graphs with speculation, up to 64."""


def test_steps_are_captured_up_to_a_number_of_rows() -> None:
    sizes = GraphSizes.within_rows([0, 3, 7, 15], STOCK)
    assert {each: requests[-1] for each, requests in sizes.requests.items()} == {
        0: 64,
        3: 64,
        7: 32,
        15: 16,
    }
    assert sizes.most_rows == MOST_ROWS
    # No more than SGLang's own graphs of whole trees.
    assert sizes.graphs <= 2 * len(STOCK)
    assert sum((each + 1) * of[-1] for each, of in sizes.requests.items()) < 16 * STOCK[-1]


def test_batches_are_padded_by_at_most_half() -> None:
    for requests in GraphSizes.within_rows([0, 7, 80], STOCK).requests.values():
        assert requests[0] == 1
        assert set(requests[:-1]) <= set(STOCK)
        for smaller, larger in pairwise(requests):
            assert larger - smaller <= 4 or larger <= 1.5 * (smaller + 1)


def test_each_request_may_have_a_row_and_the_largest_trees_have_the_most() -> None:
    sizes = GraphSizes.within_rows([0, 3, 15], [1, 2, 400])
    assert sizes.requests == {0: (1, 2, 400), 3: (1, 2, 100), 15: (1, 2, 25)}
    assert sizes.most_rows == 400
    sizes = GraphSizes.within_rows([0, 3, 15, 80], STOCK)
    assert sizes.most_rows == 81 * sizes.requests[80][-1] >= 16 * sizes.requests[15][-1]


def test_few_requests_have_whole_trees() -> None:
    sizes = GraphSizes.within_rows([0, 3, 7, 15], [1, 2])
    assert sizes.requests == dict.fromkeys((0, 3, 7, 15), (1, 2))
    assert sizes.most_rows == 32
    # There are no three requests.
    assert sizes.step_of(3) == (1, 3)
    assert sizes.step_of(32) == (2, 15)


def test_the_trees_of_a_step() -> None:
    sizes = GraphSizes.within_rows([0, 3, 7, 15], STOCK)
    assert [sizes.largest(each) for each in (1, 16, 17, 32, 33, 64)] == [15, 15, 7, 7, 3, 3]
    assert [sizes.fitting(20, each) for each in (0, 1, 3, 4, 7)] == [0, 3, 3, 7, 7]
    # Without a graph SGLang verifies whole trees.
    assert sizes.largest(65) == 15
    assert sizes.fitting(65, 2) == 15


@pytest.mark.parametrize(("rows", "step"), [(1, (1, 0)), (2, (2, 0)), (4, (1, 3)), (17, (2, 15))])
def test_the_step_of_a_number_of_rows(rows: int, step: tuple[int, int]) -> None:
    assert GraphSizes.within_rows([0, 3, 7, 15], STOCK).step_of(rows) == step


def test_one_size() -> None:
    sizes = GraphSizes.one(80)
    assert not sizes.are_several
    assert sizes.largest(3) == sizes.fitting(3, 2) == 80
