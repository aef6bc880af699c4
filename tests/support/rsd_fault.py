"""A fault that can be planted into an engine's process, so that a test shows it would find it."""

from __future__ import annotations

from typing import Any


def leave_the_residual() -> None:
    """Where all children are rejected, draw from the whole of the target's distribution: what the
    children had of it is not subtracted."""
    import torch

    from rsd_plugin import drafter

    reject_step = drafter.reject_step

    def faulty(
        target: Any, draft: Any, target_rows: Any, draft_rows: Any, children: Any, coins: Any
    ) -> Any:
        accepted, tokens = reject_step(target, draft, target_rows, draft_rows, children, coins)
        childless = torch.full_like(draft_rows, -1)
        _, drawn = reject_step(target, draft, target_rows, childless, children, coins)
        return accepted, torch.where(accepted >= 0, tokens, drawn)

    drafter.reject_step = faulty  # type: ignore[attr-defined]
