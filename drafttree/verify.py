"""Sampled verification: lossless acceptance of drafts that were chosen deterministically.

The next token at a node is sampled from the target exactly as the engine would sample it without
speculation. If a child has that token, the child is accepted and verification continues there;
otherwise it ends. So every emitted token is sampled from the target, whatever was drafted, and
greedy verification (Token Recycling, arXiv 2408.08696, section 3.2) is the temperature-0 case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tree_kernels.accept import accept_step, accept_walk
from tree_kernels.draw import draw_tokens

from drafttree.acceptance_rules import TreeRule
from drafttree.tree import DraftTree, Verified

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(nodes int32 [B], alive bool [B]) -> tokens int32 [B]`: the target's token after each node.

Rows that are not alive have left their tree: the token returned for them is ignored, and their
request's random state must not advance."""


def draws_ahead(logits: torch.Tensor) -> bool:
    """Whether drawing a token for every row in advance is faster than drawing level by level.

    On a GPU the launches of all levels cost more. On a CPU most rows would be drawn in vain.
    """
    return logits.is_cuda


def draw_ahead(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A token for each row of `logits [R, V]`, drawn at `temperatures [R]`: `int32 [R]`.

    Drawing in advance does not change the distribution, because each row is reached at most once.
    """
    seed = torch.randint(1 << 62, (1,), device=logits.device)
    return draw_tokens(logits, temperatures, seed)


def verify_target(
    trees: DraftTree, target: torch.Tensor, max_depth: int, rows: torch.Tensor | None = None
) -> Verified:
    """Verify against the target's token after each node: the most likely one, or one drawn ahead.

    Args:
        trees: The trees to verify.
        target: The tokens, integers `[B, N]`, or `[R]` if there are `rows`.
        max_depth: Greatest depth of a draft token.
        rows: The place of each node in `target`, integers `[B, N]`.
    """
    if not trees.drafted and rows is None:
        return Verified(torch.zeros_like(trees.tokens), target, torch.ones_like(trees.tree_size))
    path, emitted, num_emitted = accept_walk(
        trees.tokens, trees.parents, trees.tree_size, target, max_depth, rows
    )
    return Verified(path, emitted, num_emitted)


def verify_sampled(
    trees: DraftTree, draw: Draw, max_depth: int, *, waits: bool | None = None
) -> Verified:
    """Verify by drawing level by level, one draw for each emitted token and no more.

    Args:
        trees: The trees to verify.
        draw: Draws the target's token after one node of each tree.
        max_depth: Greatest depth of a draft token.
        waits: Whether the host waits for each level to see whether any request is left. By default
            it does on a CPU, where that saves the draws of the remaining levels; on a GPU it would
            stall the device, unless `draw` waits anyway.
    """
    batch = trees.tokens.shape[0]
    device = trees.tokens.device
    waits = device.type == "cpu" if waits is None else waits
    # -1 for requests that have left their trees.
    node = trees.tree_size.clamp(max=1) - 1
    alive = node >= 0
    path = torch.full((batch, max_depth + 1), -1, dtype=torch.int32, device=device)
    emitted = torch.full_like(path, -1)
    for depth in range(max_depth + 1):
        token = draw(node.clamp(min=0), alive)
        path[:, depth] = node
        emitted[:, depth] = torch.where(alive, token, -1)
        node = accept_step(trees.tokens, trees.parents, trees.tree_size, node, token)
        alive = node >= 0
        if waits and not bool(alive.any()):
            break
    return Verified(path, emitted, (emitted >= 0).sum(1, dtype=torch.int32))


@dataclass(frozen=True)
class Chosen:
    """What a rule has chosen for whole trees. As an `AcceptanceRule`, it repeats that.

    Attributes:
        rule: The rule.
        tokens: The tokens after the nodes, `int32 [B, N]`, as `TreeRule.of_trees` returns them.
        by_level: The requests for which the rule must choose level by level instead, `bool [B]`;
            None if there are none.
    """

    rule: TreeRule
    tokens: torch.Tensor
    by_level: torch.Tensor | None = None

    def __call__(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """The token after one node of each tree."""
        tokens = self.tokens.gather(1, nodes.long()[:, None])[:, 0]
        if self.by_level is None:
            return tokens
        return torch.where(self.by_level, self.rule(target, nodes), tokens)
