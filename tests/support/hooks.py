"""Changes that tests make in an engine's processes, selected by environment variables."""

from __future__ import annotations

import os

import adapters_on_cpu
import compiled_at_start
import device_operations
import draft_rows
import drafter_calls
import draw_ahead_on_cpu
import faults
import flash_stand_in
import forbid_device_sync
import forbid_waiting
import hot_drafts
import int8_on_cpu
import lyanna_states
import newer_transformers
import overlap_on_cpu
import qwen_images
import recurrent_on_cpu
import scripted_shapes
import shown_tokens
import small_chunks
import soak_held
import steady_steps
import straying_ranks
import torchvision_stubs
import triton_on_cpu
import v2_on_cpu

ESTIMATE = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"

_installed = False


def install() -> None:
    """Make the selected changes in this process, once."""
    global _installed
    if _installed:
        return
    _installed = True
    engine = os.environ.get("TESTS_ENGINE_PROCESS", "")
    if os.environ.get(torchvision_stubs.VARIABLE):
        torchvision_stubs.enable()
    if os.environ.get(newer_transformers.VARIABLE):
        newer_transformers.enable()
    if os.environ.get(v2_on_cpu.VARIABLE):
        v2_on_cpu.enable()
    if file := os.environ.get(lyanna_states.VARIABLE):
        lyanna_states.record_logits(file)
    if file := os.environ.get(drafter_calls.VARIABLE):
        drafter_calls.record(file)
    if os.environ.get(draft_rows.VARIABLE):
        draft_rows.enable()
    if os.environ.get(hot_drafts.VARIABLE):
        hot_drafts.enable()
    if os.environ.get(scripted_shapes.VARIABLE):
        scripted_shapes.enable()
    if os.environ.get(straying_ranks.VARIABLE):
        straying_ranks.enable()
    if os.environ.get(shown_tokens.VARIABLE):
        shown_tokens.enable()
    if os.environ.get(qwen_images.VARIABLE):
        qwen_images.enable(engine)
    if os.environ.get(triton_on_cpu.VARIABLE):
        triton_on_cpu.enable()
    if os.environ.get(compiled_at_start.VARIABLE):
        compiled_at_start.enable()
    if os.environ.get(flash_stand_in.VARIABLE):
        flash_stand_in.enable()
    if os.environ.get(adapters_on_cpu.VARIABLE):
        adapters_on_cpu.enable()
    if os.environ.get(int8_on_cpu.VARIABLE):
        int8_on_cpu.enable()
    if os.environ.get(recurrent_on_cpu.VARIABLE):
        recurrent_on_cpu.enable()
    if os.environ.get(steady_steps.VARIABLE):
        steady_steps.enable()
    if os.environ.get(device_operations.VARIABLE):
        device_operations.enable()
    if os.environ.get(forbid_waiting.VARIABLE):
        forbid_waiting.enable()
    if os.environ.get(small_chunks.VARIABLE):
        small_chunks.enable()
    if os.environ.get(forbid_device_sync.VARIABLE):
        forbid_device_sync.enable()
    if os.environ.get(draw_ahead_on_cpu.VARIABLE):
        draw_ahead_on_cpu.enable(engine)
    if os.environ.get(overlap_on_cpu.VARIABLE):
        overlap_on_cpu.enable()
    if estimate := os.environ.get(ESTIMATE):
        # SGLang reads the variable when it is imported, which was before the fork.
        from sglang.srt.managers import schedule_policy

        schedule_policy.CLIP_MAX_NEW_TOKENS = int(estimate)
    if os.environ.get(soak_held.VARIABLE):
        soak_held.enable()
    if fault := os.environ.get(faults.VARIABLE):
        faults.plant(fault, engine)
