"""A method's options in SGLang: an environment variable, a file, a function."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from drafttree.sglang.options import VARIABLE, given_options, parse_options, set_options
from recycle_plugin import METHOD


@pytest.fixture(autouse=True)
def no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_without_options_the_defaults_apply() -> None:
    assert given_options() == {}
    assert parse_options(METHOD, None).num_draft_tokens == 80


def test_json_and_a_file_are_equivalent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"nodes": 15, "hot-start": False}
    monkeypatch.setenv(VARIABLE, json.dumps(options))
    from_json = parse_options(METHOD, None)
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    monkeypatch.setenv(VARIABLE, str(file))
    assert parse_options(METHOD, None) == from_json
    assert from_json.num_draft_tokens == 15


def test_the_function_sets_what_engines_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "{}")
    set_options(nodes=7, hot_start=False)
    assert json.loads(os.environ[VARIABLE]) == {"nodes": 7, "hot_start": False}
    assert parse_options(METHOD, None).num_draft_tokens == 7
    set_options()
    assert given_options() == {}


def test_the_hosts_size_counts_the_root() -> None:
    assert parse_options(METHOD, 16).num_draft_tokens == 15
    set_options(tree="branch:3-2")
    assert parse_options(METHOD, 10).num_draft_tokens == 9


@pytest.mark.parametrize(
    ("options", "tokens", "said"),
    [
        ('{"nodes": 15}', 81, "--speculative-num-draft-tokens=81"),
        ("{}", 1, "--speculative-num-draft-tokens=1"),
        ("{}", 1000, "999"),
        ('{"tree": "branch:x"}', None, "branch:x"),
        ('{"size": 3}', None, "has no option 'size'"),
        ("absent.json", None, "neither a JSON object nor a file"),
        ("{nodes: 3}", None, "is not valid JSON"),
    ],
)
def test_wrong_options_are_named(
    options: str, tokens: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, options)
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_options(METHOD, tokens)


def test_a_file_must_contain_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.json"
    file.write_text("[1]")
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ValueError, match="is not a JSON object"):
        given_options()
