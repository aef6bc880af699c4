"""The stand-in for the engine's sampling kernels, with which the other tests of V2 run."""

from __future__ import annotations

import gumbel_on_cpu
import v2_on_cpu
from engine_host.jobs import run_job


def test_tokens_are_those_of_the_engines_kernels() -> None:
    cases = [
        (shape, by_sampler, is_drafting)
        for shape in ((40, 10), (40, 512), (20, 1500))
        for by_sampler in (False, True)
        for is_drafting in (False, True)
    ]
    answers, _ = run_job(
        "vllm", gumbel_on_cpu.sample_in_both_ways, (cases,), v2_on_cpu.ENVIRONMENT, timeout=400
    )
    for (shape, *_), (by_kernels, in_numpy) in zip(cases, answers, strict=True):
        assert by_kernels.shape == (shape[0],)
        assert len({*by_kernels.tolist()}) > shape[0] // 5
        assert in_numpy.tolist() == by_kernels.tolist()
