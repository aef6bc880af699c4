"""A conformance test for drafters, which a method's own tests should run.

`check_drafter` runs a short decoding session against a random target, with requests that start,
finish, opt out and share the batch, and with truncated trees. It checks everything that a host
relies on, and needs no engine.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from drafttree.drafter import ModelFreeDrafter, Target
from drafttree.method import MODEL_FREE, Method
from drafttree.tree import DraftTree, Verified
from drafttree.verify import verify_target

VOCAB_SIZE = 64
"""Vocabulary size of the random target, and so of the drafter to check."""

MAX_REQUESTS = 4
MAX_MODEL_LEN = 256


def check_method(method: Method[Any], options: dict[str, Any] | None = None) -> int:
    """Check a method's declaration, and its drafter if that is model-free.

    Args:
        method: The method.
        options: Its options, as a user would give them.

    Returns:
        Number of accepted draft tokens, as `check_drafter` returns it; 0 for other kinds.

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
    if method.kind is not MODEL_FREE:
        return 0
    target = Target(
        model="",
        vocab_size=VOCAB_SIZE,
        device=torch.device("cpu"),
        dtype=torch.float32,
        logger=logging.getLogger(__name__),
    )
    return check_drafter(method.drafter(parsed, target), num_draft_tokens, depth)


