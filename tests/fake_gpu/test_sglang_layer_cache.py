"""On the fake GPU, the KV cache of a drafter's layer in SGLang gives what it gives on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from fake_gpu.tensors import Gpu, held

from drafttree.sglang.layer_cache import LayerCache, LayerRows
from drafttree.transfer import on_device

SLOTS, HEADS, KV_HEADS, SIZE = 90, 4, 2, 16
CALLS = (((7, 3, 20), (7, 5, 20)), ((1, 1, 1), (8, 6, 21)), ((3, 3, 3), (10, 8, 23)))
"""Rows and lengths of three requests in each call; the second request has a cached prefix."""


def attended(device: torch.device) -> list[torch.Tensor]:
    """What attention gives in each call."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(SLOTS, generator=generator).int().view(3, -1)
    cache = LayerCache(SLOTS, KV_HEADS, SIZE, torch.float32, device)
    slots = on_device(table.numpy(), device)
    found = []
    for counts, lengths in CALLS:
        shape = sum(counts), HEADS + 2 * KV_HEADS, SIZE
        given = on_device(torch.randn(shape, generator=generator).numpy(), device)
        found.append(
            cache.attend(
                *given.split((HEADS, KV_HEADS, KV_HEADS), 1),
                LayerRows.of(counts, device),
                on_device(np.array(lengths, np.int64), device),
                slots,
            )
        )
    return [held(each) for each in found]


def test_attention_of_a_layer(gpu: Gpu) -> None:
    expected = attended(torch.device("cpu"))
    with gpu.no_waiting(), gpu.recording() as record:
        found = attended(torch.device("cuda"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # One launch for all requests, however many rows they have.
    assert record.kernels["_attend_kernel"] == len(CALLS), record.report()


def test_positions_of_rows() -> None:
    rows = LayerRows.of((3, 1), torch.device("cpu"))
    assert rows.positions(torch.tensor([5, 9])).tolist() == [2, 3, 4, 8]
    assert rows.ends.tolist() == [2, 3]
