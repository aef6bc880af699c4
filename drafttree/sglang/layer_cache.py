"""The KV cache of a drafter's layer, in the slots of the target's KV pool.

On a GPU one launch of the Triton kernel for tree attention serves all requests. On a CPU PyTorch's
fused attention, called for one request after another, is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional as F
from tree_kernels.tree_attention import tree_attention

from drafttree.transfer import all_on_device


@dataclass(frozen=True)
class LayerRows:
    """Rows that the layer reads in one forward: the last ones of B requests, request by request.

    Attributes:
        counts: Number of rows of each request, on the host.
        starts: `int32 [B + 1]`, the first row of each request, and the number of all rows.
        per_request: `int32 [B]`, the counts on the device.
        requests: `int64 [N]`, the request of each row.
        after: `int64 [N]`, number of rows of its request that come after each row.
    """

    counts: Sequence[int]
    starts: torch.Tensor
    per_request: torch.Tensor
    requests: torch.Tensor
    after: torch.Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> LayerRows:
        """Lay out as many rows of each request; nothing is waited for."""
        ends = np.cumsum(counts)
        requests = np.repeat(np.arange(len(counts)), counts)
        arrays = (
            np.concatenate(([0], ends)).astype(np.int32),
            np.array(counts, np.int32),
            requests,
            ends[requests] - 1 - np.arange(len(requests)),
        )
        return cls(counts, *all_on_device(arrays, device))

    @cached_property
    def last(self) -> LayerRows:
        """Each request's last row alone."""
        return LayerRows.of([1] * len(self.counts), self.requests.device)

    @property
    def ends(self) -> torch.Tensor:
        """The last row of each request, `int64 [B]`."""
        return self.starts[1:].long() - 1

    def positions(self, lengths: torch.Tensor) -> torch.Tensor:
        """The position of each row, `int64 [N]`.

        Args:
            lengths: `int64 [B]`, number of tokens of each request up to and with its last row.
        """
        return lengths[self.requests] - 1 - self.after


class LayerCache:
    """Keys and values of the layer, by the target's KV slots.

    Args:
        slots: Number of KV slots.
        heads: Number of KV heads.
        size: Size of a head.
        dtype: Data type of keys and values.
        device: The target's device.
    """

    def __init__(
        self, slots: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._keys = torch.zeros(slots, heads, size, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values, `[N, KV heads, size]`, into slots, `int [N]`."""
        here = slots.long()
        self._keys[here], self._values[here] = k, v

    def attend(
        self, q: torch.Tensor, rows: LayerRows, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of rows to their requests' texts, whose KV has been written.

        Args:
            q: Queries `[N, heads, size]`.
            rows: The rows.
            lengths: `int64 [B]`, number of tokens of each request up to and with its last row.
            table: `int32 [B, P]`, the KV slot of each position of each request.
        """
        if q.device.type == "cpu":
            return self._attend_one_by_one(q, rows, lengths, table)
        return tree_attention(
            q,
            # Each slot is a page of one token.
            self._keys[:, None],
            self._values[:, None],
            table,
            rows.starts,
            lengths.int(),
            # There are no trees, so no masks are read.
            rows.per_request,
            torch.empty(len(q), 1, dtype=torch.int32, device=q.device),
            q.shape[-1] ** -0.5,
            max(rows.counts),
        )

    def _attend_one_by_one(
        self, q: torch.Tensor, rows: LayerRows, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        output, first = torch.empty_like(q), 0
        for count, length, slots in zip(rows.counts, lengths.tolist(), table, strict=True):
            own, here = slots[:length], slice(first, first + count)
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            # The batch dimension selects the fused kernel, which does not materialise the scores.
            attended = F.scaled_dot_product_attention(
                q[here].transpose(0, 1)[None],
                self._keys.index_select(0, own).transpose(0, 1)[None],
                self._values.index_select(0, own).transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )
            output[here] = attended[0].transpose(0, 1)
            first += count
        return output
