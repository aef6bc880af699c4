"""The parts of a transformer layer between its matrix products: norm, rotary embedding and gate.

Here N is the number of rows, d the hidden size, Hq and Hkv the numbers of heads and D their size.
All floating tensors of a call have the same data type.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from tree_kernels._dispatch import CppFunction, Op

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _functions(name: str, signature: str) -> dict[torch.dtype, CppFunction]:
    return {
        dtype: CppFunction("layer_parts.cpp", f"{name}_{suffix}", signature)
        for dtype, suffix in _NAMES.items()
    }


_ADD_NORM = _functions("add_norm", "pppfppiii")
_ROTATE = _functions("rotate", "ppippppiiiii")
_GATE = _functions("gate", "ppiii")


def _add_norm_reference(
    x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = x if added is None else x + added
    return total, rms_norm(total, weight.shape, weight, epsilon)


def _add_norm_cpp(
    x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    function = _ADD_NORM.get(x.dtype)
    if function is None:
        return _add_norm_reference(x, added, weight, epsilon)
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    normed = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    function.call(
        *(x.data_ptr(), None if added is None else added.data_ptr(), weight.data_ptr(), epsilon),
        *(total.data_ptr(), normed.data_ptr(), *x.shape, torch.get_num_threads()),
    )
    return total, normed


def _rotate_reference(
    states: Tensor, angles: Tensor, positions: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    states = states.reshape(len(states), heads + 2 * kv_heads, angles.shape[-1])
    both, values = states[:, : heads + kv_heads], states[:, heads + kv_heads :]
    cosines, sines = angles[:, positions.clamp(0, angles.shape[1] - 1), None]
    rotated = both * cosines + both.roll(both.shape[-1] // 2, -1) * sines
    queries, keys = rotated[:, :heads], rotated[:, heads:]
    return queries.contiguous(), keys.contiguous(), values.contiguous()


def _rotate_cpp(
    states: Tensor, angles: Tensor, positions: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    function = _ROTATE.get(states.dtype)
    if function is None:
        return _rotate_reference(states, angles, positions, heads, kv_heads)
    states, angles = states.contiguous(), angles.contiguous()
    positions, rows, size = positions.long().contiguous(), len(states), angles.shape[2]
    queries = states.new_empty(rows, heads, size)
    keys, values = states.new_empty(2, rows, kv_heads, size)
    function.call(
        *(states.data_ptr(), angles.data_ptr(), angles.shape[1], positions.data_ptr()),
        *(queries.data_ptr(), keys.data_ptr(), values.data_ptr()),
        *(rows, heads, kv_heads, size, torch.get_num_threads()),
    )
    return queries, keys, values


def _gate_reference(gate_up: Tensor) -> Tensor:
    gates, up = gate_up.chunk(2, -1)
    return silu(gates) * up


def _gate_cpp(gate_up: Tensor) -> Tensor:
    function = _GATE.get(gate_up.dtype)
    if function is None:
        return _gate_reference(gate_up)
    gate_up = gate_up.contiguous()
    rows, width = len(gate_up), gate_up.shape[1] // 2
    result = gate_up.new_empty(rows, width)
    threads = torch.get_num_threads()
    function.call(gate_up.data_ptr(), result.data_ptr(), rows, width, threads)
    return result


_ADD_NORM_OP = Op(
    "layer_parts.add_norm",
    _add_norm_reference,
    cpp=_add_norm_cpp,
    needs=_ADD_NORM[torch.float32],
)
_ROTATE_OP = Op(
    "layer_parts.rotate",
    _rotate_reference,
    cpp=_rotate_cpp,
    needs=_ROTATE[torch.float32],
)
_GATE_OP = Op("layer_parts.gate", _gate_reference, cpp=_gate_cpp, needs=_GATE[torch.float32])


def add_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """A residual sum and its root mean square norm.

    Args:
        x: `[N, d]`.
        added: `[N, d]`; None for nothing.
        weight: `[d]`, the norm's.
        epsilon: Added to the mean of squares.

    Returns:
        `x + added` and its norm, `[N, d]` each.

    Raises:
        ValueError: Shapes do not fit.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or not (added is None or added.shape == x.shape):
        given = [None if each is None else [*each.shape] for each in (x, added, weight)]
        raise ValueError(f"expected [N, d], [N, d] and [d], not {given}")
    return _ADD_NORM_OP.on(x)(x, added, weight, epsilon)


def rotate(
    states: Tensor, angles: Tensor, positions: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with their rotary embedding, and values.

    Args:
        states: `[N, (Hq + 2 Hkv) D]`, queries, keys and values of each row.
        angles: `[2, P, D]`, at each position the cosines, and the sines by which the other half of
            a head is multiplied: the first half of them negative.
        positions: Int `[N]`. Those outside the table count as the nearest one in it.
        heads: Hq.
        kv_heads: Hkv.

    Returns:
        `[N, Hq, D]`, `[N, Hkv, D]` and `[N, Hkv, D]`, each contiguous.

    Raises:
        ValueError: Shapes do not fit.
    """
    rows, size = len(states), angles.shape[-1]
    fits = angles.shape == (2, angles.shape[1], size) and angles.shape[1] > 0 and size % 2 == 0
    if (
        not fits
        or positions.shape != (rows,)
        or states.shape[1:] != ((heads + 2 * kv_heads) * size,)
    ):
        given = [[*each.shape] for each in (states, angles, positions)]
        raise ValueError(
            f"expected [N, {heads + 2 * kv_heads} D], [2, P, D] and [N] with D even, not {given}"
        )
    return _ROTATE_OP.on(states)(states, angles, positions, heads, kv_heads)


def gate(gate_up: Tensor) -> Tensor:
    """SwiGLU: the first half of each row through SiLU, times the second, `[N, 2 I]` to `[N, I]`.

    Raises:
        ValueError: Rows have no two halves.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"expected [N, 2 I], not {[*gate_up.shape]}")
    return _GATE_OP.on(gate_up)(gate_up)
