"""Drafting and verification with tables as models: the output follows the target."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from scipy.stats import chisquare
from scripted_budget import ScriptedBudget

from drafttree.acceptance_rules import TreeRule
from drafttree.budget import TreeShape
from drafttree.budget.level_acceptance import NO_DRAFTS
from drafttree.seeds import Seeds
from drafttree.tree import DraftTree, Verified
from drafttree.verify import verify_sampled, verify_target
from rsd_plugin import RsdDrafter, RsdOptions
from rsd_plugin.rules import RecursiveRejection, Traversal

VOCAB = 4
REQUESTS = 40_000
LENGTH = 3
Rule = Literal["recursive", "traversal"]
VERIFY: tuple[Rule, ...] = ("recursive", "traversal")
TREES = ("beam:3x2", "branch:3-2", "beam:1x3", "branch:1-1-1", "beam:9x1", "auto")
SHAPES = (TreeShape(2, 3, 6), TreeShape(1, 1, 1), TreeShape(3, 2, 6), TreeShape(3, 1, 3))
"""What is chosen in turn with `tree=auto`."""


def tables(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token distributions by the last token, of a target and of a draft model.

    Each has zeros where the other has not.
    """
    generator = torch.Generator().manual_seed(seed)
    target, draft = (1.5 * torch.randn(2, VOCAB, VOCAB, generator=generator)).softmax(-1)
    target[0, 1], draft[0, 2], draft[2, 0] = 0.0, 0.0, 0.0
    return target / target.sum(1, keepdim=True), draft / draft.sum(1, keepdim=True)


