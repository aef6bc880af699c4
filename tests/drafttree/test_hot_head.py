"""The logits of hot tokens alone."""

from __future__ import annotations

import pytest
import torch

from drafttree.hot_head import HotHead

SIZE, VOCAB = 300, 512
HOT = torch.tensor([3, 7, 500, 1], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_whole_head(dtype: torch.dtype) -> None:
    head = torch.nn.Linear(SIZE, VOCAB, bias=False, dtype=dtype).requires_grad_(False)
    hot = HotHead(HOT, SIZE, dtype)
    states = torch.randn(5, SIZE, dtype=dtype)
    for scale in (1.0, 3.0):
        head.weight *= scale
        hot.read(head)
        logits, whole = hot.logits(states), head(states)
        assert logits.dtype == dtype
        assert logits.shape == (5, len(HOT))
        torch.testing.assert_close(logits, whole[:, HOT], rtol=0.02, atol=0.02)
