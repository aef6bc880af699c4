"""The update of the bigram table, compared with writing it row by row in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import cell
from property_settings import CASES
from tree_kernels import bigrams as module
from tree_kernels.bigrams import update_bigrams


def step(seed, rows, vocab, own, k=3, cells=16, slots=3):
    """Rows with some that are skipped, some duplicates and some that share a cell."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    table = drawn(-1, vocab, slots if own else 1, cells, 2 + k).int()
    return (
        table,
        drawn(0, slots, rows),
        drawn(-1, vocab, rows).int(),
        drawn(-2, vocab, rows).int(),
        drawn(0, vocab, rows, k).int(),
    )


def written(table, slots, tokens, previous, candidates):
    expected = table.tolist()
    columns = (each.tolist() for each in (slots, tokens, previous, candidates))
    for slot, token, first, found in zip(*columns, strict=True):
        if token >= 0 and first != -1:
            place = cell((first, token), table.shape[1])
            expected[slot if len(expected) > 1 else 0][place] = [first, token, *found]
    return expected


@CASES
@given(
    seed=st.integers(0, 1 << 20),
    rows=st.integers(0, 40),
    vocab=st.sampled_from([2, 9, 50000]),
    own=st.booleans(),
)
def test_the_last_row_of_a_cell_writes_it(cpu_path, seed, rows, vocab, own):
    case = step(seed, rows, vocab, own)
    expected = written(*case)
    update_bigrams(*case)
    assert case[0].tolist() == expected


@CASES
@given(
    seed=st.integers(0, 1 << 20),
    rows=st.integers(0, 12),
    vocab=st.sampled_from([2, 9, 50000]),
    own=st.booleans(),
)
def test_kernel_writes_the_same_cells(interpreter, seed, rows, vocab, own):
    case = step(seed, rows, vocab, own)
    expected = written(*case)
    module._update_triton(*case)
    assert case[0].tolist() == expected


def test_a_later_row_is_seen_across_the_kernel_s_blocks(interpreter):
    case = step(0, 300, 4, own=False, cells=256)
    expected = written(*case)
    module._update_triton(*case)
    assert case[0].tolist() == expected


def test_shapes_that_do_not_fit_are_errors():
    table, *columns, candidates = step(0, 5, 9, own=False)
    with pytest.raises(ValueError, match=r"not \[\[1, 16, 4\]"):
        update_bigrams(table[..., 1:], *columns, candidates)
    with pytest.raises(ValueError, match=r"\[4\]"):
        update_bigrams(table, columns[0][1:], *columns[1:], candidates)
