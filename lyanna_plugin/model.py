"""Lyanna's draft model (section 4.1): one transformer layer that continues the target's hidden
states.

    h_1     = layer(fuse(h_0, E(t_1)))     h_0: the target's last hidden state, t_1: the root
    h_{i+1} = layer(h_i)                   no token is fed back
    l_i     = h_i W_head                   the logits of all steps in one product

Hidden states are taken after the target's final norm; `E` and `W_head` are the target's own. Unlike
in the paper, a linear map precedes each step after the first, and an RMSNorm follows the layer. The
caller provides the attention, so that training, the engines and the tests run the same layer, each
with its own KV cache.

B is the batch size, S the length of a text, d the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from lyanna_plugin.token_info import TokenInfo

AttendBatch = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(q [B, S, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, D]) -> [B, S, Hq, D]`: attention over the
layer's KV, for a batch of texts."""

_OBSOLETE = {
    "between": True,
    "output_norm": True,
    "token_info": True,
    "first_token": True,
    "feeds_tokens": False,
}
"""Fields of earlier versions, with the only values that are still served."""


class LyannaConfig(BaseModel):
    """How a draft model is built.

    Attributes:
        target: Name of the target's folder.
        fingerprint: Hash of the target's weights.
        steps: Number of steps that were unrolled in training.
        token_info_rank: Rank of the low-rank form of the token info.
        num_hot_tokens: Number of tokens that have rows and columns in the token info.
        embedding_scale: Factor by which embeddings are multiplied before they are fused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    fingerprint: str
    steps: int = Field(3, ge=1)
    token_info_rank: int = Field(128, ge=1)
    num_hot_tokens: int = Field(8192, ge=1)
    embedding_scale: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _drop_obsolete(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, served in _OBSOLETE.items():
            if given.get(name, served) != served:
                raise ValueError(
                    f"{name}={given[name]!r} is no longer supported: train the drafter again"
                )
        return {name: value for name, value in given.items() if name not in _OBSOLETE}


class Attention(nn.Module):
    """The projections and the rotary embedding around the caller's attention."""

    def __init__(self, layer: Any, qkv_bias: bool) -> None:
        super().__init__()
        self.head_dim = int(layer.head_dim)
        out = layer.num_attention_heads * self.head_dim
        kv = layer.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(layer.hidden_size, out, bias=qkv_bias)
        self.k_proj = nn.Linear(layer.hidden_size, kv, bias=qkv_bias)
        self.v_proj = nn.Linear(layer.hidden_size, kv, bias=qkv_bias)
        self.o_proj = nn.Linear(out, layer.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)

    @property
    def reads_positions(self) -> bool:
        """Whether frequencies follow the longest position, which is read on the host for that."""
        rope_type = self.rotary.rope_type
        return "dynamic" in rope_type or rope_type == "longrope"

    def forward(self, x: Tensor, positions: Tensor, attend: AttendBatch) -> Tensor:
        """`[B, S, d]` at `positions [B, S]` to `[B, S, d]`."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary(x, positions)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=-2)
        result: Tensor = self.o_proj(attend(q, k, v).flatten(-2))
        return result


class UnrolledAttention:
    """Attention over known text and, from each position, over the layer's own draft steps.

    The first call attends causally to the text. In each later call the state at position p attends
    to the text up to p and to the earlier steps that started at p.

    Args:
        length: Number of positions of the text.
        device: Device of the hidden states.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        self._cache: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = len(self._causal)
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        self._cache.append((k, v))
        (text_keys, text_values), *steps = self._cache
        scale = q.shape[-1] ** -0.5
        text = torch.einsum("bqhd,bkhd->bhqk", q, text_keys) * scale
        scores = [text.masked_fill(~self._causal, -torch.inf)]
        for keys, _ in steps:
            scores.append(((q * keys).sum(-1) * scale).transpose(1, 2)[..., None])
        weights = torch.cat(scores, -1).softmax(-1)
        result = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], text_values)
        for step, (_, values) in enumerate(steps):
            result = result + weights[..., length + step].transpose(1, 2)[..., None] * values
        return result


class LyannaModel(nn.Module):
    """The trained parts of the drafter.

    Args:
        layer: The target's configuration with one layer, of the Llama or the Qwen2 family.
        config: Lyanna's own settings.
        hot_tokens: `int [H]`, the tokens that have token info.

    Attributes:
        architecture: Name in `config.json`. A subclass that drafts differently has another name,
            and is not served.
    """

    architecture = "LyannaDrafter"

    def __init__(self, layer: Any, config: LyannaConfig, hot_tokens: Tensor) -> None:
        super().__init__()
        size = int(layer.hidden_size)
        self.layer_config = layer
        self.config = config
        self.fuse_proj = nn.Linear(2 * size, size, bias=False)
        self.between: nn.Module = (
            nn.Linear(size, size, bias=False) if config.steps > 1 else nn.Identity()
        )
        self.input_layernorm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.self_attn = Attention(layer, qkv_bias=layer.model_type == "qwen2")
        self.post_attention_layernorm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.mlp = LlamaMLP(layer)
        self.norm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.token_info = TokenInfo(size, config.token_info_rank, hot_tokens, layer.vocab_size)

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the layer's weights.

        In float32 stay, as in training, the frequencies of the rotary embedding, and the token
        info, of which only the table is served.
        """
        for part in self.children():
            if part is not self.token_info:
                for weight in part.parameters():
                    weight.data = weight.data.to(dtype)

    def fusion_input(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The input of the fusion, `[..., 2 d]`: hidden states and scaled embeddings."""
        scaled = self.config.embedding_scale * embedded.to(hidden.dtype)
        return torch.cat([hidden, scaled], -1)

    def fuse(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The layer's input `[..., d]` at accepted tokens.

        Args:
            hidden: `[..., d]`, the hidden states before the tokens.
            embedded: `[..., d]`, the tokens' embeddings.
        """
        result: Tensor = self.fuse_proj(self.fusion_input(hidden, embedded))
        return result

    def step_input(self, states: Tensor, embedded: Tensor) -> Tensor:
        """The layer's input `[..., d]` at the steps after the first.

        Args:
            states: `[..., d]`, the layer's last output.
            embedded: `[..., d]`, embeddings of the tokens that these states predict. They are not
                used here; a subclass may feed them back.
        """
        result: Tensor = self.between(states)
        return result

    def forward(self, x: Tensor, positions: Tensor, attend: AttendBatch) -> Tensor:
        """One step of the layer: `[B, S, d]` at `positions [B, S]` to the next hidden states."""
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        result: Tensor = self.norm(x)
        return result

    def unroll(self, hidden: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """The layer's hidden states from every position of known text.

        Step i at position p predicts the target's hidden state at p + i. It attends to the known
        text up to p and to its own earlier steps, as in serving (EAGLE-3's training-time test).

        Args:
            hidden: `[B, S, d]`, the target's hidden states.
            embedded: `[B, S or more, d]`, embeddings of the tokens that follow each position. Only
                the first S are read, unless a subclass feeds tokens back in `step_input`.
            steps: Number of steps.

        Returns:
            `steps` tensors `[B, S, d]`.
        """
        length = hidden.shape[1]
        positions = torch.arange(length, device=hidden.device)[None]
        attend = UnrolledAttention(length, hidden.device)
        states = [self(self.fuse(hidden, embedded[:, :length]), positions, attend)]
        for step in range(1, steps):
            x = self.step_input(states[-1], embedded[:, step : step + length])
            states.append(self(x, positions + step, attend))
        return states
