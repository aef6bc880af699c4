"""Comparison of what was decoded on the fake GPU with what the CPU gives, and with budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fake_gpu.record import Record


def assert_same(expected: Any, found: Any, asked: Mapping[str, Any]) -> None:
    """Both decoded the same from the same trees, in which drafts were accepted and KV rows moved.

    Args:
        expected: What a host decoded on the CPU.
        found: What it decoded on the fake GPU.
        asked: The requests.
    """
    assert found.texts == expected.texts
    assert found.trees == expected.trees
    assert found.counts == expected.counts
    assert found.acceptance == expected.acceptance
    assert {name: len(text) for name, text in found.texts.items()} == {
        name: each.length for name, each in asked.items()
    }
    assert found.counts["accepted_tokens"] > 0
    assert found.counts["kv_rows_moved"] > 0


def assert_within_budget(step: Record, budget: tuple[int, int, int, int]) -> None:
    """A step took no more than its budget.

    Args:
        step: What the step did.
        budget: Most kernels, operations of PyTorch, copies in and copies out.
    """
    used = step.totals()
    spent = tuple(used[each] for each in ("kernels", "operations", "copies in", "copies out"))
    within = all(n <= most for n, most in zip(spent, budget, strict=True))
    assert within, step.report()
