"""Where an engine's flash attention is used, by the table."""

from __future__ import annotations

import pytest

from drafttree.attention_routes import NEVER, Routes, all_routes, parse, routes_of

TABLE = Routes("sm_90", 128, "a test", (1, 8), (8, 64), ((NEVER, 2048), (1024, 0)))


@pytest.mark.parametrize(
    ("requests", "rows", "context", "takes"),
    [
        (1, 8, 10**6, False),
        (1, 63, 10**6, False),
        (1, 64, 2047, False),
        (1, 64, 2048, True),
        (7, 200, 2048, True),
        (8, 8, 1023, False),
        (8, 63, 1024, True),
        (500, 64, 0, True),
        (8, 7, 10**6, False),
        (8, 1, 10**6, False),
    ],
)
def test_the_entry_below_counts(requests: int, rows: int, context: int, takes: bool) -> None:
    assert TABLE.takes_flash(requests, rows, context) == takes


def test_head_sizes_between_tables() -> None:
    for size, expected in ((16, 64), (64, 64), (80, 128), (128, 128)):
        found = routes_of("sm_80", size)
        assert found is not None
        assert (found.architecture, found.head_size) == ("sm_80", expected)
    assert routes_of("sm_80", 256) is None
    assert routes_of("sm_120", 64) is None


def test_plain_decoding_takes_the_kernel_alone() -> None:
    assert not any(each.takes_flash(256, 1, 10**6) for each in all_routes())
    assert any(each.takes_flash(1, 81, 4096) for each in all_routes())


@pytest.mark.parametrize(
    "wrong",
    [
        "requests = [8, 1]\nrows = [8]\ncontexts = [[1], [1]]",
        "requests = [1, 8]\nrows = [8]\ncontexts = [[1]]",
        "requests = [1]\nrows = [8, 9]\ncontexts = [[1]]",
    ],
)
def test_tables_whose_shapes_do_not_fit(wrong: str) -> None:
    head = '[[routes]]\narchitecture = "sm_90"\nhead_size = 64\nsource = "a test"\n'
    with pytest.raises(ValueError, match="sm_90 with heads of 64"):
        parse(head + wrong)
