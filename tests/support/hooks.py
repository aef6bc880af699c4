"""What tests change in the processes of an engine, as the environment of the run asks for it."""

from __future__ import annotations

import os

import drawing_ahead
import faults
import lyanna_states
import no_waiting
import triton_on_cpu

ESTIMATE = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"

_installed = False


def install() -> None:
    """Change this process; once."""
    global _installed
    if _installed:
        return
    _installed = True
    engine = os.environ.get("TESTS_ENGINE_PROCESS", "")
    if file := os.environ.get(lyanna_states.VARIABLE):
        lyanna_states.keep_logits(file)
    if os.environ.get(triton_on_cpu.VARIABLE):
        triton_on_cpu.serve_so()
    if os.environ.get(no_waiting.VARIABLE):
        no_waiting.forbid_waiting()
    if os.environ.get(drawing_ahead.VARIABLE):
        drawing_ahead.draw_so(engine)
    if estimate := os.environ.get(ESTIMATE):
        # SGLang reads it while it is imported, and a fork has imported it before.
        from sglang.srt.managers import schedule_policy

        schedule_policy.CLIP_MAX_NEW_TOKENS = int(estimate)
    if fault := os.environ.get(faults.VARIABLE):
        faults.plant(fault, engine)
