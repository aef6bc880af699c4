"""Token Recycling: drafts from an adjacency matrix of recycled candidate tokens.

Training-free; arXiv 2408.08696.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from drafttree.method import Method
from recycle_plugin.config import RecycleOptions
from recycle_plugin.grown import GrownDrafter
from recycle_plugin.static import StaticDrafter
from recycle_plugin.tables import Tables

if TYPE_CHECKING:
    import torch


def make_drafter(
    options: RecycleOptions,
    vocab_size: int,
    device: torch.device,
    target: str,
    logger: logging.Logger,
) -> GrownDrafter | StaticDrafter:
    """The drafter that the options ask for.

    Args:
        target: the target's folder, or the name by which the engine found it.
        logger: the engine's.

    Raises:
        ValueError: it does not fit the vocabulary.
    """
    # These libraries are loaded where something is drafted.
    from recycle_plugin.background import Priming
    from recycle_plugin.kept import keep

    grown = options.drafting == "grown"
    tables = Tables(
        vocab_size, options.k, device, pairs=grown, hot_start=options.hot_start is not False
    )
    logger.info(
        "Token Recycling's tables take %.1f MiB",
        (tables.matrix.nbytes + tables.pairs.nbytes) / 2**20,
    )
    if options.prime:
        tables.priming = Priming.begin(target, options.k, vocab_size, logger)
    if isinstance(options.hot_start, Path):
        tables.keeper = keep(tables, options.hot_start, target, logger)
    if grown:
        return GrownDrafter(
            tables,
            options.num_nodes,
            auto=options.nodes == "auto",
            private=options.sharing == "request",
        )
    return StaticDrafter(tables, options.topology)


def _prepare(folder: Path, options: RecycleOptions) -> None:
    if options.prime:
        # Its libraries are loaded when they are needed.
        from recycle_plugin.priming import prepare

        prepare(folder, options.k)


METHOD = Method(
    name="token_recycling",
    title="Token Recycling",
    options=RecycleOptions,
    make_drafter=make_drafter,
    prepare=_prepare,
)

__all__ = ["METHOD", "GrownDrafter", "RecycleOptions", "StaticDrafter", "Tables", "make_drafter"]
