"""What a drafting method gives the hosts: draft trees for a batch, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from drafttree.verify import Verified


@dataclass(frozen=True)
class DraftTree:
    """The draft trees of a batch, breadth-first; a column with a token of -1 is no node.

    Attributes:
        tokens: `int32 [B, N]`; column 0 is the root, the last accepted token.
        parents: `int32 [B, N]`; -1 for the root and where there is no node.
        num_nodes: `int32 [B]`, the columns up to the last node, the root included.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    num_nodes: torch.Tensor

    @classmethod
    def of_roots(cls, roots: torch.Tensor) -> DraftTree:
        """Trees without a draft under `roots`, `int32 [B]`."""
        tokens = roots[:, None]
        return cls(tokens, torch.full_like(tokens, -1), torch.ones_like(roots))

    @property
    def drafted(self) -> bool:
        """Whether there is room for more than roots."""
        return self.tokens.shape[1] > 1

    def before(self, roots: torch.Tensor) -> torch.Tensor:
        """The token before each node, `int32 [B, N]`, given those before the roots, `int32 [B]`.

        Where there is no node it is -1.
        """
        if not self.drafted:
            return roots[:, None]
        above = self.tokens.gather(1, self.parents.clamp(min=0).long())
        above = above.masked_fill(self.parents < 0, -1)
        above[:, 0] = roots
        return above

    def path(self, row: int, column: int) -> list[int]:
        """The tokens from below the root to a node; none where there is no node."""
        tokens: list[int] = []
        while column > 0:
            tokens.insert(0, int(self.tokens[row, column]))
            column = int(self.parents[row, column])
        return [token for token in tokens if token >= 0]


class Drafter(Protocol):
    """Drafts trees and learns from what the target said of them. Knows no engine.

    State that belongs to a request is keyed by a slot, which the host gives it from when it starts
    to when it is released, never by its row in the batch.

    Attributes:
        max_depth: the greatest depth of a node that it drafts.
    """

    max_depth: int

    def allot(self, slots: int, length: int) -> None:
        """Make room for the state of requests in `slots` slots, whose texts have at most `length`
        tokens; once, before all else."""

    def calibrate(self, forward: Callable[[int], float], most: int) -> None:
        """Hear what the target's forwards cost, before the first request.

        Args:
            forward: runs one of so many tokens; its seconds.
            most: the most tokens that there is room for.
        """

    def start(self, slot: int, text: Sequence[int]) -> None:
        """A request begins, or begins anew, with all tokens that are known of it."""

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens came after the requests' texts without a verification: `int32 [B, E]`, -1 for
        none; `slots` is `int64 [B]`, here and below."""

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """The token before each text's last, `int32 [B]`; -1 where it is not known."""

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Draft one tree under each of `roots` (`int32 [B]`, the texts' last tokens; -1 for none,
        but not -1 alone)."""

    def observe(
        self, slots: torch.Tensor, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Learn from the target's raw logits.

        Args:
            slots: `int64 [R]`, of the rows' requests.
            tokens: `int32 [R]`, the token whose next-token logits a row holds; -1 to skip it.
            before: `int32 [R]`, the token before it; -1 where it is not known.
            logits: `[R, V]`, before any penalty, mask or temperature.

        Returns:
            `int32 [R]`: the target's most likely next token after each row, ties to the lowest id.
        """

    def accepted(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Hear how the last trees fared, as far as they were verified; emitted tokens of -1 do not
        join the texts."""

    def release(self, slots: Sequence[int]) -> None:
        """Requests ended."""

    def reset(self) -> None:
        """Forget everything learnt."""

    def explain(self) -> list[dict[str, Any]]:
        """How it chose the sizes of its trees, a row for each case; ready for JSON."""

    def acceptance(self) -> dict[str, Any]:
        """How often what it drafted was accepted since it last forgot; ready for JSON.

        `tried` counts drafted nodes whose parent was accepted, `hit` those that were accepted too.

        Returns:
            For a static tree `{"paths", "tried", "hit"}`, lists of one entry a node, the root not
            among them. For others `{"sources": [{"source", "tried", "hit", "share"}]}`: rows by
            where candidates came from, in words of the drafter's own. Nothing if it does not count.
        """


DraftForward = Callable[[DraftTree, int], torch.Tensor]
"""`(trees, first) -> float32 [B, N - first, V]`: what a draft model says may follow each node from
column `first` on, after the request's temperature and filters (before filters where nothing is
drawn). It has seen the nodes before, and keeps the KV of these. What it returns for the last level
of a whole tree is not looked at."""

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(target float32 [B, V], nodes int32 [B]) -> tokens int32 [B]`: the token after each node, given
the target's distributions there. Called once a level, the roots' first."""


@dataclass(frozen=True)
class TargetParts:
    """What a drafter that continues hidden states needs of its target.

    Attributes:
        folder: of the target.
        embed: `(int [N]) -> [N, d]`, the target's embeddings.
        dtype: of the target.
    """

    folder: Path
    embed: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype
    device: torch.device


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]`: attention over the layer's KV."""


class HiddenStateDrafter(Protocol):
    """Continues the target's hidden states with one layer, whose KV the host keeps.

    Attributes:
        max_depth: the steps that it goes, and the greatest depth of a node that it drafts.
        heads: the layer's query heads, KV heads and head size.
    """

    max_depth: int
    heads: tuple[int, int, int]

    def allot(self, slots: int) -> None:
        """Make room for the state of requests in so many slots; once, before all else."""

    def fuse(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What the layer reads at known tokens: `[N, d]` before them, and themselves."""

    def between(self, states: torch.Tensor) -> torch.Tensor:
        """What it reads in its own steps."""

    def layer(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """One step, `[N, d]` at `positions [N]`."""

    def most_nodes(self, slots: torch.Tensor) -> torch.Tensor:
        """How many nodes the next trees can have, `int64 [B]`, the root not counted."""

    def propose(
        self, slots: torch.Tensor, roots: torch.Tensor, logits: torch.Tensor, steps: torch.Tensor
    ) -> DraftTree:
        """The trees under `roots [B]`, from the target's head's logits `[B, L, V]` of all steps, of
        which each request has `steps [B]`; the requests' state is keyed by `slots [B]`."""

    def accepted(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """How many drafts of the last trees were accepted, `[B]`."""

    def forget(self, slots: torch.Tensor) -> None:
        """Requests begin there, or begin anew."""


class ModelDrafter(Protocol):
    """Draws trees from a draft model that the host runs. Knows no engine and keeps no requests.

    Attributes:
        max_depth: the greatest depth of a node that it drafts.
        columns: the parents of a tree with as many nodes at each level as it may have; the root
            first.
    """

    max_depth: int
    columns: tuple[int, ...]

    def draw(
        self,
        roots: torch.Tensor,
        seeds: Sequence[int | None],
        lengths: Sequence[int],
        sampled: torch.Tensor,
        forward: DraftForward,
    ) -> tuple[DraftTree, Any]:
        """Draw one tree under each of `roots`, `int32 [B]`.

        Args:
            seeds: of each request that has one.
            lengths: the tokens before each root.
            sampled: `bool [B]`: where it is false, nothing is drawn and the likeliest are taken.

        Returns:
            The trees, and what `verify_with` wants to know of them.
        """

    def verify_with(self, trees: DraftTree, drawn: Any) -> Rule:
        """The rule that makes the output the target's own; `trees` may have been cut by count."""

    def verify_undrafted(
        self, roots: torch.Tensor, seeds: Sequence[int | None], lengths: Sequence[int]
    ) -> Rule:
        """The same for roots without drafts, at the end of a prompt."""
