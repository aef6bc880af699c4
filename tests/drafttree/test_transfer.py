"""Arrays that are copied in one transfer keep their shapes, data types and values."""

from __future__ import annotations

import numpy as np
import torch

from drafttree.transfer import all_on_device, packed, unpacked

ARRAYS = [
    np.arange(6, dtype=np.int32).reshape(2, 3).T,
    np.zeros((0, 4), np.int64),
    np.array([True, False, True]),
    np.array([-(2**40), 7]),
    np.array(5, np.int32),
]


def check(tensors: list[torch.Tensor]) -> None:
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        expected = torch.from_numpy(array.copy())
        assert tensor.dtype == expected.dtype
        assert tensor.tolist() == expected.tolist()


def test_packed_arrays_are_unpacked_unchanged() -> None:
    buffer = packed(ARRAYS)
    tensors = unpacked(buffer, ARRAYS)
    check(tensors)
    starts = [each.data_ptr() - buffer.data_ptr() for each in tensors if each.numel()]
    assert [start % 16 for start in starts] == [0] * 4


def test_on_a_cpu_nothing_is_copied() -> None:
    tensors = all_on_device(ARRAYS, torch.device("cpu"))
    check(tensors)
    assert tensors[0].data_ptr() == ARRAYS[0].ctypes.data
