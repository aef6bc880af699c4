"""Overlapping scheduling in SGLang on a CPU, so that what it needs on a GPU is tested there."""

from __future__ import annotations

from typing import Any

VARIABLE = "TESTS_OVERLAP_ON_CPU"


def enable() -> None:
    """Leave overlapping scheduling on for methods without a draft model."""
    from drafttree.sglang.algorithm import TreeAlgorithm

    stock = TreeAlgorithm.handle_server_args

    def handle_server_args(self: TreeAlgorithm, server_args: Any) -> None:
        stock(self, server_args)
        server_args.disable_overlap_schedule = False

    TreeAlgorithm.handle_server_args = handle_server_args  # type: ignore[method-assign]
