"""The conformance test of drafters that draft without a model."""

from __future__ import annotations

import torch

from drafttree.drafter import ModelFreeDrafter
from drafttree.target import Target
from drafttree.testing.session import Session, as_verified, paths_of, random_weights, set_up
from drafttree.tree import DraftTree, Verified
from drafttree.verify import verify_target


def check_model_free(
    drafter: ModelFreeDrafter, num_draft_tokens: int, target: Target, steps: int, seed: int
) -> int:
    """Check a model-free drafter; `check_drafter` describes the arguments."""
    set_up(drafter, num_draft_tokens)
    session = _ModelFreeSession(drafter, num_draft_tokens, target, seed)
    session.run(steps)
    return session.accepted


class _ModelFreeSession(Session[ModelFreeDrafter]):
    """A session whose target always emits its most likely token."""

    def __init__(
        self, drafter: ModelFreeDrafter, num_draft_tokens: int, target: Target, seed: int
    ) -> None:
        super().__init__(drafter, num_draft_tokens, target, seed)
        self._target = random_weights(self._vocab_size, self._generator).log()

    def _start(self, slot: int, prompt: list[int]) -> None:
        self._drafter.start(slot, prompt[:-1])
        # The first token after a prompt is emitted without a verification.
        tokens = torch.tensor([[prompt[-1], -1]], dtype=torch.int32)
        self._drafter.extend(torch.tensor([slot]), tokens)
        self._texts[slot] = prompt

    def _decode(
        self, slots: torch.Tensor, roots: torch.Tensor, drafting: torch.Tensor, limit: int
    ) -> tuple[DraftTree, Verified]:
        self._check_previous(slots)
        trees = DraftTree.of_roots(roots)
        if drafting.any():
            proposed = self._propose(slots, roots.masked_fill(~drafting, -1))
            trees = as_verified(proposed, roots, drafting, limit)
        return trees, self._verify(slots, trees)

    def _propose(self, slots: torch.Tensor, asked: torch.Tensor) -> DraftTree:
        trees = self._drafter.propose(slots, asked.clone())
        self._check_trees(trees, asked)
        return trees

    def _check_previous(self, slots: torch.Tensor) -> None:
        """Check the tokens before the roots, where the drafter returns them."""
        found = self._drafter.previous_tokens(slots)
        assert (found.dtype, found.shape) == (torch.int32, slots.shape), (
            f"previous_tokens must return int32 [{len(slots)}], not {found.dtype} {[*found.shape]}"
        )
        for slot, token in zip(slots.tolist(), found.tolist(), strict=True):
            expected = self._texts[slot][-2]
            assert token in (-1, expected), (
                f"previous_tokens of slot {slot} is {token}, but its text ends with {expected}, "
                f"{self._texts[slot][-1]}"
            )

    def _check_order(
        self, slots: torch.Tensor, roots: torch.Tensor, drafting: torch.Tensor
    ) -> None:
        """Check that a request's tree depends on its slot and not on its row in the batch.

        Drafters that are random or that measure time may propose other trees at the second call, so
        orders are compared only if a repetition gives the same trees.
        """
        if not drafting.any():
            return
        asked = roots.masked_fill(~drafting, -1)
        first, second = self._propose(slots, asked), self._propose(slots, asked)
        rolled = self._propose(slots.roll(1), asked.roll(1))
        if paths_of(first) == paths_of(second):
            expected = paths_of(first)
            assert paths_of(rolled) == expected[-1:] + expected[:-1], (
                "the same requests in another order of the batch got other trees: the state of a "
                "request must be indexed by its slot, not by its row"
            )

    def _verify(self, slots: torch.Tensor, trees: DraftTree) -> Verified:
        tokens = trees.tokens.flatten()
        logits = self._target[tokens.clamp(min=0).long()]
        best = self._observe(self._drafter, slots, trees, logits.clone())
        argmax = logits.argmax(-1).int()
        if best is not None:
            assert (best.dtype, best.shape) == (torch.int32, argmax.shape), (
                f"observe must return int32 [{len(argmax)}], not {best.dtype} {[*best.shape]}"
            )
            used = tokens >= 0
            assert torch.equal(best[used], argmax[used]), "observe must return the logits' argmax"
        return verify_target(trees, argmax.view_as(trees.tokens), self._drafter.max_depth)
