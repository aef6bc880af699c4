"""Token Recycling: drafts from an adjacency matrix of recycled candidate tokens.

Training-free; arXiv 2408.08696.
"""

from pathlib import Path

from drafttree.method import Method
from recycle_plugin.config import RecycleOptions
from recycle_plugin.drafter import RecycleDrafter


def _prepare(folder: Path) -> None:
    # Its libraries are loaded when they are needed.
    from recycle_plugin.priming import prepare

    prepare(folder)


METHOD = Method(
    name="token_recycling",
    title="Token Recycling",
    options=RecycleOptions,
    make_drafter=RecycleDrafter,
    prepare=_prepare,
)

__all__ = ["METHOD", "RecycleDrafter", "RecycleOptions"]
