"""`forbid_device_sync` finds all functions that it wraps; on a GPU, test_vllm_cuda.py uses it."""

from __future__ import annotations

import forbid_device_sync
from engine_host.jobs import run_job
from vllm_runs import ENVIRONMENT


def test_all_functions_are_wrapped() -> None:
    run_job("vllm", forbid_device_sync.enable, (), ENVIRONMENT, 120)
