"""More steps than a drafter was trained for are refused or warned about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lyanna_parts import drafter_for, serve

from lyanna_plugin import METHOD
from lyanna_plugin.checkpoint import save
from lyanna_plugin.config import LyannaOptions


def test_a_drafter_of_one_step_drafts_no_further(target: Path, tmp_path: Path) -> None:
    save(drafter_for(target, steps=1), tmp_path)
    with pytest.raises(ValueError, match=r"^steps=3, but .* with one step: choose steps=1"):
        serve(target, tmp_path)
    assert serve(target, tmp_path, steps=1).steps == 1


def test_steps_that_were_not_trained_are_drafted_with_a_warning(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(drafter_for(target, steps=2), tmp_path)
    serve(target, tmp_path, steps=2)
    assert not caplog.records
    assert serve(target, tmp_path).steps == 3
    assert "steps=3" in caplog.text
    assert "choose steps=2, or train a drafter with --steps 3" in caplog.text


@pytest.mark.parametrize("folder", METHOD.models.values(), ids=METHOD.models)
def test_included_drafters_were_trained_for_the_default_steps(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())["lyanna"]
    assert config["steps"] == LyannaOptions(model=str(folder)).steps
