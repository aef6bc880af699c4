"""Lyanna's drafter (section 4.1): one transformer layer that continues the target's hidden states.

    h_1     = layer(fuse(h_0, E(t_1)))     h_0: the target's last hidden state, t_1: the root
    h_{i+1} = layer(h_i)                   no token goes in
    l_i     = h_i W_head                   all steps in one product

Hidden states are those after the target's final norm; `E` and `W_head` are the target's own. The
attention itself is left to the caller, so that training, the engines and the tests run this layer,
each with the KV cache that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from lyanna_plugin.config_file import DrafterConfig
from lyanna_plugin.token_info import TokenInfo

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(q [..., Hq, D], k [..., Hkv, D], v [..., Hkv, D]) -> [..., Hq, D]`."""


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

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary(x, positions)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=-2)
        result: Tensor = self.o_proj(attend(q, k, v).flatten(-2))
        return result


class Drafter(nn.Module):
    """The trained parts.

    Args:
        layer: the target's configuration with one layer, of the Llama or the Qwen2 family.
        config: what Lyanna adds to it.
        hot_tokens: int `[H]`, those that have token info.
    """

    def __init__(self, layer: Any, config: DrafterConfig, hot_tokens: Tensor) -> None:
        super().__init__()
        size = int(layer.hidden_size)
        self.layer_config = layer
        self.config = config
        self.fuse_proj = nn.Linear(2 * size, size, bias=False)
        between = config.between and config.steps > 1
        self.between = nn.Linear(size, size, bias=False) if between else nn.Identity()
        self.input_layernorm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.self_attn = Attention(layer, qkv_bias=layer.model_type == "qwen2")
        self.post_attention_layernorm = LlamaRMSNorm(size, layer.rms_norm_eps)
        self.mlp = LlamaMLP(layer)
        self.norm = LlamaRMSNorm(size, layer.rms_norm_eps) if config.output_norm else nn.Identity()
        self.token_info = (
            TokenInfo(size, config.token_info_rank, hot_tokens, layer.vocab_size)
            if config.token_info
            else None
        )

    def fuse(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What goes in at a known token: `[..., d]` of the hidden state before it, `[..., d]` of
        its embedding."""
        scale = self.config.embedding_scale if self.config.first_token else 0.0
        result: Tensor = self.fuse_proj(torch.cat([hidden, scale * embedded.to(hidden.dtype)], -1))
        return result

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step of the layer: `[..., d]` at `positions [...]` to the next hidden states."""
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        result: Tensor = self.norm(x)
        return result

    def unroll(self, hidden: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """The drafter's hidden states from every position of known text, `steps` times
        `[B, S, d]`.

        Step i at position p stands for the target's hidden state at p + i. It sees the known text
        up to p and its own steps before, as in serving (the training-time test of EAGLE-3).

        Args:
            hidden: `[B, S, d]`, the target's.
            embedded: `[B, S + steps - 1, d]`, embeddings of the tokens that follow each position;
                all but the first S are read only where `feeds_tokens` says so.
        """
        length = hidden.shape[1]
        positions = torch.arange(length, device=hidden.device)[None]
        causal = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        cache: list[tuple[Tensor, Tensor]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            groups = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
            cache.append((k, v))
            scale = q.shape[-1] ** -0.5
            text = torch.einsum("bqhd,bkhd->bhqk", q, cache[0][0]) * scale
            scores = [text.masked_fill(~causal, -torch.inf)]
            for own, _ in cache[1:]:
                scores.append(((q * own).sum(-1) * scale).transpose(1, 2)[..., None])
            weights = torch.cat(scores, -1).softmax(-1)
            result = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], cache[0][1])
            for step, (_, own) in enumerate(cache[1:]):
                result = result + weights[..., length + step].transpose(1, 2)[..., None] * own
            return result

        states: list[Tensor] = []
        x = self.fuse(hidden, embedded[:, :length])
        for step in range(steps):
            if step:
                if self.config.feeds_tokens:
                    x = self.fuse(states[-1], embedded[:, step : step + length])
                else:
                    x = self.between(states[-1])
            states.append(self(x, positions + step, attend))
        return states
