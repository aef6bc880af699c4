"""The texts of running requests, in bounded memory."""

from __future__ import annotations

import random

import pytest
import torch
from tree_kernels.ngrams import LONGEST, NgramIndex, extend_ngrams, find_matches, previous_tokens

from recycle_plugin import texts as module
from recycle_plugin.tables import OWN_BYTES, Tables
from recycle_plugin.texts import MAX_BYTES, Texts

CPU = torch.device("cpu")
ALL = torch.arange(2)


def text_of(texts: Texts, slot: int) -> list[int]:
    return texts.ngrams.history[slot, : int(texts.ngrams.lengths[slot])].tolist()


@pytest.mark.parametrize(
    ("slots", "context"),
    [(1024, 131072), (1024, 40960), (256, 1 << 20), (64, 4096), (1, 1 << 20), (16384, 131072)],
)
def test_memory_is_bounded_whatever_the_engine_allows(slots: int, context: int) -> None:
    texts = Texts(slots, context, CPU)
    assert texts.nbytes <= MAX_BYTES == 128 << 20
    assert texts.room == context or texts.nbytes > MAX_BYTES // 2
    tables = Tables(512, 8, CPU, bigrams=True, hot_start=True)
    tables.allocate_own(slots, private=False)
    assert tables.own.nbytes <= OWN_BYTES == 64 << 20


def test_what_common_engines_keep_of_a_text() -> None:
    assert Texts(256, 40960, CPU).room == 40960
    assert Texts(1024, 131072, CPU).room == 16384
    assert Texts(128, 131072, CPU).room == 131072


def test_the_beginning_of_a_long_text_is_found() -> None:
    texts = Texts(4, 100_000, CPU)
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(50_000, (100_000,), generator=draw)
    texts.start(0, text.tolist())
    ends = torch.randint(LONGEST, 10_000, (500,), generator=draw)
    suffixes = text[ends[:, None] + torch.arange(-LONGEST, 0)][None]
    _, found = find_matches(texts.ngrams, torch.tensor([0]), suffixes)
    # Two n-grams may share a cell.
    assert float(found[0, :, LONGEST - 1].float().mean()) > 0.4
    assert float(found.any(-1).float().mean()) > 0.9


@pytest.mark.parametrize("seed", range(4))
def test_a_text_that_is_too_long_loses_its_beginning(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is appended, the end of each text is kept and indexed, at least half of the room."""
    monkeypatch.setattr(module, "MAX_BYTES", 2 * 4 * 192)
    texts = Texts(2, 10_000, CPU)
    assert texts.room == 128
    draw = random.Random(seed)
    whole: list[list[int]] = []
    for slot, length in enumerate((draw.randrange(300), draw.randrange(100))):
        whole.append([draw.randrange(1000) for _ in range(length)])
        texts.start(slot, whole[-1])
    started = [len(text) for text in whole]
    for _ in range(80):
        columns = draw.choice((1, 3, 11, 40))
        rows = []
        for text in whole:
            count = draw.randrange(columns + 1)
            added = [draw.randrange(1000) for _ in range(count)]
            text += added
            rows.append(added + [-1] * (columns - count))
        texts.extend(ALL, torch.tensor(rows, dtype=torch.int32))
        for slot, text in enumerate(whole):
            kept = text_of(texts, slot)
            assert len(kept) >= min(len(text), texts.room // 2)
            assert kept == text[len(text) - len(kept) :]
            start = started[slot] - (len(text) - len(kept))
            assert texts.starts[slot] == max(start, 0)
        expected = [text[-2] if len(text) > 1 else -1 for text in whole]
        assert previous_tokens(texts.ngrams, ALL).tolist() == expected
    assert all(len(text_of(texts, slot)) < len(text) for slot, text in enumerate(whole))
    for slot in ALL.tolist():
        fresh = NgramIndex.of(1, texts.room, texts.ngrams.index.shape[1], CPU)
        kept = torch.tensor([text_of(texts, slot)], dtype=torch.int32)
        extend_ngrams(fresh, torch.tensor([0]), kept)
        assert torch.equal(texts.ngrams.index[slot], fresh.index[0])


def test_a_whole_context_is_never_shortened() -> None:
    texts = Texts(2, 96, CPU)
    texts.start(0, range(90))
    texts.extend(torch.tensor([0]), torch.arange(90, 96, dtype=torch.int32)[None])
    assert text_of(texts, 0) == [*range(96)]
