"""What the decoding sessions of all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import sleep
from typing import Any, Generic, TypeVar

import torch

from drafttree.drafter import Drafter, ModelFreeDrafter
from drafttree.target import Target
from drafttree.tree import DraftTree, Verified

MAX_REQUESTS = 4
MAX_MODEL_LEN = 256
PROMPT_LENGTH = 12

_FORWARD_SECONDS = 0.005
"""What a forward of the target takes, whatever its size, for drafters that measure it."""

D = TypeVar("D", bound=Drafter)
Paths = list[set[tuple[int, ...]]]
"""The tokens down to each node of each tree."""


class Session(ABC, Generic[D]):
    """Requests that are decoded together, one per slot, in an order that changes every few steps.

    What a request says depends on its slot and the seed alone, not on the order of the batch.

    Args:
        drafter: The drafter.
        num_draft_tokens: Greatest number of draft tokens that its options declare.
        target: The target for which it was made.
        seed: Seed of the texts.
        order: Seed of the order of the batch.

    Attributes:
        accepted: Number of accepted draft tokens so far.
    """

    def __init__(
        self, drafter: D, num_draft_tokens: int, target: Target, seed: int, order: int = 0
    ) -> None:
        self.accepted = 0
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self._vocab_size = target.vocab_size
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.Generator().manual_seed(order)
        self._of_slots = [
            torch.Generator().manual_seed(MAX_REQUESTS * seed + slot + 1)
            for slot in range(MAX_REQUESTS)
        ]
        self._texts: list[list[int]] = [[] for _ in range(MAX_REQUESTS)]

    def run(self, steps: int) -> None:
        """Decode a number of steps, while requests start, finish and opt out."""
        for slot in range(MAX_REQUESTS):
            self._start(slot, self._prompt(slot))
        for step in range(steps):
            if step % 20 == 19:
                self._restart(step // 20 % MAX_REQUESTS)
            if step % 4 == 0:
                slots = torch.randperm(MAX_REQUESTS, generator=self._order)
            drafting = torch.ones(MAX_REQUESTS, dtype=torch.bool)
            if step % 7 == 6:
                drafting[slots == step // 7 % MAX_REQUESTS] = False
            if step % 11 == 10:
                drafting[:] = False
            limit = self._num_draft_tokens // 2 if step % 5 == 0 else self._num_draft_tokens
            self._step(slots, drafting, limit, repeats=step % 3 == 2)

    def finish(self) -> None:
        """Finish all requests."""
        self._drafter.release(list(range(MAX_REQUESTS)))

    def _prompt(self, slot: int) -> list[int]:
        generator = self._of_slots[slot]
        return torch.randint(0, self._vocab_size, (PROMPT_LENGTH,), generator=generator).tolist()

    def _restart(self, slot: int) -> None:
        """Finish the request in a slot, and start another."""
        self._drafter.release([slot])
        self._start(slot, self._prompt(slot))

    def _step(self, slots: torch.Tensor, drafting: torch.Tensor, limit: int, repeats: bool) -> None:
        roots = torch.tensor([self._texts[slot][-1] for slot in slots.tolist()], dtype=torch.int32)
        if repeats:
            self._check_order(slots, roots, drafting)
        trees, verified = self._decode(slots, roots, drafting, limit)
        if type(self._drafter).profile is not Drafter.profile:
            sleep(_FORWARD_SECONDS)  # or the time of drafting would outweigh all drafts
        self._drafter.on_verified(slots, trees, verified)
        self.accepted += int((verified.num_emitted - 1).sum())
        for slot, row in zip(slots.tolist(), verified.emitted.tolist(), strict=True):
            self._texts[slot] += [token for token in row if token >= 0]
            if len(self._texts[slot]) + self._drafter.max_depth + 1 >= MAX_MODEL_LEN:
                self._restart(slot)

    @property
    def _by_depth(self) -> bool:
        """Whether the nodes of trees must be in breadth-first order."""
        return True

    def _lengths(self, slots: torch.Tensor) -> torch.Tensor:
        """Number of tokens before each root, `int64 [B]`."""
        return torch.tensor([len(self._texts[slot]) - 1 for slot in slots.tolist()])

    def _prompt_read(self, slot: int, root: int, emitted: int) -> None:
        """Report the token after a prompt to the drafter, or -1 after a part of one."""
        trees = DraftTree.of_roots(torch.tensor([root], dtype=torch.int32))
        token = torch.tensor([[emitted]], dtype=torch.int32)
        path, one = torch.zeros_like(token), torch.ones_like(trees.tree_size)
        verified = Verified(path, token, one, reads_prompts=True)
        self._drafter.on_verified(torch.tensor([slot]), trees, verified)

    def _observe(
        self, tables: ModelFreeDrafter, slots: torch.Tensor, trees: DraftTree, logits: torch.Tensor
    ) -> torch.Tensor | None:
        """Show a model-free drafter the target's `logits [B * (1 + N), V]` after all nodes.

        Returns:
            What its `observe` returned.
        """
        previous = trees.previous_tokens(tables.previous_tokens(slots)).flatten()
        rows = slots.repeat_interleave(trees.tokens.shape[1])
        return tables.observe(rows, trees.tokens.flatten(), previous, logits)

    @abstractmethod
    def _start(self, slot: int, prompt: list[int]) -> None:
        """A request starts in `slot`; sets its text, which ends with the root."""

    @abstractmethod
    def _decode(
        self, slots: torch.Tensor, roots: torch.Tensor, drafting: torch.Tensor, limit: int
    ) -> tuple[DraftTree, Verified]:
        """Draft and verify one step.

        Args:
            slots: `int64 [B]`, the requests' slots.
            roots: `int32 [B]`, the texts' last tokens.
            drafting: `bool [B]`, the requests that are drafted for.
            limit: Number of draft tokens to which trees are truncated.

        Returns:
            The trees as verified, and the outcome.
        """

    def _check_order(
        self, slots: torch.Tensor, roots: torch.Tensor, drafting: torch.Tensor
    ) -> None:
        """Check that proposals do not depend on the order of the batch.

        Hidden-state drafters, whose proposals change their state, are checked in another way.
        """

    def _check_trees(self, trees: DraftTree, roots: torch.Tensor) -> None:
        """Check what holds for the proposals of all kinds; `roots [B]` are those asked for."""
        assert len(trees.tokens) == len(roots), (
            f"propose returned {len(trees.tokens)} trees for {len(roots)} requests"
        )
        trees.check(self._num_draft_tokens, by_depth=self._by_depth)
        assert torch.equal(trees.tokens[:, 0], roots), (
            f"column 0 must contain the roots {roots.tolist()}, not {trees.tokens[:, 0].tolist()}"
        )
        depth = max((len(path) for row in paths_of(trees) for path in row), default=0)
        assert depth <= self._drafter.max_depth, (
            f"a draft token has depth {depth}, but max_depth={self._drafter.max_depth}"
        )


def random_weights(vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Weights `[V, V]` of the tokens after each token.

    Few tokens follow each, so that texts repeat themselves and drafts are accepted.
    """
    return torch.rand(vocab_size, vocab_size, generator=generator) ** 24


