"""vLLM in the user's process: what an engine that was shut down keeps while it is referenced."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_shutdown import left_after_shutdown

from recycle_plugin.storage.table_files import TableSpec, load_tables


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.full)])
def test_nothing_of_a_draft_model_is_kept(runner: str, tiny_llama: Path) -> None:
    method = {"method": "rsd", "model": str(tiny_llama), "tree": "beam:2x2"}
    assert left_after_shutdown(tiny_llama, method, runner) == []


@pytest.mark.full
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_nothing_of_a_layer_is_kept(runner: str, tiny_llama: Path, memorised: Path) -> None:
    method = {"method": "lyanna", "model": str(memorised), "nodes": 6}
    assert left_after_shutdown(tiny_llama, method, runner) == []


@pytest.mark.full
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_nothing_of_the_tables_is_kept(runner: str, tiny_llama: Path) -> None:
    assert left_after_shutdown(tiny_llama, {"method": "token_recycling"}, runner) == []


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.full)])
def test_the_last_answer_is_saved(runner: str, tiny_llama: Path, tmp_path: Path) -> None:
    """No step follows it, in which its request would be released."""
    file = tmp_path / "tables"
    method = {"method": "token_recycling", "hot_start": str(file)}
    assert left_after_shutdown(tiny_llama, method, runner) == []
    remembered = load_tables(file, {"memory": TableSpec((None,))}, {})["memory"]
    assert (remembered >= 0).sum() >= 8
