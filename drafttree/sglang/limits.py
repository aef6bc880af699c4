"""Trees of the size that their method declares; needs no engine."""

from __future__ import annotations

import logging

from torch.nn.functional import pad

from drafttree.tree import NO_TOKEN, DraftTree

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


def whole_trees(trees: DraftTree, num_draft_tokens: int) -> DraftTree:
    """Trees with as many columns as their method declares, for which SGLang has captured graphs."""
    missing = 1 + num_draft_tokens - trees.tokens.shape[1]
    if missing <= 0:
        return trees
    tokens, parents = (
        pad(each, (0, missing), value=NO_TOKEN) for each in (trees.tokens, trees.parents)
    )
    return DraftTree(tokens, parents, trees.tree_size)


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