def set_up(drafter: Drafter, num_draft_tokens: int) -> None:
    """What hosts call before the first request."""
    drafter.allocate(MAX_REQUESTS, MAX_MODEL_LEN)
    drafter.profile(lambda tokens: _FORWARD_SECONDS, MAX_REQUESTS * (1 + num_draft_tokens))


def paths_of(trees: DraftTree) -> Paths:
    """The paths of each tree's draft tokens."""
    batch, width = trees.tokens.shape
    return [
        {tuple(path) for column in range(1, width) if (path := trees.path(row, column))}
        for row in range(batch)
    ]


def as_verified(
    trees: DraftTree, roots: torch.Tensor, drafting: torch.Tensor, limit: int
) -> DraftTree:
    """The trees as a host verifies them: truncated, and without drafts for some requests."""
    trees = trees.truncated(limit)
    tokens = trees.tokens.masked_fill(~drafting[:, None], -1)
    tokens[:, 0] = roots
    parents = trees.parents.masked_fill(~drafting[:, None], -1)
    return DraftTree(tokens, parents, trees.tree_size.masked_fill(~drafting, 1))


def _counts(drafter: Drafter) -> list[dict[str, Any]]:
    """The counts that the drafter reports, one row per node or candidate source."""
    counted = drafter.acceptance()
    assert isinstance(counted, dict), "acceptance must return a dictionary"
    if "sources" in counted:
        return list(counted["sources"])
    pairs = zip(counted.get("tried", ()), counted.get("hit", ()), strict=True)
    return [{"tried": tried, "hit": hit} for tried, hit in pairs]


def check_reports(drafter: Drafter) -> None:
    """Check what a drafter tells after a session."""
    assert all(isinstance(row, dict) for row in drafter.explain()), "explain must return rows"
    for row in _counts(drafter):
        assert 0 <= row["hit"] <= row["tried"], f"hit must not exceed tried in {row}"


def check_reset(drafter: Drafter) -> None:
    """Reset a drafter, and check that its counts start again."""
    drafter.reset()
    tried = [row["tried"] for row in _counts(drafter)]
    assert not any(tried), f"reset must clear the acceptance counts, but tried is {tried}"
