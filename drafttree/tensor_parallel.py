"""Tensor parallelism: all ranks verify the first one's trees.

All ranks have the same logits, so they accept the same tokens. But a drafter's state may depend on
its process, for instance on measured times or on files in a cache, so ranks that drafted
independently could disagree. So a model-free drafter drafts on the first rank alone. Drafters with
a model draft on all ranks, as each has a part of the model; what else they draft from comes from
the first rank. It alone also decides which forwards are run to prime a drafter, and which to time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from drafttree.acceptance_rules import AcceptanceRule, TreeRule
from drafttree.drafter import ModelFreeDrafter, PrimeForward
from drafttree.ranks import Group
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape

logger = logging.getLogger(__name__)


def is_drafting_rank(group: Group) -> bool:
    """Whether this rank is the one that drafts."""
    return group.rank_in_group == 0


def drafts_alone(group: Group) -> bool:
    """Whether no other rank verifies this one's trees."""
    return group.world_size == 1


def broadcast_tensor(tensor: torch.Tensor, group: Group) -> None:
    """Overwrite a tensor with the first rank's."""
    if not drafts_alone(group):
        group.broadcast(tensor)


def shape_of_first_rank(choose: Callable[[], TreeShape], group: Group) -> TreeShape:
    """The shape of trees that the first rank chooses.

    Args:
        choose: Chooses a shape; called on the first rank alone.
        group: The ranks, on CPUs, as the host waits for the shape.
    """
    if drafts_alone(group):
        return choose()
    sizes = torch.zeros(3, dtype=torch.int64)
    if is_drafting_rank(group):
        shape = choose()
        sizes = torch.tensor([shape.depth, shape.width, shape.nodes])
    group.broadcast(sizes)
    depth, width, nodes = sizes.tolist()
    return TreeShape(depth, width, nodes)


def rule_of_first_rank(rule: AcceptanceRule | None, group: Group) -> AcceptanceRule | None:
    """A rule that all ranks ask together, and that the first one alone follows.

    Its state may not fit the first rank's trees on another.
    """
    if rule is None or drafts_alone(group):
        return rule
    if isinstance(rule, TreeRule):
        return _TreeRuleOfFirstRank(rule, group)
    return _RuleOfFirstRank(rule, group)


