"""Lyanna's draft model: token info, unrolled steps and checkpoints; and the ablation variants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lyanna_parts import drafter_for
from tiny_models import make_tiny_llama
from torch.nn import functional as F

from lyanna_plugin.checkpoint import check, load, save
from lyanna_plugin.model import AttendBatch, LyannaConfig, LyannaModel
from lyanna_plugin.token_info import TokenInfo
from scripts.experiments.lyanna.variants import (
    VARIANTS,
    EagleStyle,
    WithoutFirstToken,
    WithoutTokenInfo,
    load_variant,
)


@pytest.fixture(params=[LyannaModel, EagleStyle])
def drafter(target: Path, request: pytest.FixtureRequest) -> LyannaModel:
    return drafter_for(target, model=request.param)


def test_the_table_is_the_low_rank_form() -> None:
    torch.manual_seed(0)
    hot = torch.tensor([3, 4, 9, 17])
    info = TokenInfo(hidden_size=8, rank=3, hot_tokens=hot, vocab_size=20)
    info.gain.data = torch.rand(4)
    embeddings = torch.randn(20, 8)
    table = info.collapse(embeddings[hot], torch.float32)
    by_hand = embeddings[hot] @ info.w1 @ info.w2
    by_hand = F.rms_norm(by_hand, (4,), info.gain, 1e-6)
    torch.testing.assert_close(table, by_hand)
    eighth = info.collapse(embeddings[hot], torch.float8_e4m3fn)
    torch.testing.assert_close(eighth.float(), by_hand, rtol=0.07, atol=0.01)
    tokens = torch.tensor([9, 5, 3])
    codes = info.codes(tokens, embeddings[tokens])
    rows = torch.stack([table[2], torch.zeros(4), table[0]])
    torch.testing.assert_close(codes @ info.columns(), rows)


def test_cold_tokens_neither_add_nor_receive() -> None:
    torch.manual_seed(0)
    info = TokenInfo(hidden_size=8, rank=3, hot_tokens=torch.tensor([3, 4, 9, 17]), vocab_size=20)
    embeddings, logits = torch.randn(20, 8), torch.randn(2, 20)
    tokens = torch.tensor([4, 5])
    added = info.add_to(logits, info.codes(tokens, embeddings[tokens]) @ info.columns())
    cold = [token for token in range(20) if token not in (3, 4, 9, 17)]
    assert torch.equal(added[:, cold], logits[:, cold])
    assert torch.equal(added[1], logits[1])
    assert (added[0, [3, 4, 9, 17]] != logits[0, [3, 4, 9, 17]]).all()


def own_cache() -> AttendBatch:
    """Causal attention with a KV cache that each call extends."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        before = sum(key.shape[1] for key in keys)
        keys.append(k)
        values.append(v)
        k, v = torch.cat(keys, 1), torch.cat(values, 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(before)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return result.transpose(1, 2)

    return attend


def test_unrolling_known_text_equals_serving_it_position_by_position(drafter: LyannaModel) -> None:
    """At each position, the KV is that of the text, followed by that of the draft steps there."""
    torch.manual_seed(1)
    size, length, steps = drafter.layer_config.hidden_size, 7, 3
    hidden, embedded = torch.randn(1, length, size), torch.randn(1, length + steps - 1, size)
    unrolled = drafter.unroll(hidden, embedded, steps)
    feeds_tokens = isinstance(drafter, EagleStyle)
    for position in range(length):
        attend = own_cache()
        text = drafter.fuse(hidden[:, : position + 1], embedded[:, : position + 1])
        state = drafter(text, torch.arange(position + 1)[None], attend)[:, -1:]
        for step in range(steps):
            torch.testing.assert_close(state[:, 0], unrolled[step][:, position])
            if step + 1 == steps:
                break
            token = embedded[:, position + step + 1 : position + step + 2]
            x = drafter.fuse(state, token) if feeds_tokens else drafter.between(state)
            state = drafter(x, torch.tensor([[position + step + 1]]), attend)


def test_logits_of_all_steps_in_one_product_are_those_of_each(drafter: LyannaModel) -> None:
    torch.manual_seed(2)
    size = drafter.layer_config.hidden_size
    head = torch.randn(drafter.layer_config.vocab_size, size)
    states = drafter.unroll(torch.randn(2, 5, size), torch.randn(2, 7, size), 3)
    together = torch.stack(states, 2) @ head.T
    for step, state in enumerate(states):
        torch.testing.assert_close(together[:, :, step], state @ head.T)


def test_a_saved_drafter_is_loaded_unchanged(
    target: Path, drafter: LyannaModel, tmp_path: Path
) -> None:
    save(drafter, tmp_path)
    loaded = load(tmp_path, target, type(drafter))
    assert loaded.config == drafter.config
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().to(value.dtype))


