"""A hidden-state drafter's layer in SGLang: its KV cache and its states.

The KV uses the target's slots, so cached prefixes are valid for both. With tensor parallelism each
rank has the whole layer.
"""

from __future__ import annotations

import torch

from drafttree.model_drafters import HiddenStateDrafter
from drafttree.sglang.layer_cache import LayerCache, LayerRows


class DraftLayer:
    """The layer, and its output after each request's last token.

    Args:
        drafter: The drafter.
        table: SGLang's KV slot of each position of each request, by the requests' slots,
            `int32 [S, P]`.
        kv_slots: Number of KV slots.
        width: Width d of the target's hidden states.
        dtype: Data type of the states, and of keys and values.
    """

    def __init__(
        self,
        drafter: HiddenStateDrafter,
        table: torch.Tensor,
        kv_slots: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._drafter, self._table = drafter, table
        _, heads, size = drafter.heads
        self._cache = LayerCache(kv_slots, heads, size, dtype, table.device)
        self._states = torch.zeros(len(table), width, dtype=dtype, device=table.device)

    def read(
        self,
        rows: LayerRows,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Read known tokens, and keep the output at each request's last one.

        The other ones do not attend: only their keys and values are needed.

        Args:
            rows: Whose tokens these are.
            slots: The requests' slots, `int64 [B]`.
            lengths: Number of tokens of each request up to the last of its rows, `int64 [B]`.
            hidden: The target's hidden states before the tokens, `[N, d]`.
            tokens: The tokens, `int [N]`.
        """
        x, table = self._drafter.fuse(hidden, tokens), self._slots(slots, lengths)
        self._states[slots] = self._run(x, rows, lengths, table, only_last=True)

    def read_paths(
        self,
        rows: LayerRows,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
    ) -> tuple[()]:
        """Read the tokens of accepted paths, and keep the output at each one's last token.

        A GPU would have to wait until the host knows how many were accepted, so all columns are
        read. The KV of those that were not is written again before it is read.

        Args:
            rows: As many for each request as there are columns.
            slots: The requests' slots, `int64 [B]`.
            lengths: Number of tokens of each request before the paths, `int64 [B]`.
            counts: Number of accepted tokens of each path, the bonus token included, `int [B]`.
            hidden: The target's hidden states before the tokens, `[B, C, d]`.
            tokens: The tokens, `int [B, C]`.
        """
        last, lengths = rows.starts[:-1].long() + counts - 1, lengths + tokens.shape[1]
        x = self._drafter.fuse(hidden.flatten(0, 1), tokens.flatten())
        self._states[slots] = self._run(x, rows, lengths, self._slots(slots, lengths))[last]
        return ()

    def unroll(
        self, rows: LayerRows, slots: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """Run the layer on its own outputs, along a chain in each request's next KV slots.

        Args:
            rows: One for each request.
            slots: The requests' slots, `int64 [B]`.
            lengths: Number of tokens of each request, `int64 [B]`.

        Returns:
            `[B, L, d]`, the outputs of all steps.
        """
        steps, outputs = self._drafter.steps, [self._states[slots]]
        table = self._slots(slots, lengths, steps - 1)
        for ahead in range(1, steps):
            x = self._drafter.between(outputs[-1])
            outputs.append(self._run(x, rows, lengths + ahead, table))
        return (torch.stack(outputs, 1),)

    def _slots(self, slots: torch.Tensor, lengths: torch.Tensor, more: int = 0) -> torch.Tensor:
        """The KV slots of requests up to some lengths, and of a few more tokens, `int32 [B, P]`."""
        table = self._table
        if table.device.type == "cpu":
            # A GPU would have to wait for the lengths, and copies faster.
            table = table[:, : int(lengths.max()) + more]
        return table[slots]

    def _run(
        self,
        x: torch.Tensor,
        rows: LayerRows,
        lengths: torch.Tensor,
        table: torch.Tensor,
        *,
        only_last: bool = False,
    ) -> torch.Tensor:
        """The layer's output for its input `x [N, d]`, whose KV it writes.

        It is that of all rows, `[N, d]`, or only that of each request's last one, `[B, d]`.
        """
        positions, readers = rows.positions(lengths), rows.last if only_last else rows

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._cache.write(k, v, table[rows.requests, positions])
            return self._cache.attend(q, readers, lengths, table)

        return self._drafter.layer(x, positions, attend, rows.ends if only_last else None)
