"""Texts and their n-gram index, compared with appending token by token in Python."""

import pytest
import torch
from expansion_inputs import added_tokens
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import LONGEST, PlainText, cell
from property_settings import CASES
from tree_kernels import ngrams
from tree_kernels.ngrams import (
    NgramIndex,
    extend_ngrams,
    find_matches,
    ngram_cells,
    previous_tokens,
)

CPU = torch.device("cpu")


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def made(seed, vocab, length, cells, added, extend=extend_ngrams, batch=4):
    """Texts in five slots, some of them extended several times, and the same texts as lists."""
    generator = torch.Generator().manual_seed(seed)
    ngram_index = NgramIndex.of(5, length, cells, CPU)
    plain = [PlainText(length, cells) for _ in range(5)]
    for columns in added:
        slots = torch.randperm(5, generator=generator)[:batch]
        tokens = added_tokens(generator, batch, columns, vocab)
        extend(ngram_index, slots, tokens)
        for slot, line in zip(slots.tolist(), tokens.tolist(), strict=True):
            plain[slot].extend(line)
    return ngram_index, plain


def check(ngram_index, plain):
    assert ngram_index.lengths.tolist() == [len(text.tokens) for text in plain]
    for slot, text in enumerate(plain):
        assert ngram_index.history[slot, : len(text.tokens)].tolist() == text.tokens
        assert not ngram_index.history[slot, len(text.tokens) :].any()
        index = [text.index.get(place, 0) for place in range(text.cells)]
        assert ngram_index.index[slot].tolist() == index
    previous = [(-1, -1, *text.tokens)[-2] for text in plain]
    assert previous_tokens(ngram_index, torch.arange(len(plain))).tolist() == previous


@CASES
@given(
    st.integers(0, 99),
    st.sampled_from([1, 3, 50]),
    st.sampled_from([1, 7, 40]),
    st.sampled_from([1, 8, 512]),
    st.lists(st.integers(0, 20), max_size=4),
)
def test_texts_grow_and_every_n_gram_leads_to_its_last_place(
    cpu_path, seed, vocab, length, cells, added
):
    ngram_index, plain = made(seed, vocab, length, cells, added)
    assert (
        ngram_index.history.dtype
        == ngram_index.lengths.dtype
        == ngram_index.index.dtype
        == torch.int32
    )
    check(ngram_index, plain)


@pytest.mark.parametrize(
    ("seed", "vocab", "length", "cells", "added"),
    [(0, 3, 90, 64, (40, 1, 5)), (1, 50, 30, 512, (20, 40)), (2, 2, 7, 1, (1, 3, 9))],
)
def test_kernel_makes_the_same_texts(interpreter, seed, vocab, length, cells, added):
    check(*made(seed, vocab, length, cells, added, ngrams._extend_triton, batch=2))


def test_kernel_reads_the_token_before_the_last(interpreter):
    ngram_index, plain = made(4, 50, 30, 64, (1, 1, 20), batch=3)
    slots = torch.randperm(len(plain), generator=torch.Generator().manual_seed(1))
    expected = [(-1, -1, *plain[slot].tokens)[-2] for slot in slots.tolist()]
    assert -1 in expected
    assert max(expected) >= 0
    for each in (slots, slots.int(), torch.empty(0, dtype=torch.int64)):
        tokens = ngrams._previous_triton(ngram_index, each)
        assert tokens.dtype == torch.int32
        assert tokens.tolist() == expected[: len(each)]


def test_kernel_indexes_across_its_blocks_of_columns(interpreter, monkeypatch):
    monkeypatch.setattr(ngrams, "_BLOCK", 16)
    check(*made(3, 3, 50, 128, (40, 3, 33), ngrams._extend_triton, batch=2))


