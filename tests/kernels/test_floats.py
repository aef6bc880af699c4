"""The conversion between floats and 16-bit formats in C++, compared with PyTorch's, bit by bit."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
import tree_kernels
from torch import Tensor
from tree_kernels import _native

CONVERSIONS = """
#include "floats.h"

template <class T> void widen_all(const T* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
template <class T> void narrow_all(const float* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}
#define EXPORT_ALL(T) \\
  extern "C" void widen_##T(const T* from, float* to, int64_t n) { widen_all(from, to, n); } \\
  extern "C" void narrow_##T(const float* from, T* to, int64_t n) { narrow_all(from, to, n); }
EXPORT_ALL(Float16)
EXPORT_ALL(BFloat16)
"""

FORMATS = {torch.float16: "Float16", torch.bfloat16: "BFloat16"}
each_format = pytest.mark.parametrize("dtype", FORMATS)


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("floats")
    shutil.copy(Path(tree_kernels.__path__[0]) / "floats.h", folder)
    source = folder / "conversions.cpp"
    source.write_text(CONVERSIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTTREE_CACHE", str(folder / "cache"))
        library = _native.load_native(source)
    assert library is not None
    return library


def all_of(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a format."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def bits(numbers: Tensor) -> Tensor:
    """The bits of numbers, with one pattern for all NaNs."""
    numbers = torch.where(numbers.isnan(), torch.nan, numbers)
    return numbers.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])


def converted(library: ctypes.CDLL, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in another format; one of the two formats is float32."""
    to = torch.empty(len(numbers), dtype=dtype)
    function = f"narrow_{FORMATS[dtype]}" if dtype in FORMATS else f"widen_{FORMATS[numbers.dtype]}"
    getattr(library, function)(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_void_p(to.data_ptr()),
        ctypes.c_int64(len(numbers)),
    )
    return to


@each_format
def test_all_numbers_widen_as_in_pytorch(conversions: ctypes.CDLL, dtype: torch.dtype) -> None:
    numbers = all_of(dtype)
    assert torch.equal(bits(converted(conversions, numbers, torch.float32)), bits(numbers.float()))


@each_format
def test_numbers_and_what_lies_between_them_narrow_as_in_pytorch(
    conversions: ctypes.CDLL, dtype: torch.dtype
) -> None:
    """Every number of the format, every tie between two of them, and the floats next to these."""
    wide = all_of(dtype).float()
    wide = wide[wide.isfinite()].double().unique()
    # Beyond the largest number is the tie with what would follow it, which rounds to infinity.
    beyond = 2 * wide[-1] - wide[-2]
    wide = torch.cat((wide, torch.stack((beyond, -beyond)))).unique()
    exact = torch.cat((wide, (wide[1:] + wide[:-1]) / 2)).float()
    up, down = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf))
    floats = torch.cat((exact, up, down, -exact))
    assert torch.equal(bits(converted(conversions, floats, dtype)), bits(floats.to(dtype)))


@each_format
def test_floats_of_all_sizes_narrow_as_in_pytorch(
    conversions: ctypes.CDLL, dtype: torch.dtype
) -> None:
    """Subnormal floats, those beyond all numbers of the format, infinities and NaNs too."""
    step = 4099  # prime, so that the low bits vary too
    floats = torch.arange(-(1 << 31), 1 << 31, step).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
    full_nans = torch.tensor([(1 << 31) - 1, -1], dtype=torch.int32).view(torch.float32)
    floats = torch.cat((floats, special, full_nans))
    assert torch.equal(bits(converted(conversions, floats, dtype)), bits(floats.to(dtype)))