class _RuleOfFirstRank:
    def __init__(self, rule: AcceptanceRule, group: Group) -> None:
        self._rule = rule
        self._group = group

    def __call__(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return self._of_first(lambda: self._rule(target, nodes), nodes)

    def _of_first(self, choose: Callable[[], torch.Tensor], places: torch.Tensor) -> torch.Tensor:
        """The first rank's choice of one token for each place, `int32`."""
        tokens = torch.empty(places.shape, dtype=torch.int32, device=places.device)
        if is_drafting_rank(self._group):
            tokens.copy_(choose())
        broadcast_tensor(tokens, self._group)
        return tokens


class _TreeRuleOfFirstRank(_RuleOfFirstRank, TreeRule):
    _rule: TreeRule

    def of_trees(self, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._of_first(lambda: self._rule.of_trees(target, rows), rows)


def broadcast_trees(trees: DraftTree, num_draft_tokens: int, group: Group) -> DraftTree:
    """The first rank's trees, sent between devices without waiting on the host.

    Args:
        trees: This rank's trees, which are ignored unless it is the first.
        num_draft_tokens: Greatest number of draft tokens of a tree.
        group: The ranks.
    """
    if group.world_size == 1:
        return trees
    batch, width = trees.tokens.shape
    shape = batch, 2, num_draft_tokens + 1
    tensors = torch.full(shape, -1, dtype=torch.int32, device=trees.tokens.device)
    tensors[:, 0, :width] = trees.tokens
    tensors[:, 1, :width] = trees.parents
    tensors = torch.cat((tensors.flatten(1), trees.tree_size[:, None]), 1)
    group.broadcast(tensors)
    tokens, parents = tensors[:, :-1].view(shape).unbind(1)
    return DraftTree(tokens.contiguous(), parents.contiguous(), tensors[:, -1].contiguous())


def broadcast_verified(verified: Verified, group: Group) -> Verified:
    """The first rank's outcome of a verification of the same trees on all ranks."""
    if group.world_size == 1:
        return verified
    depth = verified.path.shape[1]
    parts = verified.path, verified.emitted, verified.num_emitted[:, None]
    tensors = torch.cat([part.int() for part in parts], 1)
    group.broadcast(tensors)
    path, emitted = tensors[:, :depth], tensors[:, depth:-1]
    return Verified(path.contiguous(), emitted.contiguous(), tensors[:, -1].contiguous())


_NO_ROOT = -1


def prime_ranks(
    drafter: ModelFreeDrafter,
    forward: PrimeForward,
    max_tokens: int,
    group: Group,
    device: torch.device,
    *,
    idle: bool,
) -> tuple[int, int]:
    """Let the first rank's drafter prime with forwards that all ranks run.

    Args:
        drafter: This rank's drafter.
        forward: This rank's forward.
        max_tokens: Greatest number of tokens of a forward.
        group: The ranks.
        device: The ranks' device.
        idle: See `ModelFreeDrafter.prime`.

    Returns:
        The progress that the first rank's drafter reports, on all ranks.
    """
    if group.world_size == 1:
        return drafter.prime(forward, max_tokens, idle=idle)
    # The number of tokens, 0 at the end; the root, or how much is computed; the tokens, of which
    # the first is at the end how much there is in all.
    message = torch.zeros(2 + max_tokens, dtype=torch.int32, device=device)

    def send(count: int, root: int, tokens: Sequence[int] | torch.Tensor) -> None:
        message[0], message[1] = count, root
        message[2 : 2 + len(tokens)] = torch.as_tensor(tokens)
        group.broadcast(message)

    def led(root: int | None, tokens: torch.Tensor) -> torch.Tensor:
        send(len(tokens), _NO_ROOT if root is None else root, tokens)
        return forward(root, tokens)

    if is_drafting_rank(group):
        progress = 0, 0
        try:
            progress = drafter.prime(led, max_tokens, idle=idle)
        finally:
            send(0, progress[0], progress[1:])
        return progress
    while True:
        group.broadcast(message)
        count, root, everything = message[:3].tolist()
        if not count:
            return root, everything
        with _failures_logged():
            forward(None if root == _NO_ROOT else root, message[2 : 2 + count])


@contextmanager
def leading_measurements(
    measure: Callable[[int], float], group: Group, device: torch.device
) -> Iterator[Callable[[int], float]]:
    """On the first rank: timed forwards that the other ranks run too.

    The others call `follow_measurements` meanwhile. The first rank's times count.

    Args:
        measure: Runs one forward over a number of tokens and returns its seconds.
        group: The ranks.
        device: The ranks' device.
    """
    if group.world_size == 1:
        yield measure
        return
    message = torch.zeros(1, dtype=torch.int32, device=device)

    def led(tokens: int) -> float:
        group.broadcast(message.fill_(tokens))
        return measure(tokens)

    try:
        yield led
    finally:
        group.broadcast(message.zero_())


def follow_measurements(
    measure: Callable[[int], float], group: Group, device: torch.device
) -> None:
    """On the other ranks: run the timed forwards of the first rank until it ends."""
    message = torch.zeros(1, dtype=torch.int32, device=device)
    while True:
        group.broadcast(message)
        tokens = int(message)
        if not tokens:
            return
        with _failures_logged():
            measure(tokens)


@contextmanager
def _failures_logged() -> Iterator[None]:
    """A context for a forward that the first rank runs too.

    It alone uses the outcome, so it alone decides what a failure means.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # it may be this rank's alone, for which the others would wait
    except Exception as error:
        logger.warning("A forward that the first rank asked for has failed: %r", error)


class NonDraftingRank(ModelFreeDrafter):
    """The drafter of a rank that does not draft."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """No drafts: the first rank's trees replace these."""
        return DraftTree.of_roots(roots)

    def check_remembers(self) -> None:
        """Nothing: what the first rank's drafter says counts."""

    def remember(self, tokens: torch.Tensor) -> None:
        """Nothing: the first rank's drafter remembers the texts."""
