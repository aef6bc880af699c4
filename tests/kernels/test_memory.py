"""The memory of finished texts, compared with appending token by token in Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_texts import PlainMemory
from property_settings import CASES
from tree_kernels import memory as module
from tree_kernels.memory import TextMemory, append_texts, remember

CPU = torch.device("cpu")
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=6)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def check(memory, plain):
    assert int(memory.end) == plain.end
    assert memory.tokens.tolist() == plain.tokens
    index = [[row.get(at, 0) for at in range(plain.cells)] for row in plain.index]
    assert memory.index.tolist() == index


def appended(texts, capacity, append=append_texts, starts=None, context=0):
    """A memory to which texts were appended together, and the same in Python."""
    memory = TextMemory.of(capacity, CPU)
    plain = PlainMemory(len(memory.tokens), memory.index.shape[1])
    longest = max(1, *map(len, texts), 1)
    history = int32([text + [9] * (longest - len(text)) for text in texts]).view(-1, longest)
    starts = starts or [0] * len(texts)
    order = list(reversed(range(len(texts))))
    lengths = int32([len(text) for text in texts])
    append(memory, history, lengths, torch.tensor(order, dtype=torch.int64), int32(starts), context)
    for slot in order:
        if starts[slot] < len(texts[slot]):
            plain.append(texts[slot][max(starts[slot] - context, 0) :])
    return memory, plain


@CASES
@given(TEXTS, st.sampled_from([8, 64, 1024]))
def test_texts_are_appended_and_every_n_gram_leads_to_its_last_place(cpu_path, texts, capacity):
    check(*appended(texts, capacity))


@CASES
@given(st.lists(st.integers(0, 3), min_size=40, max_size=40), st.integers(0, 40), st.integers(0, 9))
def test_a_text_is_appended_from_its_start_on_with_what_came_before(cpu_path, text, start, context):
    check(*appended([text, text[:9]], 64, starts=[start, 3], context=context))


@pytest.mark.parametrize("capacity", [8, 32, 1024])
def test_kernel_appends_the_same_texts(interpreter, monkeypatch, capacity):
    monkeypatch.setattr(module, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in (40, 0, 7, 23)]
    check(*appended(texts, capacity, module._append_triton, starts=[5, 0, 0, 23], context=3))


def test_the_oldest_text_leaves_first(cpu_path):
    memory = TextMemory.of(32, CPU)
    for first in range(0, 60, 10):
        remember(memory, torch.arange(first, first + 10))
    # 32 places have room for two texts and separators, and a part of a third.
    kept = [*range(31, 40), -1, *range(40, 50), -1, *range(50, 60), -1]
    assert memory.text().tolist() == kept
    memory.clear()
    assert memory.text().tolist() == []
    assert not memory.index.any()


def test_positions_begin_again_at_the_end_of_the_count(cpu_path, interpreter):
    for append in (append_texts, module._append_triton):
        memory = TextMemory.of(64, CPU)
        remember(memory, torch.arange(30))
        memory.end.fill_(2**31 - 5)  # The index has positions beyond what follows.
        text = int32([[*range(30)]])
        append(memory, text, int32([30]), torch.tensor([0]), int32([0]), 0)
        assert int(memory.end) == 26 + 1 - 1
        for row, n in zip(memory.index, module.MEMORY_NGRAMS, strict=True):
            cell = int(module.ngram_cells(text[0, 20 - n : 20], len(row)))
            assert row[cell] == 15


def test_text_restores_a_memory(cpu_path):
    texts = [[1, 2, 3, 4, 5], [6, 7], [1, 2, 3, 4, 8]]
    memory, _ = appended(texts, 16)
    again = TextMemory.of(64, CPU)
    remember(again, memory.text())
    assert again.text()[:-1].tolist() == memory.text().tolist()


def test_a_memory_of_no_tokens_stays_empty(cpu_path):
    memory, _ = appended([[1, 2, 3, 4, 5, 6]], 0)
    assert memory.capacity == 0
    assert memory.text().tolist() == []
    assert int(memory.end) == 0


def test_shapes_that_do_not_fit_are_errors():
    memory = TextMemory.of(8, CPU)
    history, one, slots = int32([[1, 2]]), int32([1]), torch.tensor([0])
    for wrong in ((history[0], one, slots, one), (history, one, slots, int32([0, 0]))):
        with pytest.raises(ValueError, match="expected"):
            append_texts(memory, *wrong)


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu():
    generator = torch.Generator().manual_seed(0)
    here, there = TextMemory.of(1 << 12, CPU), TextMemory.of(1 << 12, torch.device("cuda"))
    for _ in range(8):
        history = torch.randint(0, 9, (4, 3000), generator=generator, dtype=torch.int32)
        lengths = torch.randint(0, 3000, (4,), generator=generator, dtype=torch.int32)
        slots, starts = torch.randperm(4, generator=generator)[:3], lengths // 3
        append_texts(here, history, lengths, slots, starts, 16)
        append_texts(there, *(each.cuda() for each in (history, lengths, slots, starts)), 16)
    for name in ("tokens", "index", "end"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())
