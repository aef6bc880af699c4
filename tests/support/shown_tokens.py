"""Lets an engine fail if its drafter is shown a token that the vocabulary does not have."""

from __future__ import annotations

from typing import Any

VARIABLE = "TESTS_SHOWN_TOKENS"

ENVIRONMENT = {VARIABLE: "1"}


def enable() -> None:
    """Check the tokens that Token Recycling's dynamic trees learn from, -1 for none."""
    from recycle_plugin.dynamic import DynamicTreeDrafter

    stock = DynamicTreeDrafter.observe

    def observe(self: Any, slots: Any, tokens: Any, previous: Any, logits: Any) -> Any:
        for ids in (tokens, previous):
            if ids.min() < -1 or ids.max() >= logits.shape[1]:
                raise RuntimeError(f"tokens {ids.tolist()} of {logits.shape[1]}")
        return stock(self, slots, tokens, previous, logits)

    DynamicTreeDrafter.observe = observe  # type: ignore[method-assign]
