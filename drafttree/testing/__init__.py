"""Conformance tests for drafters of all three kinds, which a method's own tests should run.

`check_drafter` runs a short decoding session against a random target, with requests that start,
finish, opt out and share the batch, and with truncated trees. It does what the hosts do with a
drafter of its kind, checks everything that they rely on, and needs no engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drafttree.drafter import Drafter, ModelFreeDrafter
from drafttree.method import DRAFT_MODEL, HIDDEN_STATE, MODEL_FREE, Method
from drafttree.model_drafters import DraftModelDrafter, HiddenStateDrafter
from drafttree.target import Target
from drafttree.testing.draft_model import check_draft_model
from drafttree.testing.hidden_state import check_hidden_state
from drafttree.testing.model_free import check_model_free
from drafttree.testing.session import check_reports, check_reset
from drafttree.testing.target import HIDDEN_SIZE, VOCAB_SIZE, random_target

__all__ = ["HIDDEN_SIZE", "VOCAB_SIZE", "check_drafter", "check_method", "random_target"]


def check_method(
    method: Method[Any], options: dict[str, Any] | None = None, target: Target | None = None
) -> int:
    """Check a method's declaration and its drafter.

    Args:
        method: The method.
        options: Its options, as a user would give them.
        target: The target for which the drafter is made; `random_target()` if not given.

    Returns:
        Number of accepted draft tokens, as `check_drafter` returns it; 0 for a kind that another
        package defines, of which only the declaration is checked.

    Raises:
        AssertionError: The message names the rule that is broken.
        TypeError: `make_drafter` returned a drafter of another kind.
        ValueError: The options are wrong, or a proposal is not a valid draft tree.
    """
    valid = method.name.isidentifier() and method.name == method.name.lower()
    assert valid, f"name={method.name!r} must be a lower-case identifier"
    parsed = method.parse(options or {})
    num_draft_tokens, depth = parsed.num_draft_tokens, parsed.depth
    assert num_draft_tokens >= 1, f"num_draft_tokens={num_draft_tokens} must be at least 1"
    assert 1 <= depth <= num_draft_tokens, (
        f"depth={depth} must be between 1 and num_draft_tokens={num_draft_tokens}"
    )
    if method.kind not in (MODEL_FREE, DRAFT_MODEL, HIDDEN_STATE):
        return 0
    target = target or random_target()
    given = target if method.kind.needs_hidden_states else replace(target, embed=None)
    return check_drafter(method.drafter(parsed, given), num_draft_tokens, depth, target)


def check_drafter(
    drafter: Drafter,
    num_draft_tokens: int,
    depth: int,
    target: Target | None = None,
    steps: int = 60,
    seed: int = 0,
) -> int:
    """Check a newly made drafter.

    Args:
        drafter: The drafter, of any of the three kinds.
        num_draft_tokens: Greatest number of draft tokens that its options declare.
        depth: Greatest depth that its options declare.
        target: The target for which the drafter was made; `random_target()` if not given.
        steps: Number of decode steps to run.
        seed: Seed of the random texts.

    Returns:
        Number of accepted draft tokens.

    Raises:
        AssertionError: The message names the rule that is broken.
        TypeError: The drafter is of none of the three kinds.
        ValueError: A proposal is not a valid draft tree, or is larger than declared.
    """
    assert 1 <= drafter.max_depth <= depth, (
        f"max_depth={drafter.max_depth} must be between 1 and depth={depth}"
    )
    target = target or random_target()
    if isinstance(drafter, ModelFreeDrafter):
        accepted = check_model_free(drafter, num_draft_tokens, target, steps, seed)
    elif isinstance(drafter, DraftModelDrafter):
        accepted = check_draft_model(drafter, num_draft_tokens, target, steps, seed)
    elif isinstance(drafter, HiddenStateDrafter):
        accepted = check_hidden_state(drafter, num_draft_tokens, target, steps, seed)
    else:
        raise TypeError(
            f"{type(drafter).__name__} derives from none of ModelFreeDrafter, DraftModelDrafter "
            "and HiddenStateDrafter"
        )
    check_reports(drafter)
    check_reset(drafter)
    return accepted
