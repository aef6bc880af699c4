"""The layer as engines run it is the trained one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lyanna_parts import drafter_for
from tiny_models import make_tiny_llama
from torch import Tensor
from torch.nn.functional import linear

from drafttree.linear import Linear
from lyanna_plugin.model import LyannaModel
from lyanna_plugin.served_layer import ServedLayer

POSITIONS = torch.tensor([3, 0, 40, 41])


def target_of(folder: Path, family: str, rope: dict[str, Any]) -> Path:
    made = make_tiny_llama(folder)
    file = made / "config.json"
    given = {"rope_theta": 10000.0, **rope}
    changed = {"model_type": family, "rope_parameters": given, "rope_scaling": given}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return made


def model_for(target: Path, dtype: torch.dtype) -> LyannaModel:
    """Random, also in what a new drafter has zeros or ones in, with scaled embeddings."""
    model = drafter_for(target, embedding_scale=2.0).requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            weight.data += torch.rand_like(weight)
    model.cast(dtype)
    return model


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A stand-in that mixes rows and depends on all three; of a batch or of rows alone."""
    groups = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)
    return v.cumsum(-3) * (q * k).sum(-1, keepdim=True).tanh()


def both(model: LyannaModel, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What the model and the served layer give: inputs and states of two steps."""
    served = ServedLayer(model)
    served.allocate(64)
    width = model.layer_config.hidden_size
    hidden, embedded = torch.randn(2, 4, width, generator=torch.manual_seed(1)).to(dtype)

    fused = model.fuse(hidden, embedded)
    first = model(fused[None], POSITIONS[None], attend)[0]
    after = model.between(first)
    expected = [fused, first, after, model(after[None], POSITIONS[None] + 1, attend)[0]]

    found = [served.fuse(hidden, embedded)]
    found.append(served(found[0], POSITIONS, attend))
    found.append(served.between(found[1]))
    found.append(served(found[2], POSITIONS + 1, attend))
    return expected, found


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_it_is_the_trained_layer(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    model = model_for(target_of(tmp_path / "target", family, rope), torch.float32)
    assert (model.self_attn.q_proj.bias is not None) == (family == "qwen2")
    expected, found = both(model, torch.float32)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    model.self_attn.k_proj.weight[0, 0] += 1
    assert not torch.allclose(both(model, torch.float32)[1][1], found[1], rtol=1e-5, atol=1e-5)


def test_outputs_of_some_rows_are_those_among_all(tmp_path: Path) -> None:
    model = model_for(make_tiny_llama(tmp_path), torch.float32)
    served = ServedLayer(model)
    served.allocate(64)
    x = torch.randn(4, model.layer_config.hidden_size, generator=torch.manual_seed(1))
    last = torch.tensor([1, 3])

    def attend_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert len(q) == len(last)
        return attend(q.new_zeros(4, *q.shape[1:]).index_copy(0, last, q), k, v)[last]

    every = served(x, POSITIONS, attend)
    torch.testing.assert_close(served(x, POSITIONS, attend_last, last), every[last])


def test_it_is_the_trained_layer_in_bfloat16(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", "qwen2", {"rope_type": "default"})
    expected, found = both(model_for(target, torch.bfloat16), torch.bfloat16)
    for one, other in zip(expected, found, strict=True):
        assert other.dtype == torch.bfloat16
        torch.testing.assert_close(other.float(), one.float(), rtol=0.03, atol=0.06)


def test_hidden_states_of_another_data_type(tmp_path: Path) -> None:
    """SGLang's Qwen2 returns them in float32 with `rl_on_policy_target`."""
    served = ServedLayer(model_for(make_tiny_llama(tmp_path), torch.bfloat16))
    hidden, embedded = torch.randn(2, 4, 128, generator=torch.manual_seed(1)).bfloat16()
    assert torch.equal(served.fuse(hidden.float(), embedded), served.fuse(hidden, embedded))


def test_a_layer_of_one_step_has_no_map_between_steps(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", "llama", {"rope_type": "default"})
    served = ServedLayer(drafter_for(target, steps=1).requires_grad_(False))
    states = torch.randn(3, 128)
    assert torch.equal(served.between(states), states)


def test_rows_that_pad_a_batch_may_have_any_position(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", "llama", {"rope_type": "default"})
    model = model_for(target, torch.float32)
    served = ServedLayer(model)
    served.allocate(8)
    width = model.layer_config.hidden_size
    states = served(torch.randn(3, width), torch.tensor([-1, 7, 2**40]), lambda q, k, v: q)
    assert states.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_products(rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    x = torch.randn(rows, 64).to(dtype)
    product = Linear(weight, bias if has_bias else None)
    has_own = dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert (product._packed is None) == has_own
    found = product(x)
    expected = linear(x, weight, bias if has_bias else None)
    assert found.dtype == dtype
    wide = dtype == torch.float32
    tolerances = {"rtol": 1e-5, "atol": 1e-4} if wide else {"rtol": 0.01, "atol": 0.05}
    torch.testing.assert_close(found.float(), expected.float(), **tolerances)
