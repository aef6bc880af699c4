"""The conformance test of drafters that sample trees from a draft model."""

from __future__ import annotations

from typing import Any

import torch
from tree_kernels.mask import depths

from drafttree.acceptance_rules import AcceptanceRule, TreeRule
from drafttree.model_drafters import DraftModelDrafter
from drafttree.seeds import Seeds
from drafttree.target import Target
from drafttree.testing.session import Session, as_verified, paths_of, random_weights, set_up
from drafttree.tree import DraftTree, Verified
from drafttree.verify import Chosen, verify_sampled

_SEEDS = (7, None, None, 11)
_SAMPLED = torch.tensor([True, True, False, True])
"""The settings of the requests, by slot: with a seed, without one, and not sampled."""

_TARGET_TOKENS, _DRAFT_TOKENS = 8, 3
"""How many tokens the requests' filters leave of each distribution."""


def check_draft_model(
    drafter: DraftModelDrafter, num_draft_tokens: int, target: Target, steps: int, seed: int
) -> int:
    """Check a drafter that uses a draft model; `check_drafter` describes the arguments."""
    _check_columns(drafter, num_draft_tokens)
    set_up(drafter, num_draft_tokens)
    session = _DraftModelSession(drafter, num_draft_tokens, target, seed)
    session.run(steps)
    return session.accepted


def _check_columns(drafter: DraftModelDrafter, num_draft_tokens: int) -> None:
    columns = drafter.columns
    assert columns[:1] == (-1,), f"columns must begin with the root's parent, -1: {columns}"
    assert len(columns) <= 1 + num_draft_tokens, (
        f"columns has {len(columns) - 1} draft tokens, but num_draft_tokens={num_draft_tokens}"
    )
    depth = _column_depths(columns)
    if drafter.tables is not None:
        return
    assert sorted(depth) == depth, f"columns must go level by level, not at depths {depth}"
    assert depth[-1] == drafter.max_depth, (
        f"columns ends at depth {depth[-1]}, but max_depth={drafter.max_depth}"
    )


def _column_depths(columns: tuple[int, ...]) -> list[int]:
    depth = [0]
    for column, parent in enumerate(columns[1:], 1):
        assert 0 <= parent < column, f"columns[{column}]={parent} must be an earlier column"
        depth.append(depth[parent] + 1)
    return depth


class _Forward:
    """A `DraftForward` that looks distributions up, and checks what the drafter asks for.

    Args:
        drafter: The drafter.
        probs: `float32 [2, V, V]`, the distributions after each token of requests that are not
            sampled, and of those that are.
        sampled: `bool [B]`.

    Attributes:
        trees: The trees whose KV has been written; None before the first call.
    """

    def __init__(
        self, drafter: DraftModelDrafter, probs: torch.Tensor, sampled: torch.Tensor
    ) -> None:
        self.trees: DraftTree | None = None
        self._whole = len(drafter.columns)
        self._has_tables = drafter.tables is not None
        self._probs = probs
        self._sampled = sampled

    def __call__(self, trees: DraftTree, first: int) -> torch.Tensor:
        trees.check(self._whole - 1, by_depth=not self._has_tables)
        read = 0 if self.trees is None else self.trees.tokens.shape[1]
        width = trees.tokens.shape[1]
        is_last = self._has_tables and width == self._whole
        assert first == (1 if is_last else read) < width, (
            f"forward was called for columns {first} to {width - 1} when {read} columns had been "
            "read: each must be read once, in order, and with tables all of them again at the end"
        )
        if is_last:
            self.trees = None if self.trees is None else self.trees.truncated(0)
        self.check_unchanged(trees)
        self.trees = trees
        if width == self._whole:
            return self._probs.new_zeros(0, self._probs.shape[2])  # not used, as hosts return none
        tokens = trees.tokens[:, first:].clamp(min=0).long()
        return self._probs[self._sampled.long()[:, None], tokens]

    def check_unchanged(self, trees: DraftTree) -> None:
        """Check that the columns read so far are as they were read."""
        if self.trees is None:
            return
        width = min(self.trees.tokens.shape[1], trees.tokens.shape[1])
        for mine, theirs in (
            (self.trees.tokens, trees.tokens),
            (self.trees.parents, trees.parents),
        ):
            assert torch.equal(mine[:, :width], theirs[:, :width]), (
                "columns that the draft model had read were changed: their KV is that of other "
                "nodes"
            )


