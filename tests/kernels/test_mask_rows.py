"""The bits of each row equal the mask, and rows outside the trees stay unchanged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_settings import CASES
from tree_kernels.mask_rows import _mask_rows_triton, mask_rows

UNTOUCHED = 0x5A5A5A5A


@st.composite
def batches(draw):
    """Trees between rows of other requests; rows have the words that they need, or more.

    The first nodes of the trees may have no rows.
    """
    torch.manual_seed(draw(st.integers(0, 99)))
    width = draw(st.sampled_from([1, 5, 31, 32, 33, 64, 81]))
    sizes = draw(st.lists(st.integers(1, width), min_size=1, max_size=4))
    gaps = [draw(st.integers(0, 2)) for _ in sizes]
    firsts = [draw(st.integers(0, size)) for size in sizes] if draw(st.booleans()) else None
    counts = [size - first for size, first in zip(sizes, firsts or [0] * len(sizes), strict=True)]
    starts = [sum(counts[: at + 1]) + sum(gaps[: at + 1]) - size for at, size in enumerate(sizes)]
    rows, words = sum(counts) + sum(gaps) + 1, -(-width // 32) + draw(st.integers(0, 1))
    masks = torch.rand(len(sizes), width, width) < 0.5
    # The last bit of a word is its sign bit.
    masks[:, :, 31::32] |= torch.rand(len(sizes), width, 1) < 0.5
    out = torch.full((rows, words), UNTOUCHED, dtype=torch.int32)
    integers = draw(st.sampled_from([torch.int32, torch.int64]))
    placed = torch.tensor(starts, dtype=integers), torch.tensor(sizes, dtype=integers)
    first_nodes = None if firsts is None else torch.tensor(firsts)
    return masks, *placed, out, first_nodes


def unpacked(row, width):
    joined = sum((word & 0xFFFFFFFF) << (32 * at) for at, word in enumerate(row))
    assert joined >> width == 0
    return [bool(joined >> column & 1) for column in range(width)]


def check(masks, starts, sizes, out, first_nodes):
    width, free = masks.shape[1], set(range(len(out)))
    firsts = [0] * len(sizes) if first_nodes is None else first_nodes.tolist()
    trees = zip(masks, starts.tolist(), sizes.tolist(), firsts, strict=True)
    for tree, start, size, first in trees:
        for node in range(first, size):
            assert unpacked(out[start + node].tolist(), width) == tree[node].tolist()
            free.remove(start + node)
    assert free
    assert all(out[row].eq(UNTOUCHED).all() for row in free)


@CASES
@given(batches())
def test_bits_say_what_the_mask_says(batch):
    mask_rows(*batch)
    check(*batch)


@settings(CASES, max_examples=8)
@given(batches())
def test_kernel_writes_the_same_rows(interpreter, batch):
    _mask_rows_triton(*batch)
    check(*batch)


def test_shapes_that_do_not_fit_are_errors():
    masks, one = torch.ones(1, 33, 33, dtype=torch.bool), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected"):
        mask_rows(masks, one, one, torch.zeros(9, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="bool"):
        mask_rows(masks.int(), one, one, torch.zeros(9, 2, dtype=torch.int32))


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu():
    torch.manual_seed(0)
    masks, sizes = torch.rand(16, 81, 81) < 0.3, torch.randint(1, 82, (16,))
    starts = sizes.cumsum(0) - sizes + 3
    out = torch.full((16 * 81 + 3, 3), UNTOUCHED, dtype=torch.int32)
    on_device = out.cuda()
    mask_rows(masks.cuda(), starts.cuda(), sizes.cuda(), on_device)
    mask_rows(masks, starts, sizes, out)
    assert torch.equal(on_device.cpu(), out)
