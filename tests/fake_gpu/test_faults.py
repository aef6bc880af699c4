"""The fake GPU finds what would be wrong or slow on a real one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from fake_gpu.copies import ChangedInFlightError
from fake_gpu.session import fake_gpu
from fake_gpu.tensors import DeviceMismatchError, Gpu, HostWaitError
from tree_kernels.mask import depths, tree_mask

from drafttree.transfer import AsyncHostCopy, all_on_device, on_device

CUDA = torch.device("cuda")
COUNTS = np.array([1, 2, 3], np.int32)


def counts() -> torch.Tensor:
    return on_device(COUNTS, CUDA)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a value read on the host": lambda it: int(it.max()),
    "a branch by a value": lambda it: bool((it > 0).any()),
    "values read on the host": lambda it: it.tolist(),
    "a copy to the host": lambda it: it.cpu(),
    "an index by a mask": lambda it: it[it > 1],
    "values written through a mask": lambda it: it.index_put_((it > 1,), it[:2]),
    "nonzero": lambda it: it.nonzero(),
    "repeat_interleave without its total": lambda it: it.repeat_interleave(it),
    "a tensor made of a list": lambda it: torch.tensor([1, 2], device=it.device),
    "a copy from memory that is not pinned": lambda it: torch.from_numpy(COUNTS).to(
        it.device, non_blocking=True
    ),
    "a blocking copy from pinned memory": lambda it: torch.ones(3).pin_memory().to(it.device),
    "one element set to a number": lambda it: it.__setitem__(1, -1),
    "an index by a list": lambda it: it[[0, 1]],
    "an index by a host tensor": lambda it: it[torch.zeros(1, dtype=torch.int64)],
    "a choice with a scalar tensor of the host's": lambda it: torch.where(
        it > 1, it, torch.tensor(0, dtype=torch.int32)
    ),
    "an event": lambda it: AsyncHostCopy.of(it).wait(),
}

MISMATCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "a sum": lambda it: it + torch.ones(3),
    "host values in a list": lambda it: torch.cat([it, torch.ones(1, dtype=torch.int32)]),
    "a host tensor indexed from the GPU": lambda it: torch.arange(9)[it.long()],
    "host values written to the GPU": lambda it: it.index_put_((it.long() - 1,), torch.ones(3)),
    "a host tensor given to a kernel": lambda it: tree_mask(
        it.view(1, 3), torch.ones(1, dtype=torch.int32)
    ),
}

FREE: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic with numbers": lambda it: torch.where(it > 1, it * 2 + 1, 0).clamp(max=4),
    "one number written through a mask": lambda it: it.masked_fill_(it > 1, 0),
    "one number set through a mask": lambda it: it.__setitem__(it > 1, 0),
    "repeat_interleave with its total": lambda it: it.repeat_interleave(it, output_size=6),
    "several arrays in one copy": lambda it: all_on_device([COUNTS, COUNTS.astype(bool)], CUDA),
    "a copy to the host that nobody reads": AsyncHostCopy.of,
    "a row filled with a number": lambda it: it.view(1, 3).__setitem__(0, -1),
    "a kernel": lambda it: depths(it.view(1, 3) - 2, it[2:]),
}


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_wait_is_refused_where_it_must_not_be(gpu: Gpu, what: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        it = counts()
        with pytest.raises(HostWaitError), gpu.no_waiting():
            WAITS[what](it)
        assert len(gpu.record.waits) == 1


def test_elsewhere_a_wait_is_recorded_with_its_line(gpu: Gpu) -> None:
    assert AsyncHostCopy.of(counts()).wait().tolist() == COUNTS.tolist()
    (wait,) = gpu.record.waits
    assert wait.what == "an event"
    assert wait.where.startswith("drafttree/transfer.py:")
    assert wait.where.endswith("self.arrived.synchronize()")


@pytest.mark.parametrize("what", MISMATCHES)
def test_operands_on_two_devices_are_refused(gpu: Gpu, what: str) -> None:
    it = counts()
    with pytest.raises(DeviceMismatchError):
        MISMATCHES[what](it)


@pytest.mark.parametrize("what", FREE)
def test_what_waits_for_nothing_is_let_through(gpu: Gpu, what: str) -> None:
    it = counts()
    with gpu.no_waiting():
        FREE[what](it)


def test_values_that_have_not_arrived_are_garbage(gpu: Gpu) -> None:
    first = AsyncHostCopy.of(counts())
    second = AsyncHostCopy.of(counts().float())
    assert not set(first.values.tolist()) & set(COUNTS.tolist())
    assert first.wait().tolist() == COUNTS.tolist()
    assert second.values.isnan().all(), "the first event came before the second copy"
    assert second.wait().tolist() == COUNTS.tolist()


def test_a_copy_has_the_values_of_the_stream_when_it_was_started(gpu: Gpu) -> None:
    it = counts()
    copy = AsyncHostCopy.of(it)
    it += 1
    assert copy.wait().tolist() == COUNTS.tolist()


def test_pinned_memory_must_not_change_while_it_is_read(gpu: Gpu) -> None:
    pinned = torch.ones(3).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    pinned[0] = 2
    with pytest.raises(ChangedInFlightError):
        there.tolist()


def test_values_of_the_gpu_are_no_array_of_the_host(gpu: Gpu) -> None:
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(counts())


def test_launches_and_copies_are_counted_by_line(gpu: Gpu) -> None:
    with gpu.recording() as record:
        parents, sizes = all_on_device([np.array([[-1, 0]], np.int32), COUNTS[1:2]], CUDA)
        AsyncHostCopy.of(depths(parents, sizes) + 1)
    assert record.totals() == {
        "kernels": 1,
        "operations": 1,
        "copies in": 1,
        "copies out": 1,
        "waits": 0,
    }
    assert any("kernels/tree_kernels/mask.py" in line for line in record.lines)
    assert all(line.startswith("drafttree/transfer.py") for line in record.copies_in)


def test_afterwards_the_process_is_as_before() -> None:
    from tree_kernels import mask
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    before = torch.Event, torch.cuda._lazy_init, InterpretedFunction.run
    with fake_gpu():
        assert torch.zeros(1, device="cuda").is_cuda
    assert (torch.Event, torch.cuda._lazy_init, InterpretedFunction.run) == before
    assert any(isinstance(each, JITFunction) for each in vars(mask).values())
    assert not torch.tensor([1]).is_cuda
