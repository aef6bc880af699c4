"""Logits of a step in chunks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from drafttree.vllm.step_logits import GrammarMasks, StepLogits, max_rows

ROWS, VOCABULARY = 11, 70


def some_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, VOCABULARY, generator=generator).to(dtype)


@pytest.mark.parametrize("size", [1, 4, ROWS])
def test_chunks_are_the_rows_in_order(size: int) -> None:
    whole = some_logits()
    logits = StepLogits(whole[:size], lambda rows: whole[rows], ROWS)
    chunks = [*logits.chunks()]
    assert max(len(chunk) for _, chunk in chunks) == size
    assert [row for rows, _ in chunks for row in range(rows.start, rows.stop)] == [*range(ROWS)]
    assert torch.equal(torch.cat([chunk for _, chunk in chunks]), whole)
    some = torch.tensor([0, 3, 9])
    assert torch.equal(logits.of(some), whole[some])
    assert torch.equal(logits.of(torch.arange(ROWS)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grammars_mask_chunks_as_they_mask_all_rows(dtype: torch.dtype) -> None:
    """Requests of the batch in another order than in the scheduler's output; one is not in it."""
    scheduled = {"a": [1, 2, 3], "b": [4], "c": [5, 6], "gone": [7, 8]}
    batch = ["c", "d", "a", "b", "e"]  # 3, 1, 4, 2 and 1 rows
    names = ["a", "gone", "e", "c"]
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (11, 3), dtype=np.int32)
    grammar = GrammarOutput(names, masks)
    whole = some_logits(dtype)
    expected = whole.clone()
    apply_grammar_bitmask(
        SimpleNamespace(scheduled_spec_decode_tokens=scheduled),
        grammar,
        SimpleNamespace(req_ids=batch),
        expected,
    )
    assert (expected != whole).any(1).sum() == 8
    first_rows = dict(zip(batch, [0, 3, 4, 8, 10], strict=True))
    found = GrammarMasks.of(grammar, scheduled, first_rows)
    logits = StepLogits(whole[:4].clone(), lambda rows: whole[rows], ROWS, found)
    assert torch.equal(torch.cat([chunk for _, chunk in logits.chunks()]), whole)
    chunks = [chunk.clone() for rows, chunk in logits.chunks() if logits.mask(rows, chunk)]
    assert torch.equal(torch.cat(chunks), expected)
    some = torch.tensor([0, 3, 7, 10])
    assert torch.equal(logits.of(some), expected[some])
    at_once = StepLogits(whole.clone(), lambda rows: whole[rows], ROWS, found)
    assert torch.equal(at_once.of(some), expected[some])
    assert torch.equal(at_once.of(torch.arange(ROWS)), expected)


def test_rows_of_a_large_vocabulary_take_at_most_256_mib() -> None:
    assert max_rows(2 * 151936) == 883
    assert max_rows(2 * 151936, 2) == 441
    assert max_rows(1 << 40) == 1
