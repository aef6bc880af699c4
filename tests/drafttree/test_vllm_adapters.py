"""A drafter's embeddings and logits are those of the target's own weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

from drafttree.vllm.adapters import unadapted_target


class Decoder(nn.Module):
    """A decoder that scales its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed_tokens(ids)
        return 2 * embedded


class Model(nn.Module):
    """A model like vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(4, 6)
        self.logits_processor: nn.Module = nn.Identity()

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits_processor(self.lm_head(hidden))
        return logits


def wrap(kind: type[nn.Module], base: nn.Module) -> Any:
    """A wrapper that has no adapter of any row, and so cannot compute."""
    wrapper: Any = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    wrapper.base_layer = base
    return wrapper


def test_wrappers_are_left_out_of_a_copy() -> None:
    model = Model()
    ids, hidden = torch.tensor([1, 3]), torch.ones(2, 4)
    embedded, logits = model.embed_input_ids(ids), model.compute_logits(hidden)
    embeddings = model.model.embed_tokens
    wrapped = wrap(VocabParallelEmbeddingWithLoRA, embeddings)
    model.model.embed_tokens = wrapped
    model.logits_processor = wrap(LogitsProcessorWithLoRA, model.logits_processor)
    own = unadapted_target(SimpleNamespace(get_model=lambda: model, lora_config=object()))
    assert own.embed_input_ids(ids).equal(embedded)
    assert own.compute_logits(hidden).equal(logits)
    # The engine goes on with the wrappers, and new weights are read.
    assert model.model.embed_tokens is wrapped
    assert own.model.layers is model.model.layers
    with torch.no_grad():
        embeddings.weight.zero_()
        model.lm_head.weight.zero_()
    assert not own.embed_input_ids(ids).any()
    assert own.compute_logits(hidden).equal(model.lm_head.bias.expand(2, -1))


def test_a_model_without_wrappers_is_not_copied() -> None:
    model = Model()
    for config in (None, object()):
        runner = SimpleNamespace(get_model=lambda: model, lora_config=config)
        assert unadapted_target(runner) is model
