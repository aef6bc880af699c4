"""Truncates trees that are larger than their method declares; needs no engine."""

from __future__ import annotations

import logging

from drafttree.tree import DraftTree

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")


def limit_trees(trees: DraftTree, num_draft_tokens: int, drafter: object) -> DraftTree:
    """Truncate trees to their declared size, for which SGLang has reserved KV slots.

    Args:
        trees: The trees as proposed.
        num_draft_tokens: `MethodOptions.num_draft_tokens` of the method.
        drafter: The drafter that proposed them; the warning, logged once, names its class.
    """
    if trees.tokens.shape[1] > 1 + num_draft_tokens:
        _warn(type(drafter), trees.tokens.shape[1] - 1, num_draft_tokens)
    return trees.truncated(num_draft_tokens)


_warned: set[type] = set()


def _warn(drafter: type, proposed: int, declared: int) -> None:
    if drafter not in _warned:
        _warned.add(drafter)
        logger.warning(
            "%s.%s proposes %d draft tokens, but its options declare %d: the rest is dropped",
            drafter.__module__,
            drafter.__qualname__,
            proposed,
            declared,
        )
