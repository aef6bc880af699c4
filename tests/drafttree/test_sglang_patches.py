"""Only `patches` replaces parts of SGLang, as the sources of the package show."""

from __future__ import annotations

from pathlib import Path

from assignments import assignments, assignments_in

import drafttree.sglang
from drafttree.sglang.patches import PATCHES

FOLDER = Path(drafttree.sglang.__file__).parent

OF_ONE_CALL = {"batch", "result", "server_args", "info", "output"}
"""Names of SGLang's objects that a call fills in, and that do not outlive the call."""

SETTERS = ("setattr", "register_attention_backend")


def test_a_replacement_is_found() -> None:
    source = """
self.own = batch.input_ids = 1
Scheduler.run = 2
self._runner.sampler = 3
setattr(penalizer, name, value)
"""
    assert sorted(assignments(source, SETTERS, OF_ONE_CALL)) == [
        "Scheduler.run",
        "self._runner.sampler",
        "setattr(penalizer, name, value)",
    ]


def test_only_patches_replaces_anything() -> None:
    # drafttree's own worker, while its steps are recorded
    assert assignments_in(FOLDER, SETTERS, OF_ONE_CALL) == {"tracing.py: worker.__class__"}


def test_each_patch_is_applied_in_patches() -> None:
    sources = [file.read_text() for file in (FOLDER / "patches").glob("*.py")]
    applied = {
        each.rpartition(".")[2] for source in sources for each in assignments(source, SETTERS)
    }
    for patch in PATCHES:
        name = patch.target.replace(":", ".").rpartition(".")[2]
        assert name in applied or name == "ATTENTION_BACKENDS"
        assert patch.when
        assert patch.reason
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
