"""Token Recycling: drafts from an adjacency matrix of recycled candidate tokens.

Training-free; arXiv 2408.08696.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafttree.method import Method
from recycle_plugin.config import RecycleOptions
from recycle_plugin.grown import GrownDrafter
from recycle_plugin.static import StaticDrafter
from recycle_plugin.tables import Tables

if TYPE_CHECKING:
    import torch


def make_drafter(
    options: RecycleOptions, vocab_size: int, device: torch.device
) -> GrownDrafter | StaticDrafter:
    """The drafter that the options ask for.

    Raises:
        ValueError: it does not fit the vocabulary.
    """
    grown = options.drafting == "grown"
    tables = Tables(vocab_size, options.k, device, pairs=grown, hot_start=options.hot_start)
    if grown:
        return GrownDrafter(tables, options.num_nodes, auto=options.nodes == "auto")
    return StaticDrafter(tables, options.topology)


METHOD = Method(
    name="token_recycling",
    title="Token Recycling",
    options=RecycleOptions,
    make_drafter=make_drafter,
)

__all__ = ["METHOD", "GrownDrafter", "RecycleOptions", "StaticDrafter", "Tables", "make_drafter"]
