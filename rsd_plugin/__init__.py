"""RSD: draft trees sampled from a draft model without replacement, verified by recursive rejection
sampling (arXiv 2402.14160) or by traversal verification (arXiv 2505.12398).
"""

from __future__ import annotations

from drafttree.method import DRAFT_MODEL, Method
from drafttree.target import Target
from rsd_plugin.config import RsdOptions
from rsd_plugin.drafter import RsdDrafter


def make_drafter(options: RsdOptions, target: Target) -> RsdDrafter:
    """Build the drafter for a target.

    Raises:
        ValueError: The options need a CPU, and the target is on another device.
    """
    options.check_device(target.device)
    drafter = RsdDrafter(options, target.vocab_size)
    drafter.share_tables(target)
    return drafter


METHOD = Method(
    name="rsd",
    title="RSD",
    kind=DRAFT_MODEL,
    options=RsdOptions,
    make_drafter=make_drafter,
)

__all__ = ["METHOD", "RsdDrafter", "RsdOptions", "make_drafter"]
