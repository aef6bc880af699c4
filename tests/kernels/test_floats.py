"""The conversion between floats and halves in C++, compared with PyTorch's, bit by bit."""

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

extern "C" void widen_all(const Float16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
extern "C" void narrow_all(const float* from, Float16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}
"""


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


def halves() -> Tensor:
    """All 65,536 halves."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)


def bits(numbers: Tensor) -> Tensor:
    """The bits of numbers, with one pattern for all NaNs."""
    numbers = torch.where(numbers.isnan(), torch.nan, numbers)
    return numbers.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])


def narrowed(library: ctypes.CDLL, floats: Tensor) -> Tensor:
    to = torch.empty(len(floats), dtype=torch.float16)
    library.narrow_all(
        ctypes.c_void_p(floats.data_ptr()),
        ctypes.c_void_p(to.data_ptr()),
        ctypes.c_int64(len(floats)),
    )
    return to


def test_all_halves_widen_as_in_pytorch(conversions: ctypes.CDLL) -> None:
    numbers = halves()
    to = torch.empty(len(numbers))
    conversions.widen_all(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_void_p(to.data_ptr()),
        ctypes.c_int64(len(numbers)),
    )
    assert torch.equal(bits(to), bits(numbers.float()))


def test_halves_and_what_lies_between_them_narrow_as_in_pytorch(conversions: ctypes.CDLL) -> None:
    """Every half, every tie between two of them, and the floats next to these."""
    wide = halves().float()
    wide = wide[wide.isfinite()].double().unique()
    # Beyond the largest half is the tie with what would follow it, which rounds to infinity.
    wide = torch.cat((wide, torch.tensor([65536.0, -65536.0], dtype=torch.float64))).unique()
    exact = torch.cat((wide, (wide[1:] + wide[:-1]) / 2)).float()
    up, down = exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf))
    floats = torch.cat((exact, up, down, -exact))
    assert torch.equal(bits(narrowed(conversions, floats)), bits(floats.half()))


def test_floats_of_all_sizes_narrow_as_in_pytorch(conversions: ctypes.CDLL) -> None:
    """Subnormal floats, those beyond all halves, infinities and NaNs are among them."""
    step = 4099  # prime, so that the low bits vary too
    floats = torch.arange(-(1 << 31), 1 << 31, step).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
    floats = torch.cat((floats, special))
    assert torch.equal(bits(narrowed(conversions, floats)), bits(floats.half()))
