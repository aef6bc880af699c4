"""Lyanna: a trained drafter that continues the target's hidden states."""

from drafttree.method import Method
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaDrafter

METHOD = Method(
    name="lyanna",
    title="Lyanna",
    options=LyannaOptions,
    make_drafter=LyannaDrafter,
    hidden_states=True,
)

__all__ = ["METHOD", "LyannaDrafter", "LyannaOptions"]
