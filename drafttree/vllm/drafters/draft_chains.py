"""What a drafter's layer drafts from: one chain for each request of a step."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DraftChains(NamedTuple):
    """The chains of B requests.

    Attributes:
        slots: The requests' slots, `int64 [B]`.
        roots: The roots, `int32 [B]`.
        root_positions: Their positions, `int64 [B]`.
        rows: Places of each request's columns among the step's tokens, `int64 [B, N]`; padding
            repeats a request's last, whose KV is written again before it is read.
        sizes: Number of columns of each request, `int64 [B]`.
        steps: How many of the layer's states follow from a request's own rows, `int64 [B]`; 0
            without drafts.
    """

    slots: torch.Tensor
    roots: torch.Tensor
    root_positions: torch.Tensor
    rows: torch.Tensor
    sizes: torch.Tensor
    steps: torch.Tensor
