"""Tensor-parallel ranks that would draft and choose otherwise than the first one.

Ranks have the same logits, so as a rule they would agree even if nothing was exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "TESTS_STRAYING_RANKS"

ENVIRONMENT = {VARIABLE: "1"}


def enable() -> None:
    """Let all ranks but the first draw other random numbers, and read other logits, in RSD and
    Lyanna; none but the first may choose a shape of trees."""
    from lyanna_plugin import drafter as lyanna
    from lyanna_plugin.drafter import LyannaTrees
    from rsd_plugin.drafter import RsdDrafter
    from rsd_plugin.noise import StepNoise

    create = StepNoise.__init__

    def of_other_seeds(self: StepNoise, seeds: Tensor, lengths: Tensor) -> None:
        create(self, seeds + 1 if _strays() else seeds, lengths)

    StepNoise.__init__ = of_other_seeds  # type: ignore[method-assign]
    for owner, name, place in (
        (StepNoise, "children", 1),
        (lyanna, "sample_tree", 0),
        (lyanna, "expand_tree", 0),
    ):
        setattr(owner, name, _of_other_logits(getattr(owner, name), place))
    for kind in (RsdDrafter, LyannaTrees):
        kind.plan = _of_first(kind.plan)  # type: ignore[attr-defined, method-assign]


def _strays() -> bool:
    from vllm.distributed.parallel_state import get_tp_group

    return bool(get_tp_group().rank_in_group)


def _of_other_logits(function: Any, place: int) -> Any:
    def wrapped(*args: Any) -> Any:
        given = [*args]
        if _strays():
            given[place] = given[place].roll(1, -1)
        return function(*given)

    return wrapped


def _of_first(plan: Any) -> Any:
    def wrapped(*args: Any) -> Any:
        assert not _strays()
        return plan(*args)

    return wrapped
