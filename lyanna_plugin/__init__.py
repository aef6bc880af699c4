"""Lyanna: a trained drafter that continues the target's hidden states."""

from drafttree.method import Method
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaDrafter


def _check(target: str, model: str) -> None:
    # Its libraries are loaded when they are needed.
    from lyanna_plugin.checkpoint import check

    check(target, model)


METHOD = Method(
    name="lyanna",
    title="Lyanna",
    options=LyannaOptions,
    make_drafter=LyannaDrafter,
    hidden_states=True,
    check_model=_check,
)

__all__ = ["METHOD", "LyannaDrafter", "LyannaOptions"]