def step(
    drafter: RsdDrafter,
    roots: torch.Tensor,
    lengths: torch.Tensor,
    seeds: torch.Tensor,
    sampled: torch.Tensor,
    fault: bool = False,
    by_level: bool = False,
) -> tuple[DraftTree, Verified]:
    target, draft = tables()

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return draft[trees.tokens[:, first:].clamp(min=0).long()]

    slots = torch.arange(len(roots))
    trees, drawn = drafter.propose(slots, roots, seeds, lengths, sampled, forward)
    rule = drafter.acceptance_rule(trees, drawn)
    if fault:
        # Give the rule other distributions than the children were sampled from.
        probs = drawn.probs.roll(1, 2)
        if isinstance(rule, Traversal):
            coins = rule._by_level._coins, rule._coins
            rule = Traversal(trees, probs, *coins, drawn.most_children)
        else:
            rule = RecursiveRejection(trees, probs, rule._coins, drawn.most_children)

    def after(tokens: torch.Tensor) -> torch.Tensor:
        probs = target[tokens.clamp(min=0).long()]
        sure = torch.nn.functional.one_hot(probs.argmax(-1), VOCAB).float()
        return torch.where(sampled.view(-1, *[1] * tokens.dim()), probs, sure)

    def draw(nodes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        return rule(after(trees.tokens.gather(1, nodes.long()[:, None])[:, 0]), nodes)

    if isinstance(rule, TreeRule) and not by_level:
        rows = torch.arange(trees.tokens.numel()).view_as(trees.tokens)
        chosen = rule.of_trees(after(trees.tokens).flatten(0, 1), rows)
        return trees, verify_target(trees, chosen, drafter.max_depth)
    return trees, verify_sampled(trees, draw, drafter.max_depth)


def decode(
    tree: str,
    roots: torch.Tensor,
    seeds: list[int | None],
    sampled: torch.Tensor,
    fault: bool = False,
    verify: Rule = "recursive",
    by_level: bool = False,
) -> tuple[torch.Tensor, int]:
    """The first tokens of each request, and the number of accepted draft tokens."""
    drafter = RsdDrafter(RsdOptions(model="draft", tree=tree, verify=verify), VOCAB)
    count = len(roots)
    if tree == "auto":
        drafter._budget = ScriptedBudget.of(*SHAPES)
    written = torch.full((count, LENGTH + drafter.max_depth + 1), -1)
    given = Seeds(torch.device("cpu"))
    lengths, accepted = torch.ones(count, dtype=torch.int64), 0
    while int(lengths.min()) <= LENGTH:
        if drafter.plans:
            drafter.follow_plan(drafter.plan(torch.arange(count), count, lambda: 0))
        _, verified = step(drafter, roots, lengths, given.of(seeds), sampled, fault, by_level)
        accepted += int(verified.num_emitted.sum()) - count
        columns = (lengths - 1)[:, None] + torch.arange(verified.emitted.shape[1])
        fits = (verified.emitted >= 0) & (columns < written.shape[1])
        rows = torch.arange(count)[:, None].expand_as(columns)
        written[rows[fits], columns[fits]] = verified.emitted[fits].long()
        lengths += verified.num_emitted
        last = verified.num_emitted.long()[:, None] - 1
        roots = verified.emitted.gather(1, last)[:, 0]
    return written[:, :LENGTH], accepted


def p_value(written: torch.Tensor) -> float:
    target, _ = tables()
    cells = (written * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    found = torch.bincount(cells, minlength=VOCAB**3).double()
    first = target[3]
    law = (first[:, None, None] * target[:, :, None] * target[None]).double().flatten()
    law *= len(written) / law.sum()
    assert float(found[law == 0].sum()) == 0
    often = law >= 5
    found, law = (torch.cat([each[often], each[~often].sum()[None]]) for each in (found, law))
    kept = law > 0
    return float(chisquare(found[kept].numpy(), law[kept].numpy()).pvalue)


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("tree", TREES)
def test_the_output_is_distributed_as_the_targets(tree: str, verify: Rule) -> None:
    roots = torch.full((REQUESTS,), 3, dtype=torch.int32)
    every = torch.ones(REQUESTS).bool()
    written, accepted = decode(tree, roots, [None] * REQUESTS, every, verify=verify)
    assert accepted > 0.2 * REQUESTS
    assert p_value(written) > 1e-3


def test_traversal_level_by_level_is_recursive_rejection() -> None:
    roots, seeds = torch.full((64,), 3, dtype=torch.int32), [*range(64)]
    every = torch.ones(64).bool()
    whole, more = decode("beam:3x2", roots, seeds, every, verify="traversal")
    by_level, fewer = decode("beam:3x2", roots, seeds, every, verify="traversal", by_level=True)
    recursive, same = decode("beam:3x2", roots, seeds, every)
    assert by_level.tolist() == recursive.tolist() != whole.tolist()
    assert fewer == same != more


@pytest.mark.parametrize("verify", VERIFY)
def test_a_planted_fault_is_found(verify: Rule) -> None:
    roots = torch.full((REQUESTS,), 3, dtype=torch.int32)
    every = torch.ones(REQUESTS).bool()
    seeds = [None] * REQUESTS
    written, _ = decode("beam:3x2", roots, seeds, every, fault=True, verify=verify)
    assert p_value(written) < 1e-6


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("tree", TREES)
def test_seeded_requests_do_not_depend_on_the_batch(tree: str, verify: Rule) -> None:
    roots = torch.tensor([3, 3, 1, 3], dtype=torch.int32)
    seeds: list[int | None] = [7, 8, None, 7]
    all_sampled = torch.ones(4).bool()
    together, _ = decode(tree, roots, seeds, all_sampled, verify=verify)
    alone, _ = decode(tree, roots[:1], seeds[:1], all_sampled[:1], verify=verify)
    other = torch.cat([roots[2:3], roots[:1]])
    later, _ = decode(tree, other, [None, 7], all_sampled[:2], verify=verify)
    assert together[0].tolist() == together[3].tolist() == alone[0].tolist() == later[1].tolist()


def test_different_seeds_give_different_tokens() -> None:
    roots = torch.full((64,), 3, dtype=torch.int32)
    written, _ = decode("beam:3x2", roots, list(range(64)), torch.ones(64).bool())
    assert len({tuple(row) for row in written.tolist()}) > 10


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("tree", TREES)
def test_requests_that_are_not_sampled_get_the_most_likely_tokens(tree: str, verify: Rule) -> None:
    target, _ = tables()
    sampled = torch.tensor([False, True, False])
    roots = torch.tensor([3, 3, 0], dtype=torch.int32)
    written, _ = decode(tree, roots, [None] * 3, sampled, verify=verify)
    for row in (0, 2):
        token, expected = int(roots[row]), []
        for _ in range(LENGTH):
            token = int(target[token].argmax())
            expected.append(token)
        assert written[row].tolist() == expected


def test_a_draft_model_that_is_the_target_is_always_accepted() -> None:
    drafter = RsdDrafter(RsdOptions(model="draft", tree="beam:2x3"), VOCAB)
    target, _ = tables()
    count = 200
    roots = torch.full((count,), 3, dtype=torch.int32)

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return target[trees.tokens[:, first:].clamp(min=0).long()]

    all_sampled = torch.ones(count).bool()
    slots = torch.arange(count)
    trees, drawn = drafter.propose(slots, roots, slots, slots, all_sampled, forward)
    rule = drafter.acceptance_rule(trees, drawn)

    def draw(nodes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        tokens = trees.tokens.gather(1, nodes.long()[:, None])[:, 0]
        return rule(target[tokens.clamp(min=0).long()], nodes)

    # A beam may drop all children of a node; wherever there is a child, the first is accepted.
    verified = verify_sampled(trees, draw, drafter.max_depth)
    ends = verified.path.gather(1, verified.num_emitted.long()[:, None] - 1)
    assert not ((trees.parents == ends) & (trees.tokens >= 0)).any()


def test_a_root_without_a_draft_draws_the_same_token_whatever_the_batch() -> None:
    """Its tree has no nodes, in a batch with drafts, or its batch has no drafts."""
    drafter = RsdDrafter(RsdOptions(model="draft", tree="beam:3x2", verify="traversal"), VOCAB)
    count = 64
    roots = torch.full((count,), 3, dtype=torch.int32)
    seeds, lengths = torch.arange(count), torch.arange(count)
    target, draft = tables()

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return draft[trees.tokens[:, first:].clamp(min=0).long()]

    every = torch.ones(count).bool()
    trees, drawn = drafter.propose(seeds, roots, seeds, lengths, every, forward)
    tokens = torch.full_like(trees.tokens, -1)
    tokens[:, 0] = roots
    bare = DraftTree(tokens, torch.full_like(tokens, -1), torch.ones_like(roots))
    rule = drafter.acceptance_rule(bare, drawn)
    assert isinstance(rule, TreeRule)
    rows = torch.arange(tokens.numel()).view_as(tokens)
    among = rule.of_trees(target[3].repeat(tokens.numel(), 1), rows)[:, 0]
    alone = drafter.undrafted_rule(roots, seeds, lengths)(target[3].repeat(count, 1), 0 * roots)
    assert among.tolist() == alone.tolist()


@pytest.mark.parametrize("tree", TREES)
def test_proposals_are_draft_trees_of_the_declared_size(tree: str) -> None:
    options = RsdOptions(model="draft", tree=tree)
    drafter = RsdDrafter(options, VOCAB)
    _, draft = tables()

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return draft[trees.tokens[:, first:].clamp(min=0).long()]

    roots = torch.arange(64, dtype=torch.int32) % VOCAB
    slots = torch.arange(64)
    trees, _ = drafter.propose(slots, roots, slots, slots, slots % 2 == 0, forward)
    trees.check(options.num_draft_tokens)
    assert trees.tokens.shape[1] <= len(drafter.columns) == 1 + options.num_draft_tokens


def test_a_host_that_plans_nothing_is_proposed_the_largest_trees() -> None:
    drafter = RsdDrafter(RsdOptions(model="draft", tree="auto"), VOCAB)
    assert drafter.plans

    def planned() -> tuple[int, ...]:
        return drafter.follow_plan(drafter.plan(torch.arange(2), 2, lambda: 0))

    assert planned() == drafter.columns
    assert len(drafter.columns) == 16
    drafter._budget = ScriptedBudget.of(TreeShape(2, 3, 6), NO_DRAFTS, TreeShape(3, 1, 3))
    assert [planned() for _ in range(3)] == [(-1, 0, 0, 0, 1, 1, 1), (-1,), (-1, 0, 1, 2)]


@pytest.mark.parametrize(
    ("tree", "inner", "widest"),
    [
        ("beam:3x5", 13, 3),
        ("branch:4-2-1", 13, 8),
        ("branch:1-1-1-1", 4, 1),
        ("branch:4", 1, 1),
        ("auto", 13, 3),
    ],
)
def test_memory_of_distributions(tree: str, inner: int, widest: int) -> None:
    """Inner nodes' exist twice for a moment, beside a level's logits and distributions."""
    drafter = RsdDrafter(RsdOptions(model="any", tree=tree), VOCAB)
    assert drafter.step_bytes(6) == 6 * 4 * VOCAB * 2 * (inner + widest)


@pytest.mark.parametrize(
    ("tree", "inner", "level"),
    [
        ("beam:64x3", 129, 64 * 8),
        ("beam:65x3", 131, 65 * 28),
        ("branch:65-1", 66, 65 * 8),
        ("branch:2-65", 3, 2 * 28),
    ],
)
def test_memory_of_many_children(tree: str, inner: int, level: int) -> None:
    """More children of a node than the kernel draws are found by sorting, which takes more."""
    drafter = RsdDrafter(RsdOptions(model="any", tree=tree), VOCAB)
    assert drafter.step_bytes(6) == 6 * VOCAB * (8 * inner + level)