def test_a_drafter_is_refused_for_another_target(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save(drafter_for(target), folder)
    other = make_tiny_llama(tmp_path / "other", seed=5)
    with pytest.raises(ValueError, match=r"whose weights are not those of the target .*other"):
        load(folder, other)
    small = make_tiny_llama(tmp_path / "small", vocab_size=100)
    with pytest.raises(ValueError, match=r"vocab_size 512, but the target .*small has 100"):
        load(folder, small)


def test_errors_name_what_is_wrong_with_a_folder(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        load(folder, target)
    save(drafter_for(target), folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="are damaged"):
        load(folder, target)
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    config["lyanna"]["token_info_rank"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"do not fit its config\.json"):
        load(folder, target)
    del config["lyanna"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="not a Lyanna drafter"):
        load(folder, target)
    with pytest.raises(ValueError, match="not a Lyanna drafter"):
        load(target, target)
    for damaged in ("{", "3", '{"lyanna": {}}'):
        (folder / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            load(folder, target)


@pytest.mark.parametrize("variant", [WithoutTokenInfo, WithoutFirstToken, EagleStyle])
def test_variants_for_ablations_are_not_served(
    target: Path, tmp_path: Path, variant: type[LyannaModel]
) -> None:
    drafter = drafter_for(target, model=variant)
    save(drafter, tmp_path)
    complaint = rf"architectures=\['{variant.architecture}'\], not \['LyannaDrafter'\]"
    with pytest.raises(ValueError, match=complaint):
        check(str(target), str(tmp_path))
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, target)
    assert type(load_variant(tmp_path, target)) is variant


def test_every_variant_has_its_own_architecture() -> None:
    classes = {model for model, _ in VARIANTS.values()}
    assert len({model.architecture for model in classes}) == len(classes) == 4


def test_variants_ignore_the_part_that_they_are_named_after(target: Path) -> None:
    complete, no_info, no_token = (
        drafter_for(target, model=model)
        for model in (LyannaModel, WithoutTokenInfo, WithoutFirstToken)
    )
    size = complete.layer_config.hidden_size
    hidden, embedded = torch.randn(3, size), torch.randn(3, size)
    tokens = torch.tensor([1, 2, 3])

    def added(drafter: LyannaModel) -> torch.Tensor:
        info = drafter.token_info
        return info.codes(tokens, embedded) @ info.columns()

    assert (added(complete) != 0).any()
    assert (added(no_info) == 0).all()
    assert (no_info.token_info.collapse(torch.randn(64, size), torch.float32) == 0).all()
    assert not torch.equal(complete.fuse(hidden, embedded), complete.fuse(hidden, 2 * embedded))
    assert torch.equal(no_token.fuse(hidden, embedded), no_token.fuse(hidden, 2 * embedded))


def test_fields_of_earlier_versions_are_read_or_refused() -> None:
    needed = {"target": "x", "fingerprint": "y"}
    served = {
        **{"between": True, "output_norm": True, "token_info": True},
        **{"first_token": True, "feeds_tokens": False},
    }
    assert LyannaConfig.model_validate({**needed, **served}) == LyannaConfig(**needed)
    for name, value in served.items():
        with pytest.raises(ValueError, match=f"{name}={not value} is no longer supported"):
            LyannaConfig.model_validate({**needed, **served, name: not value})
    with pytest.raises(ValueError, match="Extra inputs"):
        LyannaConfig.model_validate({**needed, "unknown": 1})


def test_a_drafter_is_checked_without_its_weights(target: Path, tmp_path: Path) -> None:
    save(drafter_for(target), tmp_path)
    check(str(target), str(tmp_path))
    with pytest.raises(ValueError, match="are not on this machine"):
        check("somebody/a-model", str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        check(str(target), str(tmp_path))
