"""The option `tables` of the methods in whose trees Token Recycling's candidates may stand."""

from __future__ import annotations

from typing import Any

import pytest

from lyanna_plugin import METHOD as LYANNA
from rsd_plugin import METHOD as RSD


@pytest.mark.parametrize(("most", "declared"), [(None, 80), (40, 40), (5, None)])
@pytest.mark.parametrize(
    ("method", "planned_by", "largest"), [(LYANNA, "nodes", 12), (RSD, "tree", 23)]
)
def test_chosen_trees_have_room_for_those_of_tables_alone(
    method: Any, planned_by: str, largest: int, most: int | None, declared: int | None
) -> None:
    tables = True if most is None else {"max_nodes": most}
    given = method.parse({"model": "any", "tables": tables, planned_by: "auto"})
    assert given.num_draft_tokens == (declared or largest)
    assert given.of_tables is not None
    assert given.of_tables.num_draft_tokens == (most or 80)
