"""Lyanna: a trained drafter that continues the target's hidden states."""

from pathlib import Path

from drafttree.method import Method
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaDrafter


def _check(target: str, model: str) -> None:
    # Its libraries are loaded when they are needed.
    from lyanna_plugin.checkpoint import check

    check(target, model)


_DRAFTERS = Path(__file__).with_name("drafters")

METHOD = Method(
    name="lyanna",
    title="Lyanna",
    options=LyannaOptions,
    make_drafter=LyannaDrafter,
    hidden_states=True,
    check_model=_check,
    models={file.parent.name: file.parent for file in _DRAFTERS.glob("*/config.json")},
)

__all__ = ["METHOD", "LyannaDrafter", "LyannaOptions"]
