"""The target's logits after the rows of a step, some rows at a time.

A step may have thousands of rows, whose logits would take gigabytes. What needs only a few numbers
of each row reads them in chunks; sampling reads only the rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput

MAX_BYTES = 1 << 28
"""Most bytes of logits that exist at a time, where a step has more rows than requests."""


def max_rows(row_bytes: int, copies: int = 1) -> int:
    """Greatest number of rows of logits to compute or copy at a time.

    Args:
        row_bytes: Bytes of a row.
        copies: How many such sets of rows exist at a time.
    """
    return max(1, MAX_BYTES // (copies * row_bytes))


class GrammarMasks(NamedTuple):
    """The rows that a grammar restricts.

    Attributes:
        masks: A bit for each token that is allowed, `int32 [G, ceil(V / 32)]`.
        mask_of_row: By the row of logits, the row of `masks`.
    """

    masks: np.ndarray[Any, Any]
    mask_of_row: Mapping[int, int]

    @classmethod
    def of(
        cls,
        grammar: GrammarOutput,
        scheduled: Mapping[str, Sequence[int]],
        first_rows: Mapping[str, int],
    ) -> GrammarMasks:
        """Find the rows of the masks that the scheduler has sent.

        Args:
            grammar: The masks of each request's root and draft tokens.
            scheduled: Scheduled draft tokens by request.
            first_rows: By request of the batch, the row of its root.
        """
        mask_of_row, place = {}, 0
        for name in grammar.structured_output_request_ids:
            size = 1 + len(scheduled.get(name, ()))
            if name in first_rows:
                for node in range(size):
                    mask_of_row[first_rows[name] + node] = place + node
            place += size
        return cls(grammar.grammar_bitmask, mask_of_row)

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Mask the logits of some rows, `[n, V]`, in place, with the engine's own function."""
        from vllm.v1.core.sched.output import GrammarOutput
        from vllm.v1.structured_output.utils import apply_grammar_bitmask

        masked = [row for row in rows if row in self.mask_of_row]
        if masked:
            # Each row stands for a request without draft tokens.
            masks = self.masks[[self.mask_of_row[row] for row in masked]]
            apply_grammar_bitmask(
                SimpleNamespace(scheduled_spec_decode_tokens={}),
                GrammarOutput([*map(str, masked)], masks),
                SimpleNamespace(req_ids=[*map(str, rows)]),
                logits,
            )


class StepLogits:
    """The logits of a step's R rows.

    Args:
        first: Those of the first rows, `[n, V]`, or of all rows.
        compute: Returns those of any rows, `int64 [m]`, as `[m, V]`; needed if n is less than R.
        count: R.
        masks: The masks of the rows that a grammar restricts, which are not applied yet.

    Attributes:
        first: The logits of the first rows.
    """

    def __init__(
        self,
        first: torch.Tensor,
        compute: Callable[[torch.Tensor], torch.Tensor],
        count: int,
        masks: GrammarMasks | None = None,
    ) -> None:
        self.first = first
        self._compute = compute
        self._count = count
        self._masks = masks
        self._is_first_masked = False

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The logits of all rows without masks, in order: which rows, and `[n, V]`."""
        size = len(self.first)
        yield slice(0, size), self.first
        for start in range(size, self._count, size):
            stop = min(start + size, self._count)
            rows = torch.arange(start, stop, device=self.first.device)
            yield slice(start, stop), self._compute(rows)

    def mask(self, rows: slice, logits: torch.Tensor) -> bool:
        """Mask a chunk in place.

        Returns:
            Whether there are grammars in this step.
        """
        if self._masks is None:
            return False
        self._masks.apply(logits, range(rows.start, rows.stop))
        self._is_first_masked |= rows.start == 0
        return True

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The masked logits of some rows, `[m, V]`; `rows` ascend, `int64 [m]`."""
        if len(self.first) == self._count and not self._is_first_masked:
            self.mask(slice(0, self._count), self.first)
        if len(rows) == len(self.first) == self._count:
            return self.first
        if len(self.first) == self._count:
            return self.first[rows]
        logits = self._compute(rows)
        if self._masks is not None:
            # The host has the masks, so it must know the rows.
            self._masks.apply(logits, rows.tolist())
        return logits
