"""RSD: trees drawn from a draft model without replacement, and recursive rejection sampling.

arXiv 2402.14160.
"""

from drafttree.method import Method
from rsd_plugin.config import RsdOptions
from rsd_plugin.drafter import RsdDrafter

METHOD = Method(
    name="rsd",
    title="RSD",
    options=RsdOptions,
    make_drafter=RsdDrafter,
    draft_model=True,
)

__all__ = ["METHOD", "RsdDrafter", "RsdOptions"]
