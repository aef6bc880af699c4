"""The example of docs/adding_a_method.md, served by both engines."""

from __future__ import annotations

from pathlib import Path

from example_method import install_example
from hosts import Case, Host
from random_prompts import some_prompts

CASE = Case(some_prompts(6), {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True})


def test_tokens_equal_plain_decoding(host: Host, tiny_llama: Path, tmp_path: Path) -> None:
    (plain,), _ = host.run(tiny_llama, [CASE])
    (drafted,), _ = host.run(
        tiny_llama,
        [CASE],
        "prompt-lookup-tree",
        {"width": 3, "length": 4},
        environment=install_example(tmp_path),
    )
    assert drafted.tokens == plain.tokens
    assert drafted.counters["draft_tokens"] > drafted.counters["accepted_tokens"] > 0
    assert drafted.counters["steps"] < 6 * 48
