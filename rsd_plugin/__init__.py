"""RSD: draft trees sampled from a draft model without replacement, verified by recursive rejection
sampling (arXiv 2402.14160) or by traversal verification (arXiv 2505.12398).
"""

from __future__ import annotations

from drafttree.drafter import Target
from drafttree.method import DRAFT_MODEL, Method
from recycle_plugin.shared_trees import make_tables
from rsd_plugin.config import RsdOptions
from rsd_plugin.drafter import RsdDrafter


def make_drafter(options: RsdOptions, target: Target) -> RsdDrafter:
    """Build the drafter for a target."""
    drafter = RsdDrafter(options, target.vocab_size)
    if options.of_tables is not None:
        drafter.share_trees(make_tables(options.of_tables, target), target.group)
    return drafter


METHOD = Method(
    name="rsd",
    title="RSD",
    kind=DRAFT_MODEL,
    options=RsdOptions,
    make_drafter=make_drafter,
)

__all__ = ["METHOD", "RsdDrafter", "RsdOptions", "make_drafter"]
