"""Matches at the root, compared with comparing the texts token by token in Python."""

import pytest
import torch
from expansion_inputs import world
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import root_matches as plain_matches
from property_settings import CASES
from tree_kernels import root_matches as module
from tree_kernels.memory import TextMemory, remember
from tree_kernels.ngrams import NgramIndex, extend_ngrams
from tree_kernels.root_matches import MAX_MATCH, root_matches

CPU = torch.device("cpu")


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def expected(case):
    return [[*own, *memory] for own, memory in (plain_matches(t, case.memory) for t in case.texts)]


def given_of(case):
    return case.candidates.ngrams, case.candidates.memory, case.slots


@CASES
@given(
    st.integers(0, 99),
    st.sampled_from([1, 3, 12]),
    st.sampled_from([2, 64, 1024]),
    st.sampled_from([0, 16, 256]),
)
def test_the_longest_matches_are_found(cpu_path, seed, vocab, cells, places):
    case = world(seed, vocab=vocab, cells=cells, places=places, length=150, added=(90, 30))
    assert root_matches(*given_of(case)).tolist() == expected(case)


@pytest.mark.parametrize(("seed", "vocab", "added"), [(0, 1, (90,)), (1, 4, (60, 1)), (2, 2, (0,))])
def test_kernel_finds_the_same_matches(interpreter, seed, vocab, added):
    case = world(seed, vocab=vocab, cells=512, length=150, added=added)
    assert module._match_triton(*given_of(case)).tolist() == expected(case)


def matches(text, remembered, run, places=1 << 12):
    ngrams = NgramIndex.of(1, 300, 1 << 12, CPU)
    extend_ngrams(ngrams, torch.tensor([0]), int32([text]))
    memory = TextMemory.of(places, CPU)
    for each in remembered:
        remember(memory, int32(each))
    return run(ngrams, memory, torch.tensor([0])).tolist()[0]


def test_lengths_are_those_of_the_whole_match(cpu_path, interpreter):
    poem = list(range(100))
    for run in (root_matches, module._match_triton):
        assert matches([*poem[:40], 7, *poem[30:40]], [], run)[:2] == [40, 10]
        assert matches([*poem, 7, *poem], [], run)[:2] == [100, MAX_MATCH]
        # A match in the memory needs four tokens.
        assert matches(poem[:3], [poem], run)[2:] == [0, 0]
        assert matches(poem[:4], [poem], run)[2:] == [4, 4]
        assert matches(poem[2:60], [[5, 5], poem], run)[2:] == [63, 58]


def test_a_match_does_not_reach_into_another_text(cpu_path, interpreter):
    for run in (root_matches, module._match_triton):
        assert matches([1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6, 7]], run)[2:] == [0, 0]
        assert matches([1, 2, 3, 4, 5, 6], [[9, 3], [3, 4, 5, 6, 7]], run)[2:] == [7, 4]


def test_text_that_was_overwritten_is_not_found(cpu_path, interpreter):
    old = list(range(20))
    for run in (root_matches, module._match_triton):
        assert matches(old[:8], [old], run, 256)[3] == 8
        assert matches(old[:8], [old, list(range(50, 300))], run, 256)[3] == 0


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu():
    for seed in range(8):
        case = world(seed, vocab=4, length=500, cells=1 << 12, added=(400, 9), places=1 << 10)
        tables, slots, _ = case.on("cuda")
        found = root_matches(tables.ngrams, tables.memory, slots)
        assert found.tolist() == expected(case)