@CASES
@given(st.integers(0, 99), st.lists(st.integers(0, 6), max_size=6))
def test_appending_in_pieces_gives_the_same_index(cpu_path, seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    tokens, slots = added_tokens(generator, 2, 40, 4), torch.tensor([2, 0])
    whole, pieces = NgramIndex.of(3, 30, 64, CPU), NgramIndex.of(3, 30, 64, CPU)
    extend_ngrams(whole, slots, tokens)
    for part in tokens.tensor_split(sorted(6 * cut for cut in cuts), 1):
        extend_ngrams(pieces, slots, part)
    assert torch.equal(whole.history, pieces.history)
    assert torch.equal(whole.lengths, pieces.lengths)
    assert torch.equal(whole.index, pieces.index)


def test_clearing_empties_one_text_and_no_other(cpu_path):
    ngram_index = NgramIndex.of(2, 10, 32, CPU)
    extend_ngrams(ngram_index, torch.tensor([0, 1]), int32([[1, 2, 3], [1, 2, 3]]))
    ngram_index.clear(0)
    extend_ngrams(ngram_index, torch.tensor([0]), int32([[7, 8]]))
    plain = [PlainText(10, 32), PlainText(10, 32)]
    plain[0].extend([7, 8])
    plain[1].extend([1, 2, 3])
    assert ngram_index.lengths.tolist() == [2, 3]
    for slot, text in enumerate(plain):
        index = [text.index.get(place, 0) for place in range(32)]
        assert ngram_index.index[slot].tolist() == index


@CASES
@given(st.integers(0, 99), st.sampled_from([1, 2, 16, 1 << 14]))
def test_matches_are_compared_with_the_text_where_cells_collide(seed, cells):
    ngram_index, plain = made(seed, 3, 60, cells, (30, 9, 9))
    generator = torch.Generator().manual_seed(seed)
    suffixes = torch.randint(0, 3, (5, 8, LONGEST), generator=generator)
    places, found = find_matches(ngram_index, torch.arange(5), suffixes)
    for slot, text in enumerate(plain):
        last = {}
        for end in range(1, len(text.tokens)):
            for n in range(1, min(LONGEST, end) + 1):
                last[tuple(text.tokens[end - n : end])] = end
        lines = suffixes[slot].tolist(), places[slot].tolist(), found[slot].tolist()
        for suffix, there, known in zip(*lines, strict=True):
            for n in range(1, LONGEST + 1):
                gram = suffix[-n:]
                assert known[n - 1] == (text.place_of(gram) is not None)
                if known[n - 1]:
                    assert there[n - 1] == last[tuple(gram)]


@CASES
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), st.integers(0, 20))
def test_hashes_are_those_of_32_bit_integers(tokens, bits):
    found = ngram_cells(torch.tensor(tokens), 1 << bits)
    assert found.dtype == torch.int64
    assert found.item() == cell(tokens, 1 << bits)
    assert ngram_cells(int32([tokens, tokens]), 1 << bits).tolist() == [found.item()] * 2


def test_no_requests_and_no_columns_change_nothing(cpu_path, interpreter):
    for extend in (extend_ngrams, ngrams._extend_triton):
        ngram_index = NgramIndex.of(2, 10, 32, CPU)
        extend(ngram_index, torch.empty(0, dtype=torch.int64), int32([]).view(0, 4))
        extend(ngram_index, torch.tensor([1]), int32([[]]))
        check(ngram_index, [PlainText(10, 32), PlainText(10, 32)])


def test_shapes_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match="power of two"):
        NgramIndex.of(1, 5, 12, CPU)
    with pytest.raises(ValueError, match="power of two"):
        NgramIndex.of(1, 5, 0, CPU)
    ngram_index = NgramIndex.of(2, 5, 8, CPU)
    with pytest.raises(ValueError, match="do not fit"):
        extend_ngrams(ngram_index, torch.tensor([0, 1]), int32([[1, 2]]))
    with pytest.raises(ValueError, match="do not fit"):
        extend_ngrams(ngram_index, torch.tensor([0]), int32([1]))


@pytest.mark.cuda
@pytest.mark.parametrize(("requests", "columns"), [(1, 5000), (64, 9), (5, 700)])
def test_cuda_agrees_with_the_cpu(requests, columns):
    generator = torch.Generator().manual_seed(columns)
    here = NgramIndex.of(requests, 6000, 1 << 12, CPU)
    there = NgramIndex.of(requests, 6000, 1 << 12, torch.device("cuda"))
    slots = torch.randperm(requests, generator=generator)
    for extra in (columns, 1, 4, columns):
        tokens = added_tokens(generator, requests, extra, 40)
        extend_ngrams(here, slots, tokens)
        extend_ngrams(there, slots.cuda(), tokens.cuda())
    for name in ("history", "lengths", "index"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())
