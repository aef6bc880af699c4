"""Measured forwards compute random tokens, which a mixture of experts spreads over its experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttree.vllm import forward


class Runner:
    """A model runner that keeps the tokens which its dummy run reads."""

    inputs_embeds: SimpleNamespace

    device = torch.device("cpu")
    uniform_decode_query_len = 3
    lora_config = None
    supports_mm_inputs = False
    model_config = SimpleNamespace(get_vocab_size=lambda: 512)
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)

    def __init__(self) -> None:
        self.input_ids = SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int32))

    def _dummy_run(self, tokens: int, **_: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.read = self.input_ids.gpu[:tokens].clone()
        return torch.zeros(tokens, 2), torch.zeros(tokens, 2)


def are_random(ids: torch.Tensor) -> bool:
    return len(ids.unique()) > len(ids) // 2 and bool((ids < 512).all()) and bool((ids >= 0).all())


def test_a_dummy_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    runner = Runner()
    assert forward.step_seconds(runner, 40) > 0
    assert are_random(runner.read)
    assert not runner.input_ids.gpu.any()


def test_a_dummy_run_of_a_multimodal_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads embeddings in place of tokens."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    runner = Runner()
    runner.supports_mm_inputs = True
    runner.inputs_embeds = SimpleNamespace(gpu=torch.zeros(64, 1))
    runner.model = SimpleNamespace(
        compute_logits=lambda hidden: hidden, embed_input_ids=lambda ids: ids[:, None].float()
    )
    assert forward.step_seconds(runner, 40) > 0
    assert torch.equal(runner.inputs_embeds.gpu[:40, 0], runner.read.float())


def test_a_forward_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def logits(runner: Any, ids: torch.Tensor, *_: Any) -> None:
        seen.append(ids)

    monkeypatch.setattr(forward, "_logits", logits)
    monkeypatch.setattr(forward, "_attention_metadata", lambda *_: (None, None))
    assert len(forward.forward_seconds(Runner(), 2, 16, 8, True, 3)) == 3
    assert all(are_random(ids) for ids in seen)


def attention_runner(num_blocks: int) -> Any:
    """A model runner with one layer, whose KV cache has blocks of 4 tokens."""
    builder = SimpleNamespace(build=lambda prefix, common: common)
    group = SimpleNamespace(layer_names=["layer"], get_metadata_builder=lambda number: builder)
    cache = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))
    config = SimpleNamespace(kv_cache_groups=[cache], num_blocks=num_blocks)
    return SimpleNamespace(attn_groups=[[group]], kv_cache_config=config)


def test_lengths_are_given_on_the_host_too() -> None:
    """Backends for latent attention read those of prompts there, and fail without them."""
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    blocks = torch.arange(6, dtype=torch.int32).view(3, 2)
    metadata, slots = forward._attention_metadata(
        attention_runner(7), 3, torch.tensor([4, 5] * 3), None, blocks
    )
    assert metadata["layer"].seq_lens_cpu_upper_bound.tolist() == [6, 6, 6]
    assert slots["layer"].tolist() == [4, 5, 12, 13, 20, 21]


@pytest.mark.parametrize(
    ("num_blocks", "table"),
    [(7, [[1, 2], [3, 4], [5, 6]]), (5, [[1, 2], [3, 4], [1, 2]]), (2, [[1, 1]] * 3)],
)
def test_measured_requests_share_blocks_where_there_are_too_few(
    num_blocks: int, table: list[list[int]]
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    runner = attention_runner(num_blocks)
    metadata, slots = forward._attention_metadata(runner, 3, torch.tensor([4, 5] * 3), None)
    assert metadata["layer"].block_table_tensor.tolist() == table
    assert int(slots["layer"].max()) < 4 * num_blocks
