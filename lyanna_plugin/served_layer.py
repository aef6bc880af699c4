"""Lyanna's layer as engines run it: the function of `LyannaModel`, in fewer operations.

A step of the layer is short, so the number of operations counts as much as what they read. Products
with the same input are one, and the angles of the rotary embedding are read from a table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tree_kernels.layer_parts import add_norm, gate, rotate

from drafttree.linear import Linear
from drafttree.model_drafters import Attend
from lyanna_plugin.model import Attention, LyannaModel


class ServedLayer:
    """The maps and the layer of a trained drafter, for rows of any requests.

    Args:
        model: The drafter, whose weights have the data type to serve in.

    Attributes:
        heads: The layer's query heads, KV heads and head size.
    """

    def __init__(self, model: LyannaModel) -> None:
        layer, attention, mlp = model.layer_config, model.self_attn, model.mlp
        self.heads = (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim)
        self._embedding_scale = model.config.embedding_scale
        self._fuse = _joined(model.fuse_proj)
        self._between = _joined(model.between) if isinstance(model.between, nn.Linear) else None
        self._qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = _joined(attention.o_proj)
        self._gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self._down = _joined(mlp.down_proj)
        norms = model.input_layernorm, model.post_attention_layernorm, model.norm
        self._before_attention, self._before_mlp, self._after = (each.weight for each in norms)
        self._epsilon = layer.rms_norm_eps
        self._rotary = Rotary(attention)

    def allocate(self, positions: int) -> None:
        """Compute the rotary table of the first `positions` positions."""
        self._rotary.allocate(positions, self._after)

    def fuse(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The layer's input `[N, d]`, as `LyannaModel.fuse`."""
        # The target's hidden states may be of another data type than its weights.
        hidden = hidden.to(self._after.dtype)
        scaled = self._embedding_scale * embedded.to(hidden.dtype)
        return self._fuse(torch.cat((hidden, scaled), -1))

    def between(self, states: Tensor) -> Tensor:
        """The layer's input `[N, d]` at the steps after the first."""
        return states if self._between is None else self._between(states)

    def __call__(
        self, x: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None
    ) -> Tensor:
        """One step: `[N, d]` at `positions [N]` to the next hidden states, `[N, d]`.

        If `last [M]` is given, only these rows attend and go on; returns `[M, d]`.
        """
        heads, kv_heads, _ = self.heads
        _, normed = add_norm(x, None, self._before_attention, self._epsilon)
        angles, places = self._rotary.angles(x, positions)
        queries, keys, values = rotate(self._qkv(normed), angles, places, heads, kv_heads)
        if last is not None:
            x, queries = x[last], queries[last]
        attended = attend(queries, keys, values)
        mixed = self._out(attended.flatten(1))
        x, normed = add_norm(x, mixed, self._before_mlp, self._epsilon)
        _, states = add_norm(x, self._down(gate(self._gate_up(normed))), self._after, self._epsilon)
        return states


class Rotary:
    """The layer's rotary embedding, from a table of the angles at all positions.

    Args:
        attention: The layer's attention. Frequencies that follow the longest position of a step
            have no table, and are computed.
    """

    def __init__(self, attention: Attention) -> None:
        self._embedding = attention.rotary
        self._has_table = not attention.reads_positions

    def allocate(self, positions: int, like: Tensor) -> None:
        """Compute the table, `[2, positions, D]`.

        Args:
            positions: Number of positions.
            like: A tensor of the data type and device of the states.
        """
        if self._has_table:
            self._table = self._angles(like, torch.arange(positions, device=like.device))

    def angles(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A table of angles, and the places in it of rows at `positions [N]`."""
        if self._has_table:
            return self._table, positions
        return self._angles(like, positions), torch.arange(len(positions), device=like.device)

    def _angles(self, like: Tensor, positions: Tensor) -> Tensor:
        """Cosines, and the sines by which the swapped halves of a head are multiplied."""
        cosines, sines = (each[0] for each in self._embedding(like, positions[None]))
        first, second = sines.chunk(2, -1)
        return torch.stack((cosines, torch.cat((-first, second), -1)))


def _joined(*maps: nn.Linear) -> Linear:
    """Linear maps of the same input, as one."""
    weights = [each.weight.data for each in maps]
    biases = [each.bias.data for each in maps if each.bias is not None]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return Linear(weight, torch.cat(biases) if biases else None)
