"""How the profile of decode steps adds up what the profiler recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from profile_steps import Spent, busy, by_name, events_of, steps_of

from drafttree.bench.protocol import Generation


def test_time_is_counted_once_where_kernels_overlap() -> None:
    assert busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == 4.0
    assert busy([]) == 0.0


def test_what_takes_longest_comes_first() -> None:
    events = [("copy", (0.0, 1.0)), ("gemm", (1.0, 9.0)), ("copy", (9.0, 12.0))]
    assert list(by_name(events).items()) == [("gemm", Spent(1, 8.0)), ("copy", Spent(2, 4.0))]


def event(name: str, kind: Any) -> SimpleNamespace:
    times = SimpleNamespace(start=1.0, end=3.0)
    return SimpleNamespace(name=name, device_type=kind, time_range=times)


def test_kernels_and_calls_of_the_runtime_are_told_apart() -> None:
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    recorded = [event("gemm", cuda), event("cudaLaunchKernel", cpu), event("aten::add", cpu)]
    profiled = SimpleNamespace(events=lambda: recorded)
    assert events_of(profiled, on_gpu=True) == [("gemm", (1.0, 3.0))]
    assert events_of(profiled, on_gpu=False) == [("cudaLaunchKernel", (1.0, 3.0))]


def test_the_longest_answer_counts_the_steps() -> None:
    answers = [Generation(prompt_tokens=3), Generation(prompt_tokens=3)]
    answers[0].steps, answers[1].steps = 7, 9
    assert steps_of(answers) == 9