class _DraftModelSession(Session[DraftModelDrafter]):
    """A session with tables in place of the target and the draft model."""

    def __init__(
        self, drafter: DraftModelDrafter, num_draft_tokens: int, target: Target, seed: int
    ) -> None:
        super().__init__(drafter, num_draft_tokens, target, seed)
        weights = random_weights(self._vocab_size, self._generator)
        self._target = _filtered(weights, _TARGET_TOKENS)
        self._likeliest = self._target.argmax(-1)
        weights = weights * random_weights(self._vocab_size, self._generator) ** 0.25
        plain = weights / weights.sum(-1, keepdim=True)
        self._draft = torch.stack([plain, _filtered(weights, _DRAFT_TOKENS)])
        self._seeds = Seeds(torch.device("cpu"), seed)

    def _start(self, slot: int, prompt: list[int]) -> None:
        slots, root = torch.tensor([slot]), prompt[-1]
        self._texts[slot] = prompt
        if self._drafter.tables is not None:
            self._drafter.tables.start(slot, prompt)
        trees = DraftTree.of_roots(torch.tensor([root], dtype=torch.int32))
        self._show_tables(slots, trees)
        token = int(self._verify(slots, trees, self._undrafted_rule(slots)).emitted[0, 0])
        self._prompt_read(slot, root, token)
        self._texts[slot] = [*prompt, token]

    def _undrafted_rule(self, slots: torch.Tensor) -> AcceptanceRule | None:
        roots = torch.tensor([self._texts[slot][-1] for slot in slots.tolist()], dtype=torch.int32)
        return self._drafter.undrafted_rule(roots, *self._seeds_and_lengths(slots))

    def _seeds_and_lengths(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seeds = self._seeds.of([_SEEDS[slot] for slot in slots.tolist()])
        return seeds, self._lengths(slots)

    def _decode(
        self, slots: torch.Tensor, roots: torch.Tensor, drafting: torch.Tensor, limit: int
    ) -> tuple[DraftTree, Verified]:
        if not drafting.any():
            trees, rule = DraftTree.of_roots(roots), self._undrafted_rule(slots)
        else:
            trees, drawn = self._propose(slots, roots)
            trees = as_verified(trees, roots, drafting, limit)
            rule = self._drafter.acceptance_rule(trees, drawn)
        self._show_tables(slots, trees)
        return trees, self._verify(slots, trees, rule)

    def _propose(self, slots: torch.Tensor, roots: torch.Tensor) -> tuple[DraftTree, Any]:
        sampled = _SAMPLED[slots]
        forward = _Forward(self._drafter, self._draft, sampled)
        trees, drawn = self._drafter.propose(
            slots, roots.clone(), *self._seeds_and_lengths(slots), sampled, forward
        )
        self._check_trees(trees, roots)
        read = 0 if forward.trees is None else forward.trees.tokens.shape[1]
        width = trees.tokens.shape[1]
        assert width <= read, (
            f"forward was called for {read} of {width} columns: the KV of the others would be "
            "missing after they are accepted"
        )
        forward.check_unchanged(trees)
        if self._drafter.tables is not None:
            return trees, drawn
        columns = torch.tensor(_column_depths(self._drafter.columns)[:width])
        found = depths(trees.parents, trees.tree_size).long()
        wrong = ((found != columns) & (trees.tokens >= 0)).nonzero().tolist()
        if wrong:
            row, column = wrong[0]
            raise AssertionError(
                f"column {column} holds a node of depth {int(found[row, column])}, but columns "
                f"says {int(columns[column])}"
            )
        return trees, drawn

    @property
    def _by_depth(self) -> bool:
        return self._drafter.tables is None

    def _check_order(
        self, slots: torch.Tensor, roots: torch.Tensor, drafting: torch.Tensor
    ) -> None:
        """Check that seeded and greedy requests do not depend on the other requests.

        Drafters that measure time may propose trees of another size, which are not compared.
        """
        first = self._outcome(slots, roots)
        for order in (slots, slots.roll(1), slots[:1]):
            again = self._outcome(order, roots[(order[:, None] == slots).int().argmax(1)])
            for slot in order.tolist():
                repeats = _SEEDS[slot] is not None or not _SAMPLED[slot]
                if repeats and first[slot][0] == again[slot][0]:
                    assert first[slot] == again[slot], (
                        f"the request in slot {slot}, with seed {_SEEDS[slot]} and "
                        f"sampled={bool(_SAMPLED[slot])}, got another tree or other tokens at the "
                        "same length: they must not depend on the other requests of the batch"
                    )

    def _outcome(self, slots: torch.Tensor, roots: torch.Tensor) -> dict[int, Any]:
        """What becomes of each slot's request: the width, the paths, and the emitted tokens."""
        trees, drawn = self._propose(slots, roots)
        rule = self._drafter.acceptance_rule(trees, drawn)
        emitted: list[Any] = [None] * len(slots)  # the host's own draws do not repeat
        if rule is not None:
            emitted = self._verify(slots, trees, rule).emitted.tolist()
        rows = zip(slots.tolist(), paths_of(trees), emitted, strict=True)
        return {slot: (trees.tokens.shape[1], paths, tokens) for slot, paths, tokens in rows}

    def _verify(
        self, slots: torch.Tensor, trees: DraftTree, rule: AcceptanceRule | None
    ) -> Verified:
        sampled = _SAMPLED[slots]

        def after(tokens: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
            sure = torch.nn.functional.one_hot(self._likeliest[tokens], self._vocab_size)
            return torch.where(sampled[:, None], self._target[tokens], sure.float())

        chosen_by = rule
        if isinstance(rule, TreeRule):
            nodes_of = trees.tokens.clamp(min=0).long()
            probs = after(nodes_of.flatten(), sampled.repeat_interleave(nodes_of.shape[1]))
            rows = torch.arange(len(probs)).view_as(nodes_of)
            whole = rule.of_trees(probs, rows)
            assert (whole.dtype, whole.shape) == (torch.int32, rows.shape), (
                f"a rule must return int32 {[*rows.shape]}, not {whole.dtype} {[*whole.shape]}"
            )
            chosen_by = Chosen(rule, whole)

        def draw(nodes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
            tokens = trees.tokens.gather(1, nodes.long()[:, None])[:, 0].clamp(min=0).long()
            probs = after(tokens, sampled)
            if chosen_by is None:
                return torch.multinomial(probs, 1, generator=self._generator)[:, 0].int()
            found = chosen_by(probs.clone(), nodes)
            assert (found.dtype, found.shape) == (torch.int32, nodes.shape), (
                f"a rule must return int32 [{len(nodes)}], not {found.dtype} {[*found.shape]}"
            )
            assert ((found >= 0) & (found < self._vocab_size)).all(), (
                f"a rule returned {found.tolist()}, but there are {self._vocab_size} tokens"
            )
            chosen = probs.gather(1, found.long()[:, None])[:, 0]
            assert (chosen[alive] > 0).all(), (
                "a rule chose a token that the target excludes: the output would not follow the "
                "target's distribution"
            )
            return found

        return verify_sampled(trees, draw, self._drafter.max_depth)

    def _show_tables(self, slots: torch.Tensor, trees: DraftTree) -> None:
        """Show the tables, if there are any, what the target says after all nodes."""
        if (tables := self._drafter.tables) is not None:
            tokens = trees.tokens.flatten().clamp(min=0).long()
            self._observe(tables, slots, trees, self._target[tokens])


def _filtered(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Distributions of the `count` most likely tokens after each, from weights `[V, V]`."""
    best = weights.topk(min(count, weights.shape[1]), dim=-1)
    kept = torch.zeros_like(weights).scatter_(-1, best.indices, best.values)
    return kept / kept.sum(-1, keepdim=True)
