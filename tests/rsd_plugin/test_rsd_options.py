"""The notation of RSD's trees, and the errors for wrong notation."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rsd_plugin.config import RsdOptions


def options(tree: str) -> RsdOptions:
    return RsdOptions(model="draft", tree=tree)


@pytest.mark.parametrize(
    ("tree", "widths", "factors"),
    [
        ("beam:3x5", (3, 3, 3, 3, 3), None),
        ("beam:1x1", (1,), None),
        ("auto", (3, 3, 3, 3, 3), None),
        ("branch:3-2-1", (3, 6, 6), (3, 2, 1)),
        ("branch:1-1", (1, 1), (1, 1)),
    ],
)
def test_tree_notations_are_parsed(
    tree: str, widths: tuple[int, ...], factors: tuple[int, ...] | None
) -> None:
    shape = options(tree).shape
    assert shape.widths == widths
    assert shape.factors == factors
    assert options(tree).num_draft_tokens == sum(widths)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ("beam:3", "beam:3x5"),
        ("beam:0x3", "out of range"),
        ("beam:3x0", "out of range"),
        ("beam:2x65", "out of range"),
        ("beam:64x4", "out of range"),
        ("branch:3-x", "branching factors"),
        ("branch:0-1", "1 or more"),
        ("branch:9-9-9", "more than"),
        ("tree.json", "is not known"),
    ],
)
def test_wrong_notation_is_refused(tree: str, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        options(tree)


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"tree": "beam:3x5"}, 5),
        ({"tree": "branch:2-1"}, 2),
        ({"tree": "beam:3x5", "tables": True}, 5),
        ({"tree": "auto"}, None),
    ],
)
def test_forwards_of_the_draft_model(options: dict[str, Any], forwards: int | None) -> None:
    """Draft tokens of tables need none, however deep they are."""
    assert RsdOptions.model_validate({"model": "any", **options}).draft_forwards == forwards
