"""A step's trees in the columns in which a drafter has proposed their nodes."""

from __future__ import annotations

from dataclasses import replace

import torch

from drafttree.tree import NO_TOKEN, DraftTree, Verified


def as_proposed(
    drafts: DraftTree,
    verified: Verified,
    columns: torch.Tensor,
    width: int,
    rows: int,
    forced: torch.Tensor | None,
    given: torch.Tensor | None,
) -> tuple[DraftTree, Verified]:
    """The trees and their outcome with each node in the column in which it was proposed.

    Forced nodes are left out, as they say nothing of how well the drafter drafts. A path may go
    through one that was proposed. The outcome's `emitted` has all tokens, and its `bound` says how
    many of them would be accepted without drafts.

    Args:
        drafts: The trees as verified, N columns.
        verified: The outcome.
        columns: Column of each node in the tree as it was proposed, `int64 [B, N]`; -1 for padding
            and for nodes that were not proposed.
        width: Number of columns of the trees as proposed; may be less where the last were not used.
        rows: Number of rows that were verified.
        forced: Whether a grammar leaves no token but that of the node, `bool [B, N]`; None if it
            does for no node.
        given: Whether a grammar adds the node whatever was proposed, `bool [B, N]`; None if it
            adds none.
    """
    # What was not proposed is in a column beyond all others, which is dropped.
    places = columns.masked_fill(columns < 0, width)
    absent = torch.full_like(drafts.tokens[:, :1], NO_TOKEN).expand(-1, width + 1)
    above = places.gather(1, drafts.parents.clamp(min=0).long()).int()
    above = above.masked_fill(drafts.parents < 0, -1)
    tokens = drafts.tokens
    if forced is not None:
        above, tokens = above.masked_fill(forced, -1), tokens.masked_fill(forced, NO_TOKEN)
    nodes, padding = verified.path.clamp(min=0).long(), verified.path < 0
    path = columns.gather(1, nodes).int()
    trees = DraftTree(
        absent.scatter(1, places, tokens)[:, :width],
        absent.scatter(1, places, above)[:, :width],
        columns.amax(1).int() + 1,
    )
    proposed = (columns >= 0).sum(1)
    accepted = torch.zeros_like(proposed)
    if given is not None:
        accepted = given.gather(1, nodes).masked_fill(padding, False).sum(1)
    return trees, replace(
        verified,
        path=path.masked_fill(padding, -1),
        rows=rows,
        bound=torch.stack((proposed, accepted), 1),
    )
