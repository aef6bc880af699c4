"""The parts of a layer between its products, against formulas in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels import layer_parts
from tree_kernels.layer_parts import add_norm, gate, rotate

DTYPES = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@st.composite
def states(draw, widths):
    """Random rows of any floating type, and a generator for more of them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rows, dtype = draw(st.sampled_from([0, 1, 3, 40])), draw(st.sampled_from(DTYPES))
    scale = draw(st.sampled_from([0.01, 1.0, 30.0]))
    return (scale * torch.randn(rows, draw(widths), generator=generator)).to(dtype), generator


def is_close(found, expected, dtype):
    """Within some roundings of each number, and of the largest one."""
    most = float(expected.abs().max()) if expected.numel() else 0.0
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(
        found.double(), expected, rtol=4 * rounding, atol=4 * rounding * most, check_dtype=False
    )


@CASES
@given(states(st.integers(1, 70)), st.booleans())
def test_a_sum_and_its_norm(case, adds):
    x, generator = case
    added = torch.randn(x.shape, generator=generator).to(x.dtype) if adds else None
    weight = torch.rand(x.shape[1], generator=generator).to(x.dtype)
    total, normed = add_norm(x, added, weight, 1e-5)
    expected = x if added is None else x + added
    assert torch.equal(total, expected)
    wide = expected.double()
    scale = (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    assert normed.dtype == x.dtype
    is_close(normed, wide * scale * weight, x.dtype)
    reference = layer_parts._add_norm_reference(x, added, weight, 1e-5)
    is_close(normed, reference[1].double(), x.dtype)


@CASES
@given(states(st.integers(1, 40).map(lambda half: 2 * half)))
def test_a_gate(case):
    gate_up, _ = case
    found = gate(gate_up)
    gates, up = gate_up.double().chunk(2, 1)
    assert found.dtype == gate_up.dtype
    is_close(found, gates * gates.sigmoid() * up, gate_up.dtype)
    is_close(found, layer_parts._gate_reference(gate_up).double(), gate_up.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_below_and_above_zero(dtype):
    gates = torch.tensor([[-60000.0, -200.0, -88.5, -20.0, 0.0, 20.0, 200.0, 60000.0]], dtype=dtype)
    found = gate(torch.cat((gates, torch.ones_like(gates)), 1))
    is_close(found, gates.double() * gates.double().sigmoid(), dtype)


@CASES
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([2, 6, 16, 64]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 8), max_size=40),
)
def test_rotation_by_positions(heads, kv_heads, size, dtype, positions):
    generator = torch.Generator().manual_seed(heads + 10 * size)
    rows, half = len(positions), size // 2
    given_states = torch.randn(rows, (heads + 2 * kv_heads) * size, generator=generator).to(dtype)
    turns = torch.rand(9, half, generator=generator) * 6
    cosines, sines = turns.cos(), turns.sin()
    angles = torch.stack((torch.cat((cosines, cosines), 1), torch.cat((-sines, sines), 1)))
    angles = angles.to(dtype)
    places = torch.tensor(positions, dtype=torch.int64)
    q, k, v = rotate(given_states, angles, places, heads, kv_heads)
    bounds = [0, heads, heads + kv_heads, heads + 2 * kv_heads]
    split = given_states.view(rows, heads + 2 * kv_heads, size).double()
    unrotated = [split[:, first:last] for first, last in pairwise(bounds)]
    assert torch.equal(v.double(), unrotated[2])
    cosines, sines = angles[:, places, None, half:].double()
    for found, states in zip((q, k), unrotated, strict=False):
        first, second = states.chunk(2, -1)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        assert found.dtype == dtype
        assert found.is_contiguous()
        is_close(found, torch.cat(turned, -1), dtype)
    reference = layer_parts._rotate_reference(given_states, angles, places, heads, kv_heads)
    for found, expected in zip((q, k, v), reference, strict=True):
        is_close(found, expected.double(), dtype)


def test_positions_outside_the_table_are_its_nearest():
    generator = torch.Generator().manual_seed(0)
    rows, angles = (
        torch.randn(1, 12, generator=generator),
        torch.randn(2, 5, 4, generator=generator),
    )
    outside = rotate(rows.expand(3, -1), angles, torch.tensor([-1, 5, 2**40]), 1, 1)
    inside = rotate(rows.expand(3, -1), angles, torch.tensor([0, 4, 4]), 1, 1)
    for found, expected in zip(outside, inside, strict=True):
        assert torch.equal(found, expected)


def test_strided_rows_give_the_same():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 24, generator=generator)
    x, weight = wide[:, ::2], torch.ones(12)
    assert torch.equal(
        add_norm(x, x, weight, 1e-5)[1], add_norm(x.contiguous(), x.contiguous(), weight, 1e-5)[1]
    )
    assert torch.equal(gate(x), gate(x.contiguous()))


def test_shapes_are_checked():
    x, angles = torch.zeros(2, 12), torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"expected \[N, d\], \[N, d\] and \[d\], not"):
        add_norm(x, x[:1], torch.ones(12), 1e-5)
    with pytest.raises(ValueError, match=r"and \[d\], not \[\[2, 12\], None, \[11\]\]"):
        add_norm(x, None, torch.ones(11), 1e-5)
    with pytest.raises(ValueError, match=r"expected \[N, 3 D\], \[2, P, D\] and \[N\]"):
        rotate(x, angles, torch.zeros(3, dtype=torch.int64), 1, 1)
    with pytest.raises(ValueError, match=r"expected \[N, 4 D\]"):
        rotate(x, angles, torch.zeros(2, dtype=torch.int64), 2, 1)
    with pytest.raises(ValueError, match="with D even"):
        rotate(torch.zeros(2, 9), torch.zeros(2, 3, 3), torch.zeros(2, dtype=torch.int64), 1, 1)
    with pytest.raises(ValueError, match=r"expected \[N, 2 I\], not \[2, 11\]"):
        gate(torch.zeros(2, 11))
