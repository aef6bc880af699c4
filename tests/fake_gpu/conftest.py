"""The fake GPU as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gpu.session import fake_gpu
from fake_gpu.tensors import Gpu
from tree_kernels.machine import find_compiler


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A fake GPU for the time of a test."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    with fake_gpu() as made:
        yield made
