"""Token Recycling: drafts from an adjacency matrix of recycled candidate tokens.

Training-free; arXiv 2408.08696.
"""

from drafttree.method import Method
from recycle_plugin.config import RecycleOptions
from recycle_plugin.drafter import RecycleDrafter

METHOD = Method(
    name="token_recycling",
    title="Token Recycling",
    options=RecycleOptions,
    make_drafter=RecycleDrafter,
)

__all__ = ["METHOD", "RecycleDrafter", "RecycleOptions"]
