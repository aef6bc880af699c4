"""Every Triton kernel compiles for a Hopper GPU, fits into its shared memory, and is compiled once
for all batch sizes.
"""

from __future__ import annotations

import bench_kernels
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hopper import MOST_SHARED, compile_only

CASES = {name: case for name, case in bench_kernels.KERNELS.items() if "cuda" in case.devices}


@pytest.mark.parametrize("first", [False, True], ids=["quick", "first"])
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_and_fits(name: str, first: bool) -> None:
    case = CASES[name]
    work = case.make(**(case.sizes[0] if first else case.quick))
    with compile_only() as compiled, torch.inference_mode():
        work.ours()
    assert compiled.kernels
    for kernel in compiled.kernels:
        assert kernel.metadata.shared <= MOST_SHARED
        assert kernel.asm["cubin"]


@pytest.mark.parametrize("name", CASES)
def test_one_compilation_serves_all_batch_sizes(name: str) -> None:
    """A compilation while serving would block all requests for a second or more."""
    case = CASES[name]
    batch = "requests" if "requests" in case.quick else "rows"
    works = [case.make(**{**case.quick, batch: size}) for size in (1, 2, 3, 7, 16, 33)]
    with compile_only() as compiled, torch.inference_mode():
        for work in works:
            work.ours()
    assert compiled.programs() == len(set(compiled.names))
