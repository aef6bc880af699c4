"""Lyanna: draft trees from a trained layer that continues the target's hidden states."""

from __future__ import annotations

from pathlib import Path

from drafttree.method import HIDDEN_STATE, Method
from drafttree.target import Target
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaDrafter


def make_drafter(options: LyannaOptions, target: Target) -> LyannaDrafter:
    """Build the drafter for a target.

    Raises:
        ValueError: The folder `options.model` does not contain a drafter for this target.
    """
    return LyannaDrafter(options, target)


def _check_model(target: str, model: str) -> None:
    # Loads transformers, which the options alone do not need.
    from lyanna_plugin.checkpoint import check

    check(target, model)


_DRAFTERS = Path(__file__).with_name("drafters")

METHOD = Method(
    name="lyanna",
    title="Lyanna",
    kind=HIDDEN_STATE,
    options=LyannaOptions,
    make_drafter=make_drafter,
    check_model=_check_model,
    models={file.parent.name: file.parent for file in _DRAFTERS.glob("*/config.json")},
)

__all__ = ["METHOD", "LyannaDrafter", "LyannaOptions", "make_drafter"]
