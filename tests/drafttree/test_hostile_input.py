"""Whatever stands in options and in files, the error is a ValueError that says what is wrong."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_settings import CASES
from typer.testing import CliRunner

from drafttree.cli import app
from drafttree.method import Method
from drafttree.model_files import (
    ModelSource,
    check_draft_model,
    first_rows_fingerprint,
    tokenizer_fingerprint,
    vocabulary_size,
    weights_fingerprint,
)
from drafttree.sglang.options import given_options
from drafttree.tree import StaticTree
from lyanna_plugin import METHOD as LYANNA
from lyanna_plugin.training.dataset import read_conversations
from recycle_plugin import METHOD as RECYCLING
from rsd_plugin import METHOD as RSD

LONG = "9" * 5000
"""More digits than Python converts to a number."""

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["auto", "branch:", f"branch:{LONG}", "beam:0x0", f"beam:{LONG}x1", "\0"])
    | st.sampled_from([10**30, -1, 0, 255, 256, "../../etc/passwd", "a" * 5000, "dynamic"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("method", [RECYCLING, RSD, LYANNA], ids=lambda method: method.name)
@CASES
@given(data=st.data())
def test_options_are_refused_by_name_or_valid(method: Method[Any], data: st.DataObject) -> None:
    names = [*method.options.model_fields, "drafting", "unknown"]
    given = data.draw(st.dictionaries(st.sampled_from(names), anything, min_size=1, max_size=3))
    if method is not RECYCLING:
        given = {"model": "a model", **given}
    try:
        options = method.parse(given)
    except ValueError as error:
        refused = str(error)
    else:
        assert 1 <= options.depth <= options.num_draft_tokens <= 255
        return
    assert any(name in refused for name in given), refused


NESTED = "[" * 100_000
CONTENTS = [b"", b"\xff\xfe", b"{", b"3", b"[]", b"{}", b"null", NESTED.encode(), LONG.encode()]
paths = st.dictionaries(st.sampled_from(["paths", "other"]), anything)


@CASES
@given(content=st.sampled_from(CONTENTS) | st.binary(max_size=30) | paths.map(json.dumps))
def test_tree_files_are_refused_by_name_or_valid(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | str
) -> None:
    file = tmp_path_factory.mktemp("tree") / "tree.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        assert StaticTree.from_file(file).paths
    except ValueError as error:
        refused = str(error)
    else:
        return
    assert str(file) in refused
    with pytest.raises(ValueError, match="tree"):
        RECYCLING.parse({"tree": str(file)})


@pytest.mark.parametrize("content", CONTENTS[:-2], ids=repr)
def test_damaged_model_folders_are_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"the model {tmp_path} cannot be read"):
        vocabulary_size(ModelSource(str(tmp_path)))
    with pytest.raises(ValueError, match="cannot be read"):
        first_rows_fingerprint(tmp_path)
    # These do not read what is inside.
    assert weights_fingerprint(tmp_path)
    assert tokenizer_fingerprint(tmp_path)


@pytest.mark.parametrize("content", [*CONTENTS[:5], b"null", NESTED.encode()], ids=lambda c: c[:9])
def test_damaged_tokenizers_are_refused(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafttree.model_files.vocabulary_size", lambda *model: 8)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        check_draft_model(*[ModelSource(str(tmp_path))] * 2, logging.getLogger("test"))


def command(*arguments: object) -> tuple[int, str]:
    """The exit status and the output, as one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, " ".join(result.output.split())


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """As of a terminal in another encoding."""
    code, output = command(
        *("trace", "--method", "token-recycling", "--model", tmp_path, "--prompt", "caf\udce9")
    )
    assert code == 2
    assert r"the prompt has a lone surrogate, '\udce9'" in output


@pytest.mark.parametrize("option", [f"nodes={LONG}", f"tree={LONG}", f"tree={NESTED}"], ids=len)
def test_options_that_are_too_long_are_refused_by_name(tmp_path: Path, option: str) -> None:
    code, output = command(
        *("bench", "--method", "token-recycling", "--model", tmp_path, "--option", option),
        *("--output", tmp_path / "out.json"),
    )
    assert code == 2
    assert output.startswith("error: Token Recycling option")
    assert option[:4] in output


HOSTILE = [NESTED, LONG, f'[{{"conversations": {LONG}}}]']


@pytest.mark.parametrize("content", HOSTILE, ids=len)
def test_hostile_files_are_refused_by_name(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    lines = file.with_suffix(".jsonl")
    lines.write_text(content)
    model = ("--model", tmp_path, "--method", "none")
    for arguments in (
        ("bench", *model, "--prompts", lines, "--output", tmp_path / "out.json"),
        ("tree", file),
    ):
        code, output = command(*arguments)
        assert code == 2, arguments
        # A name that is longer than a line is broken.
        assert f"{lines if lines in arguments else file}" in output.replace(" ", "")
    for data in (file, lines):
        with pytest.raises(ValueError, match=rf"^{data} is not JSON: "):
            list(read_conversations(data))
    monkeypatch.setenv("DRAFTTREE_OPTIONS", str(file))
    with pytest.raises(ValueError, match=rf"^DRAFTTREE_OPTIONS='{file}' is not valid JSON"):
        given_options()


@pytest.mark.parametrize("content", HOSTILE, ids=len)
def test_a_hostile_report_does_not_prevent_the_page(tmp_path: Path, content: str) -> None:
    (tmp_path / "file.json").write_text(content)
    report = Path(__file__).parents[2] / "results" / "vllm-cpu" / "float32-auto-batch-1.json"
    shutil.copy(report, tmp_path)
    code, output = command("report", tmp_path, "--output", tmp_path / "page.html")
    assert code == 0
    assert "skipped file.json: cannot be read as JSON: " in output
    assert "1 runs, written to" in output


class Payload:
    """Pickled, this makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self._folder,)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for name in ("pytorch_model.bin", "model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Payload(made)))
    for read in (first_rows_fingerprint, weights_fingerprint, tokenizer_fingerprint):
        with suppress(ValueError):
            read(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        vocabulary_size(ModelSource(str(tmp_path)))
    assert not made.exists()
