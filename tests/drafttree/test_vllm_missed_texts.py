"""What a draft model has missed on the V2 model runner, compared with what it has read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES

pytest.importorskip("vllm")

from drafttree.arrays import LongArray
from drafttree.unread_texts import ROWS
from drafttree.vllm.v2.missed_texts import MissedTexts, pieces

SIZE = 4
"""Tokens of a block."""


def miss(texts: MissedTexts, row: int, count: int, earliest: int) -> None:
    texts.miss(np.array([row]), np.array([count]), np.array([earliest]))


def missed(texts: MissedTexts, row: int) -> int:
    return int(texts.of(np.array([row]))[0])


def test_steps_without_drafts_are_counted() -> None:
    texts = MissedTexts(2, SIZE, 100)
    texts.start(0, [7, 8], 0)
    miss(texts, 0, 6, 0)
    miss(texts, 0, 1, 6)
    assert missed(texts, 0) == 7
    texts.read(np.array([0, 1]))
    assert missed(texts, 0) == 0


def test_cached_blocks_that_were_missed_are_read_from_the_first_of_them() -> None:
    texts = MissedTexts(3, SIZE, 100)
    texts.start(0, [1, 2], 0)
    texts.read(np.array([0]))
    texts.append(0, [3, 4])
    miss(texts, 0, 3, 9)  # in the third block at the earliest
    texts.start(1, [1, 2, 3, 9], 12)
    assert missed(texts, 1) == 4
    texts.stop(0)
    texts.start(2, [1, 2, 3, 4], 16)
    assert missed(texts, 2) == 8
    # What one request reads has been read for all.
    texts.read(np.array([1, 2]))
    texts.start(0, [1, 2, 3, 5], 12)
    assert missed(texts, 0) == 0


def test_blocks_that_are_computed_anew_were_not_missed() -> None:
    texts = MissedTexts(2, SIZE, 100)
    texts.start(0, [1], 0)
    miss(texts, 0, 4, 0)
    texts.stop(0)
    texts.start(0, [1, 2], 0)
    texts.read(np.array([0]))
    texts.start(1, [1, 2], 8)
    assert missed(texts, 1) == 0


def test_blocks_that_are_found_in_the_step_that_computes_them() -> None:
    """Samples of one prompt start in one step, and the first of them ends before the others."""
    texts = MissedTexts(3, SIZE, 100)
    texts.start(0, [1, 2, 3], 0)
    texts.start(1, [1, 2, 4], 8)
    texts.start(2, [1, 2, 5], 8)
    texts.miss(np.array([0, 1, 2]), np.array([9, 1, 1]), np.array([0, 8, 8]))
    texts.stop(0)
    assert [missed(texts, row) for row in (1, 2)] == [9, 9]
    texts.read(np.array([1]))
    miss(texts, 1, 1, 9)
    assert missed(texts, 1) == 1
    # In a step that is read there is nothing to miss.
    texts.start(0, [6, 7], 0)
    texts.start(2, [6, 8], 4)
    texts.read(np.array([0, 2]))
    miss(texts, 2, 1, 5)
    assert missed(texts, 2) == 1


def test_a_block_that_is_found_in_part_counts_as_missed() -> None:
    texts = MissedTexts(1, SIZE, 100)
    texts.start(0, [1, 2, 3], 6)
    assert missed(texts, 0) == 2


class Cache:
    """Blocks whose tokens know whether they have been read, with requests that share them."""

    def __init__(self) -> None:
        self.read = np.zeros(400, np.bool_)
        self.blocks: list[list[int]] = [[] for _ in range(3)]
        self.lengths = [0, 0, 0]
        self.full: list[list[int]] = []
        self.next = 0
        self.texts = MissedTexts(3, SIZE, 100)

    def slots(self, row: int, start: int, end: int) -> LongArray:
        places = np.arange(start, end)
        return np.array(self.blocks[row], np.int64)[places // SIZE] * SIZE + places % SIZE

    def start(self, row: int, prefix: list[int]) -> None:
        self.stop(row)
        self.blocks[row], self.lengths[row] = [*prefix], SIZE * len(prefix)
        self.texts.start(row, prefix, SIZE * len(prefix))

    def stop(self, row: int) -> None:
        self.full.append(self.blocks[row][: self.lengths[row] // SIZE])
        self.texts.stop(row)

    def step(self, row: int, count: int, slack: int, *, read: bool) -> None:
        end = self.lengths[row] + count
        new = -(-end // SIZE) - len(self.blocks[row])
        blocks = [*range(self.next, self.next + new)]
        self.next += new
        self.blocks[row] += blocks
        self.texts.append(row, blocks)
        if read:
            first = self.lengths[row] - missed(self.texts, row)
            self.read[self.slots(row, first, end)] = True
            assert self.read[self.slots(row, 0, end)].all()
            self.texts.read(np.array([row]))
        else:
            self.read[self.slots(row, self.lengths[row], end)] = False
            miss(self.texts, row, count, max(self.lengths[row] - slack, 0))
        self.lengths[row] = end


@CASES
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.booleans(), st.integers(0, 9)),
        max_size=30,
    )
)
def test_all_is_read_before_anything_is_drafted(
    steps: list[tuple[int, int, bool, int]],
) -> None:
    cache = Cache()
    for row, count, read, which in steps:
        if not count:
            running = [cache.blocks[each][: cache.lengths[each] // SIZE] for each in range(3)]
            prefixes = [*cache.full, *running, []]
            cache.start(row, prefixes[which % len(prefixes)])
        elif cache.next < 90:
            cache.step(row, count, which, read=read)


def test_pieces_cover_what_was_missed() -> None:
    given = np.array([0, 3, 2 * ROWS, 1, 0, ROWS - 5])
    found: list[list[int]] = [[] for _ in given]
    for places, behind, read in pieces(given):
        assert read.sum() <= ROWS
        for place, first, count in zip(places, behind, read, strict=True):
            found[place] += range(first, first - count, -1)
    assert found == [[*range(count, 0, -1)] for count in given]
    assert not [*pieces(np.array([0, 0]))]