def check_drafter(
    drafter: ModelFreeDrafter, num_draft_tokens: int, depth: int, steps: int = 60, seed: int = 0
) -> int:
    """Check a newly made model-free drafter for a vocabulary of `VOCAB_SIZE` tokens.

    Args:
        drafter: The drafter.
        num_draft_tokens: Greatest number of draft tokens that its options declare.
        depth: Greatest depth that its options declare.
        steps: Number of decode steps to run.
        seed: Seed of the random target.

    Returns:
        Number of accepted draft tokens.

    Raises:
        AssertionError: The message names the rule that is broken.
        ValueError: A proposal is not a valid draft tree, or is larger than declared.
    """
    assert 1 <= drafter.max_depth <= depth, (
        f"max_depth={drafter.max_depth} must be between 1 and depth={depth}"
    )
    session = _Session(drafter, num_draft_tokens, torch.Generator().manual_seed(seed))
    for step in range(steps):
        if step % 20 == 19:
            session.restart(step // 20 % MAX_REQUESTS)
        session.step(
            opts_out=step % 7 == 6,
            limit=num_draft_tokens // 2 if step % 5 == 0 else num_draft_tokens,
            rotates=step % 3 == 2,
        )
    _check_reports(drafter)
    drafter.reset()
    tried = [row["tried"] for row in _counts(drafter)]
    assert not any(tried), f"reset must clear the acceptance counts, but tried is {tried}"
    return session.accepted


class _Session:
    """Requests that are decoded together, one per slot, in an order that changes in every step."""

    def __init__(
        self, drafter: ModelFreeDrafter, num_draft_tokens: int, generator: torch.Generator
    ) -> None:
        self.accepted = 0
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self._generator = generator
        # Few tokens follow each token, so that texts repeat themselves and drafts are accepted.
        weights = torch.rand(VOCAB_SIZE, VOCAB_SIZE, generator=generator) ** 24
        self._target = weights.log()
        drafter.allocate(MAX_REQUESTS, MAX_MODEL_LEN)
        drafter.profile(lambda tokens: 1e-3 * tokens, MAX_REQUESTS * (1 + num_draft_tokens))
        self._texts: list[list[int]] = [[] for _ in range(MAX_REQUESTS)]
        for slot in range(MAX_REQUESTS):
            self._start(slot)

    def restart(self, slot: int) -> None:
        """Finish the request in a slot, and start another."""
        self._drafter.release([slot])
        self._start(slot)

    def _start(self, slot: int) -> None:
        prompt = torch.randint(0, VOCAB_SIZE, (12,), generator=self._generator).tolist()
        self._drafter.start(slot, prompt[:-1])
        # The first token after a prompt is emitted without a verification.
        tokens = torch.tensor([[prompt[-1], -1]], dtype=torch.int32)
        self._drafter.extend(torch.tensor([slot]), tokens)
        self._texts[slot] = prompt

    def step(self, opts_out: bool, limit: int, rotates: bool) -> None:
        """Decode one step.

        Args:
            opts_out: Whether one request is not drafted for.
            limit: Number of draft tokens to which trees are truncated.
            rotates: Whether to check that proposals do not depend on the order of the batch.
        """
        slots = torch.randperm(MAX_REQUESTS, generator=self._generator)
        roots = torch.tensor([self._texts[slot][-1] for slot in slots.tolist()], dtype=torch.int32)
        asked = roots.clone()
        if opts_out:
            asked[0] = -1
        self._check_previous(slots)
        if rotates:
            self._check_order(slots, asked)
        trees = self._propose(slots, asked)
        trees = _as_verified(trees.truncated(limit), asked, roots)
        verified = self._verify(slots, trees)
        self._drafter.on_verified(slots, trees, verified)
        self.accepted += int((verified.num_emitted - 1).sum())
        for slot, row in zip(slots.tolist(), verified.emitted.tolist(), strict=True):
            self._texts[slot] += [token for token in row if token >= 0]
            if len(self._texts[slot]) + self._drafter.max_depth + 1 >= MAX_MODEL_LEN:
                self.restart(slot)

    def _propose(self, slots: torch.Tensor, asked: torch.Tensor) -> DraftTree:
        trees = self._drafter.propose(slots, asked.clone())
        assert len(trees.tokens) == len(slots), (
            f"propose returned {len(trees.tokens)} trees for {len(slots)} requests"
        )
        trees.check(self._num_draft_tokens)
        assert torch.equal(trees.tokens[:, 0], asked), (
            f"column 0 must contain the roots {asked.tolist()}, not {trees.tokens[:, 0].tolist()}"
        )
        depth = _depth(trees)
        assert depth <= self._drafter.max_depth, (
            f"a draft token has depth {depth}, but max_depth={self._drafter.max_depth}"
        )
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

    def _check_order(self, slots: torch.Tensor, asked: torch.Tensor) -> None:
        """Check that a request's tree depends on its slot and not on its row in the batch.

        Drafters that are random or that measure time may propose other trees at the second call, so
        orders are compared only if a repetition gives the same trees.
        """
        first, second = self._propose(slots, asked), self._propose(slots, asked)
        rolled = self._propose(slots.roll(1), asked.roll(1))
        if _paths(first) == _paths(second):
            expected = _paths(first)
            assert _paths(rolled) == expected[-1:] + expected[:-1], (
                "the same requests in another order of the batch got other trees: the state of a "
                "request must be indexed by its slot, not by its row"
            )

    def _verify(self, slots: torch.Tensor, trees: DraftTree) -> Verified:
        tokens = trees.tokens.flatten()
        logits = self._target[tokens.clamp(min=0).long()]
        previous = trees.previous_tokens(self._drafter.previous_tokens(slots)).flatten()
        rows = slots.repeat_interleave(trees.tokens.shape[1])
        best = self._drafter.observe(rows, tokens, previous, logits.clone())
        argmax = logits.argmax(-1).int()
        if best is not None:
            assert (best.dtype, best.shape) == (torch.int32, argmax.shape), (
                f"observe must return int32 [{len(argmax)}], not {best.dtype} {[*best.shape]}"
            )
            used = tokens >= 0
            assert torch.equal(best[used], argmax[used]), "observe must return the logits' argmax"
        return verify_target(trees, argmax.view_as(trees.tokens), self._drafter.max_depth)


def _depth(trees: DraftTree) -> int:
    """The greatest depth of a draft token."""
    return max((len(path) for row in _paths(trees) for path in row), default=0)


def _paths(trees: DraftTree) -> list[set[tuple[int, ...]]]:
    """The paths of each tree's draft tokens."""
    batch, width = trees.tokens.shape
    return [
        {tuple(path) for column in range(1, width) if (path := trees.path(row, column))}
        for row in range(batch)
    ]


def _as_verified(trees: DraftTree, asked: torch.Tensor, roots: torch.Tensor) -> DraftTree:
    """The trees as a host verifies them: without drafts for requests that opted out."""
    off = asked < 0
    tokens = trees.tokens.masked_fill(off[:, None], -1)
    tokens[:, 0] = roots
    parents = trees.parents.masked_fill(off[:, None], -1)
    return DraftTree(tokens, parents, trees.tree_size.masked_fill(off, 1))


def _counts(drafter: ModelFreeDrafter) -> list[dict[str, Any]]:
    """The counts that the drafter reports, one row per node or candidate source."""
    counted = drafter.acceptance()
    assert isinstance(counted, dict), "acceptance must return a dictionary"
    if "sources" in counted:
        return list(counted["sources"])
    pairs = zip(counted.get("tried", ()), counted.get("hit", ()), strict=True)
    return [{"tried": tried, "hit": hit} for tried, hit in pairs]


def _check_reports(drafter: ModelFreeDrafter) -> None:
    assert all(isinstance(row, dict) for row in drafter.explain()), "explain must return rows"
    for row in _counts(drafter):
        assert 0 <= row["hit"] <= row["tried"], f"hit must not exceed tried in {row}"
