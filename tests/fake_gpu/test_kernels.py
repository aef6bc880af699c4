"""On the fake GPU every kernel gives what its reference gives there, and the host never waits."""

from __future__ import annotations

from dataclasses import replace

import bench_kernels
import kernel_cases_target
import pytest
import torch
from fake_gpu.tensors import Gpu

ON_GPUS = [name for name, case in bench_kernels.KERNELS.items() if "cuda" in case.devices]


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_kernel_gives_what_its_reference_gives(
    name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch's own attention, which some cases are timed beside, is nothing to check here.
    monkeypatch.setattr(kernel_cases_target, "dense", lambda *shape: {})
    case = bench_kernels.KERNELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        work = case.make(**case.quick)
    with gpu.no_waiting(), gpu.recording() as record:
        ours = work.ours()
    assert record.kernels, "no kernel was launched"
    assert all(each.is_cuda for each in ours)
    bench_kernels.agree(name, replace(work, ours=lambda: ours), case.tolerance)
