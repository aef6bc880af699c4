"""The order of frequency in the files of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import add_byte_tokenizer

from drafttree.frequent_tokens import frequent_tokens

VOCAB = {"<s>": 9, "a": 4, "none": 6, "b": 0, "ab": 8, "abc": 1, "bc": 3, "ca": 2, "<0x0A>": 7}
MERGES = [["a", "b"], ["ab", "c"], ["a", "bc"], ["c", "a"], ["b", "c"]]
"""Two pairs are joined to one token, and none to `none`."""


def save(folder: Path, model: dict[str, Any], special: tuple[int, ...] = (9,)) -> Path:
    tokens = [{"id": token, "content": f"<{token}>"} for token in special]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": tokens}))
    return folder


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", [{"type": "BPE"}, {"type": None}, {}])
def test_merged_tokens_come_in_the_order_of_their_merges(
    tmp_path: Path, kind: dict[str, Any], as_text: bool
) -> None:
    merges = [" ".join(pair) if as_text else pair for pair in MERGES]
    save(tmp_path, {**kind, "vocab": VOCAB, "merges": merges})
    in_order = [9, 4, 0, 7, 8, 1, 2, 3, 6]
    for count in range(12):
        assert frequent_tokens(tmp_path, count, 10) == sorted(in_order[:count])


def test_unigrams_come_by_their_scores(tmp_path: Path) -> None:
    scores = [["<s>", 0.0], ["a", -5.0], ["b", -2.0], ["c", -9.0], ["d", -3.0]]
    save(tmp_path, {"type": "Unigram", "vocab": scores}, (3,))
    assert frequent_tokens(tmp_path, 4, 5) == [0, 2, 3, 4]


def test_tokens_without_logits_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, {"type": "BPE", "vocab": VOCAB, "merges": MERGES}, (9, 12))
    assert frequent_tokens(tmp_path, 20, 8) == [0, 1, 2, 3, 4, 6, 7]
    assert frequent_tokens(tmp_path, 3, 8) == [0, 4, 7]


def test_real_files_are_read(tmp_path: Path) -> None:
    pairs = [("a", "b"), ("ab", "c"), ("x", "y")]
    add_byte_tokenizer(tmp_path, 512, merges=pairs)
    bytes_and_joined = [*range(258), *range(509, 512)]
    assert frequent_tokens(tmp_path, 261, 512) == bytes_and_joined
    assert frequent_tokens(tmp_path, 260, 512) == bytes_and_joined[:-1]
    assert frequent_tokens(tmp_path, 262, 512) == sorted([*bytes_and_joined, 258])


@pytest.mark.parametrize("kind", ["WordPiece", None])
def test_other_tokenizers_have_no_order(tmp_path: Path, kind: str | None) -> None:
    assert frequent_tokens(tmp_path, 4, 10) is None
    save(tmp_path, {"type": kind, "vocab": VOCAB})
    assert frequent_tokens(tmp_path, 4, 10) is None


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"model": {"type": "Unigram", "vocab": 3}}'],
)
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        frequent_tokens(tmp_path, 4, 10)
