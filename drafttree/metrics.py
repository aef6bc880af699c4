"""Counts of what was drafted, verified and accepted."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Sums over decode steps of single requests; prefill steps are not counted.

    Attributes:
        steps: decode steps, undrafted ones included.
        emitted: tokens emitted by these steps, the bonus token included; the engine drops those
            after the end of a text.
        drafted_steps: steps that verified at least one draft node.
        draft_tokens: draft nodes verified.
        accepted_tokens: draft nodes accepted.
        non_first_child_accepted: accepted nodes that are not their parent's first child, which
            only a tree can have.
        kv_rows_moved: KV rows moved to their place after verification, counted once, not by layer.
    """

    steps: int = 0
    emitted: int = 0
    drafted_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    non_first_child_accepted: int = 0
    kv_rows_moved: int = 0

    def add(self, **counts: int) -> None:
        """Add to the counts named."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)
