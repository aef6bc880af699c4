"""A target with a layer of attention, by the backend for CUDA on the CPU and on a fake GPU.

Triton's interpreter must be there before vLLM is imported; see `v2_on_cpu`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec

from drafttree.vllm.attention.triton import TritonTreeImpl, TritonTreeMetadataBuilder
from fake_gpu.stand_ins import BLOCK, BUDGET, MAX_LEN, MAX_REQUESTS, VOCAB
from fake_gpu.vllm_v2_hosts import HostRunner, ModelFreeHost
from fake_gpu.vllm_v2_stock import Model, Weights

LAYER = "target.attention"
HEADS, KV_HEADS, SIZE = 4, 2, 16
SCALE = SIZE**-0.5


class AttendingWeights(Weights):
    """A target whose next token depends on all tokens before it.

    Attributes:
        tables: Queries, keys and values of each token, what its position adds to its key, and what
            attention adds to the logits.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.tables = {
            "query": 2 * random(VOCAB, HEADS, SIZE),
            "key": random(VOCAB, KV_HEADS, SIZE),
            "value": random(VOCAB, KV_HEADS, SIZE),
            "place": random(MAX_LEN, KV_HEADS, SIZE),
            "mix": 0.25 * random(HEADS * SIZE, VOCAB),
        }

    def plain_text(self, prompt: list[int], length: int) -> list[int]:
        """The most likely tokens after a prompt, decoded one by one."""
        text = [*prompt]
        for _ in range(length):
            tokens, places = torch.tensor(text), torch.arange(len(text))
            query, key, value = parts(self.tables, tokens, places)
            key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
            weights = (torch.einsum("hd,khd->hk", query[-1], key) * SCALE).softmax(1)
            attended = torch.einsum("hk,khd->hd", weights, value).flatten()
            logits = self.logits(tokens[-1:], places[-1:]) + attended @ self.tables["mix"]
            text.append(int(logits.argmax()))
        return text[len(prompt) :]


def parts(
    tables: dict[str, torch.Tensor], tokens: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[T, H, D]`, keys and values `[T, K, D]` of tokens at positions."""
    tokens, places = tokens.long(), places.clamp(max=MAX_LEN - 1).long()
    key = tables["key"][tokens] + tables["place"][places]
    return tables["query"][tokens], key, tables["value"][tokens]


class _AttendingModel(Model):
    """The target with its layer."""

    def forward(self, batch: Any, slots: torch.Tensor) -> torch.Tensor:
        """The logits of all rows of a step, `[T, V]`."""
        logits = super().forward(batch, slots)
        (runner,) = self._runner
        assert isinstance(runner, AttendingHost)
        count, cache = batch.num_tokens, runner.caches[LAYER]
        with runner.uncounted():
            query, key, value = parts(
                runner.tables, batch.input_ids[:count], batch.positions[:count]
            )
            places = slots[0, :count]
            cache[places // BLOCK, :, places % BLOCK] = torch.cat((key, value), 2)
            output = torch.zeros_like(query)
        metadata: Any = get_forward_context().attn_metadata
        layer: Any = None
        runner.attention.forward(layer, query, key, value, cache, metadata[LAYER], output)
        with runner.uncounted():
            return logits + output.flatten(1) @ runner.tables["mix"]


class AttendingHost(ModelFreeHost):
    """Token Recycling, with the kernel for tree attention alone."""

    weights_of_target = AttendingWeights

    def __init__(self, weights: AttendingWeights, device: torch.device, nodes: int) -> None:
        super().__init__(weights, device, nodes)
        self.tables = {name: each.to(device) for name, each in weights.tables.items()}
        self.attention = TritonTreeImpl(HEADS, SIZE, SCALE, KV_HEADS, None, None, "auto")
        self.caches[LAYER] = torch.zeros(BUDGET // BLOCK, KV_HEADS, BLOCK, 2 * SIZE, device=device)
        self.model = _AttendingModel(self)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Make what prepares a step for the layer."""
        scheduler = SimpleNamespace(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=BUDGET)
        config: Any = SimpleNamespace(
            scheduler_config=scheduler, num_speculative_tokens=self.num_speculative_steps
        )
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
        )
        builder = TritonTreeMetadataBuilder(spec, [LAYER], config, self.device)
        group = SimpleNamespace(layer_names=[LAYER], get_metadata_builder=lambda _: builder)
        super().load_model(*args, **kwargs)
        self.attn_groups = [[group]]


class Flash2Host(AttendingHost):
    """Flash attention 2 reads what comes before a step."""

    flash_version = 2


class Flash3Host(AttendingHost):
    """Flash attention 3 reads what comes before a step."""

    flash_version = 3


HOSTS: dict[str, type[HostRunner]] = {
    "kernel alone": AttendingHost,
    "flash attention 2": Flash2Host,
    "flash attention 3": Flash3Host,
}
"""Token Recycling's runners, by how they attend on the fake GPU."""
