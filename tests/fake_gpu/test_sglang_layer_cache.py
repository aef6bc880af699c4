"""On the fake GPU, the KV cache of a drafter's layer in SGLang gives what it gives on the CPU."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from fake_gpu.tensors import DeviceTensor, Gpu, held
from lyanna_parts import drafter_for
from tiny_models import make_tiny_llama

from drafttree.sglang.layer_cache import LayerCache, LayerRows
from drafttree.transfer import on_device
from lyanna_plugin.model import LyannaModel

SLOTS, HEADS, KV_HEADS, SIZE = 90, 4, 2, 16
CALLS = (((7, 3, 20), (7, 5, 20)), ((1, 1, 1), (8, 6, 21)), ((3, 3, 3), (10, 8, 23)))
"""Rows and lengths of three requests in each call; the second request has a cached prefix."""


def attended(device: torch.device) -> list[torch.Tensor]:
    """What attention gives in each call: to all rows, and to the last one of each request."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(SLOTS, generator=generator).int().view(3, -1)
    cache = LayerCache(SLOTS, KV_HEADS, SIZE, torch.float32, device)
    slots = on_device(table.numpy(), device)
    found = []
    for counts, lengths in CALLS:
        shape = sum(counts), HEADS + 2 * KV_HEADS, SIZE
        given = on_device(torch.randn(shape, generator=generator).numpy(), device)
        rows, ends = LayerRows.of(counts, device), on_device(np.array(lengths, np.int64), device)
        q, k, v = given.split((HEADS, KV_HEADS, KV_HEADS), 1)
        cache.write(k, v, slots[rows.requests, rows.positions(ends)])
        found.append(cache.attend(q, rows, ends, slots))
        found.append(cache.attend(q[rows.ends], rows.last, ends, slots))
    return [held(each) for each in found]


def test_attention_of_a_layer(gpu: Gpu) -> None:
    expected = attended(torch.device("cpu"))
    with gpu.no_waiting(), gpu.recording() as record:
        found = attended(torch.device("cuda"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # One launch for all requests, however many rows they have.
    assert record.kernels["_attend_kernel"] == 2 * len(CALLS), record.report()


def test_last_rows_attend_as_among_all_rows() -> None:
    found = attended(torch.device("cpu"))
    for (counts, _), every, last in zip(CALLS, found[::2], found[1::2], strict=True):
        torch.testing.assert_close(last, every[np.cumsum(counts) - 1])


def test_positions_of_rows() -> None:
    rows = LayerRows.of((3, 1), torch.device("cpu"))
    assert rows.positions(torch.tensor([5, 9])).tolist() == [2, 3, 4, 8]
    assert rows.ends.tolist() == [2, 3]


def moved(model: LyannaModel, gpu: Gpu) -> LyannaModel:
    """A copy of a model whose weights are on the fake GPU."""
    copied = deepcopy(model)
    for module in copied.modules():
        for weights in (module._parameters, module._buffers):
            weights.update(
                {
                    name: DeviceTensor(each, gpu)
                    for name, each in weights.items()
                    if each is not None
                }
            )
    return copied


def states(model: LyannaModel, device: torch.device) -> torch.Tensor:
    """The layer's states over the prompts of two requests."""
    generator = torch.Generator().manual_seed(1)
    layer = model.layer_config
    heads, size = layer.num_key_value_heads, layer.head_dim
    cache = LayerCache(SLOTS, heads, size, torch.float32, device)
    table = torch.randperm(SLOTS, generator=generator).int().view(2, -1)
    slots = on_device(table.numpy(), device)
    lengths = on_device(np.array([5, 3], np.int64), device)
    rows = LayerRows.of((5, 3), device)
    given = torch.randn(2, 8, layer.hidden_size, generator=generator)

    positions = rows.positions(lengths)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache.write(k[0], v[0], slots[rows.requests, positions])
        return cache.attend(q[0], rows, lengths, slots)[None]

    x = model.fuse(*on_device(given.numpy(), device).unbind())
    return held(model.between(model(x[None], positions[None], attend)[0]))


@torch.inference_mode()
def test_lyannas_trained_layer(gpu: Gpu, tmp_path: Path) -> None:
    model = drafter_for(make_tiny_llama(tmp_path)).requires_grad_(False)
    expected = states(model, torch.device("cpu"))
    on_gpu = moved(model, gpu)
    with gpu.no_waiting():
        found = states(on_gpu, torch.device("cuda"))
    torch.testing.assert_close(found, expected)
