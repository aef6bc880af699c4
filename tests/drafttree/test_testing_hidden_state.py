"""The conformance test of hidden-state drafters finds faults that are planted into a good one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttree import (
    HIDDEN_STATE,
    Attend,
    DraftTree,
    HiddenStateDrafter,
    Method,
    MethodOptions,
    Target,
    Verified,
)
from drafttree.testing import HIDDEN_SIZE, check_drafter, check_method, random_target

WIDTH, DEPTH = 3, 2
NUM_DRAFT_TOKENS = 2 * WIDTH


class NextEmbedding(HiddenStateDrafter):
    """Knows the random target's hidden state after a token: the token's embedding."""

    max_depth = DEPTH
    heads = (2, 1, HIDDEN_SIZE // 2)

    def __init__(self, target: Target) -> None:
        assert target.embed is not None
        self.embed: Callable[[torch.Tensor], torch.Tensor] = target.embed

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        self.last = torch.zeros(max_requests, dtype=torch.int64)

    def fuse(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = x.view(len(x), 2, -1)
        needed = slice(None) if last is None else last
        return x[needed] + 0.01 * attend(q[needed], q[:, :1], q[:, 1:]).flatten(1)

    def max_draft_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.full_like(slots, NUM_DRAFT_TOKENS)

    def propose(
        self, slots: torch.Tensor, roots: torch.Tensor, logits: torch.Tensor, steps: torch.Tensor
    ) -> DraftTree:
        best = logits.topk(WIDTH).indices.int()
        tokens = torch.cat([roots[:, None], best[:, 0], best[:, 1]], 1)
        parents = torch.tensor([-1, *[0] * WIDTH, *[1] * WIDTH], dtype=torch.int32)
        parents = parents.repeat(len(roots), 1)
        # What a verification did to the slot decides where the second level hangs.
        parents[:, 1 + WIDTH :] += self.last[slots, None].int() % WIDTH
        off = steps == 0
        tokens[off, 1:], parents[off, 1:] = -1, -1
        return DraftTree(tokens, parents, torch.full_like(roots, tokens.shape[1]))

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        self.last[slots] = verified.emitted.clamp(min=0).sum(1)

    def reset(self) -> None:
        self.last.zero_()


def check(drafter: HiddenStateDrafter) -> int:
    return check_drafter(drafter, NUM_DRAFT_TOKENS, DEPTH)


def test_a_good_drafter_passes_and_is_accepted() -> None:
    assert check(NextEmbedding(random_target())) > 50


def test_a_target_of_other_sizes_may_be_given() -> None:
    class Wider(NextEmbedding):
        heads = (2, 1, 24)

    target = random_target(vocab_size=100, hidden_size=48)
    assert check_drafter(Wider(target), NUM_DRAFT_TOKENS, DEPTH, target) > 50
    with pytest.raises(AssertionError, match="needs a target with `embed`"):
        check_drafter(Wider(target), NUM_DRAFT_TOKENS, DEPTH, replace(target, embed=None))


class Undiscerning(NextEmbedding):
    """Drafts for requests that are not to be drafted for."""

    def propose(self, slots: Any, roots: Any, logits: Any, steps: Any) -> DraftTree:
        return super().propose(slots, roots, logits, torch.ones_like(steps))


class Promises(NextEmbedding):
    """Proposes more draft tokens than it said."""

    def max_draft_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.full_like(slots, NUM_DRAFT_TOKENS - 1)


class Exceeds(NextEmbedding):
    """Says more draft tokens than its options declare."""

    def max_draft_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.full_like(slots, NUM_DRAFT_TOKENS + 1)


class ByRow(NextEmbedding):
    """Looks its state up by the row of the batch."""

    def propose(self, slots: Any, *given: Any) -> DraftTree:
        return super().propose(torch.arange(len(slots)), *given)


class TwoLayers(NextEmbedding):
    """Attends twice, and there is KV for one layer."""

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        super().layer(x, positions, attend, last)
        return super().layer(x, positions, attend, last)


class AllHeads(NextEmbedding):
    """Hands over as many KV heads as query heads."""

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = x.view(len(x), 2, -1)
        return attend(q if last is None else q[last], q, q).flatten(1)


class Wide(NextEmbedding):
    """Returns hidden states and embeddings side by side, without a projection."""

    def fuse(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden, self.embed(tokens)], 1)


class TooDeep(NextEmbedding):
    """Says that its drafts end one level above where they do."""

    max_depth = DEPTH - 1

    def propose(self, slots: Any, roots: Any, logits: Any, steps: Any) -> DraftTree:
        return super().propose(slots, roots, logits.repeat(1, 2, 1), steps)


class NoTree(NextEmbedding):
    """Hangs the second level under itself."""

    def propose(self, *given: Any) -> DraftTree:
        trees = super().propose(*given)
        parents = trees.parents.clone()
        parents[:, -1] = torch.where(parents[:, -1] < 0, -1, parents.shape[1] - 1)
        return DraftTree(trees.tokens, parents, trees.tree_size)


class WrongHeads(NextEmbedding):
    """Declares query heads that the KV heads do not divide."""

    heads = (3, 2, 16)


@pytest.mark.parametrize(
    ("faulty", "error", "complaint"),
    [
        (Undiscerning, AssertionError, "for a request whose steps are 0"),
        (Promises, AssertionError, "6 draft tokens .* but max_draft_tokens says 5"),
        (Exceeds, AssertionError, r"max_draft_tokens is \[7.*, but num_draft_tokens=6"),
        (ByRow, AssertionError, "indexed by its slot, not by its row"),
        (TwoLayers, AssertionError, "layer must call attend once"),
        (AllHeads, AssertionError, "attend was called with q, k and v of shapes"),
        (Wide, AssertionError, r"fuse must return \[6, 32\], not \[6, 64\]"),
        (TooDeep, AssertionError, "has depth 2, but max_depth=1"),
        (NoTree, ValueError, "the parent of column 6 is 6"),
        (WrongHeads, AssertionError, "KV heads, which divide"),
    ],
)
def test_planted_faults_are_found(
    faulty: type[NextEmbedding], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        check(faulty(random_target()))


class Options(MethodOptions):
    """Options of a method that drafts from hidden states."""

    model: str

    @property
    def num_draft_tokens(self) -> int:
        return NUM_DRAFT_TOKENS

    @property
    def depth(self) -> int:
        return DEPTH


def test_a_method_is_checked_in_one_line() -> None:
    method: Method[HiddenStateDrafter] = Method(
        name="next_embedding",
        title="Next embedding",
        kind=HIDDEN_STATE,
        options=Options,
        make_drafter=lambda options, target: NextEmbedding(target),
    )
    assert check_method(method, {"model": "drafter"}) > 50
