"""RSD's trees with the candidates of Token Recycling's tables."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scipy.stats import chisquare
from scripted_budget import ScriptedBudget

from drafttree.budget import TreeChoice, TreeShape
from drafttree.budget.level_acceptance import NO_DRAFTS
from drafttree.model_drafters import DraftModelDrafter
from drafttree.seeds import Seeds
from drafttree.target import Target
from drafttree.testing import check_method, random_target
from drafttree.tree import DraftTree, Verified
from drafttree.tree_union import Candidates
from drafttree.verify import verify_sampled
from recycle_plugin import METHOD as TOKEN_RECYCLING
from recycle_plugin import DynamicTreeDrafter
from recycle_plugin.shared_trees import SharedTrees
from rsd_plugin import METHOD, RsdDrafter

VOCAB, ROOT = 12, 3
REQUESTS, ROUNDS = 2000, 12
TREE = "beam:2x2"


def target_of(vocab: int = VOCAB) -> Target:
    return random_target(vocab_size=vocab)


def drafter_of(vocab: int = VOCAB, **options: Any) -> RsdDrafter:
    given = {"model": "draft", "tree": TREE, "tables": {"prime": False, "nodes": 6}, **options}
    drafter = METHOD.drafter(METHOD.parse(given), target_of(vocab))
    assert isinstance(drafter, RsdDrafter)
    return drafter


def models(vocab: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token distributions by the last token, of a target and of a draft model."""
    generator = torch.Generator().manual_seed(5)
    target, draft = (1.5 * torch.randn(2, vocab, vocab, generator=generator)).softmax(-1)
    target[:, 1], draft[0, 2], draft[ROOT, 4] = 0.0, 0.0, 0.0
    return target / target.sum(1, keepdim=True), draft / draft.sum(1, keepdim=True)


def step(
    drafter: RsdDrafter,
    slots: torch.Tensor,
    roots: torch.Tensor,
    lengths: torch.Tensor,
    seeds: torch.Tensor,
    sampled: torch.Tensor,
    *,
    fault: bool = False,
    size: int | None = None,
) -> tuple[DraftTree, Verified]:
    target, draft = models()

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        return draft[trees.tokens[:, first:].clamp(min=0).long()]

    shared = drafter._shared
    assert shared is not None

    def ranked(
        slots: torch.Tensor, own: Candidates, kept: torch.Tensor, num_draft_tokens: int
    ) -> tuple[DraftTree, torch.Tensor]:
        return SharedTrees.choose_first(shared, slots, own, ~kept, num_draft_tokens)

    shape = drafter.plan(slots, len(slots), lambda: 0) if drafter.plans else None
    if shape is not None and not shape.depth:
        trees = drafter.propose_without_model(slots, roots)
        rule = drafter.undrafted_rule(roots, seeds, lengths)
    else:
        if shape is not None:
            assert drafter.follow_plan(shape) == (-1, *[0] * shape.nodes)
        # The fault: the nodes of sampled requests are ranked, as those of greedy ones are.
        with patch.object(shared, "choose_first", ranked if fault else shared.choose_first):
            trees, drawn = drafter.propose(slots, roots, seeds, lengths, sampled, forward)
        if size is not None:
            trees = trees.truncated(size)
        rule = drafter.acceptance_rule(trees, drawn)

    def after(tokens: torch.Tensor) -> torch.Tensor:
        probs = target[tokens.clamp(min=0).long()]
        sure = torch.nn.functional.one_hot(probs.argmax(-1), VOCAB).float()
        return torch.where(sampled[:, None], probs, sure)

    def draw(nodes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        return rule(after(trees.tokens.gather(1, nodes.long()[:, None])[:, 0]), nodes)

    verified = verify_sampled(trees, draw, drafter.max_depth)
    assert drafter.tables is not None
    previous = trees.previous_tokens(drafter.tables.previous_tokens(slots))
    rows = slots.repeat_interleave(trees.tokens.shape[1])
    tokens = trees.tokens.flatten()
    logits = target[tokens.clamp(min=0).long()]
    drafter.tables.observe(rows, tokens, previous.flatten(), logits)
    drafter.on_verified(slots, trees, verified)
    return trees, verified


def answers(
    drafter: RsdDrafter, rounds: int, sampled: torch.Tensor, length: int = 2, **given: Any
) -> torch.Tensor:
    """The first tokens of the answers, `[rounds * B, length]`, all after the same root."""
    count = len(sampled)
    slots, found, seeds = torch.arange(count), [], Seeds(torch.device("cpu"))
    assert drafter.tables is not None
    for _ in range(rounds):
        for slot in range(count):
            drafter.tables.start(slot, [ROOT])
        written = torch.full((count, length + drafter.max_depth + 1), -1)
        lengths, roots = torch.zeros_like(slots), torch.full((count,), ROOT, dtype=torch.int32)
        while int(lengths.min()) < length:
            _, verified = step(
                drafter, slots, roots, lengths, seeds.of([None] * count), sampled, **given
            )
            columns = lengths[:, None] + torch.arange(verified.emitted.shape[1])
            fits = (verified.emitted >= 0) & (columns < written.shape[1])
            rows = slots[:, None].expand_as(columns)
            written[rows[fits], columns[fits]] = verified.emitted[fits].long()
            lengths = lengths + verified.num_emitted
            roots = verified.emitted.gather(1, verified.num_emitted.long()[:, None] - 1)[:, 0]
        drafter.release(slots.tolist())
        found.append(written[:, :length])
    return torch.cat(found)


def p_value(pairs: torch.Tensor) -> float:
    target, _ = models()
    found = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).double()
    law = (target[ROOT][:, None] * target).double().flatten()
    law *= len(pairs) / law.sum()
    assert float(found[law == 0].sum()) == 0
    often = law >= 5
    found, law = (torch.cat([each[often], each[~often].sum()[None]]) for each in (found, law))
    kept = law > 0
    return float(chisquare(found[kept].numpy(), law[kept].numpy()).pvalue)


def hits(drafter: RsdDrafter) -> dict[str, int]:
    return {row["source"]: row["hit"] for row in drafter.acceptance()["sources"]}


@pytest.mark.parametrize("tree", [TREE, "branch:2-2", "beam:1x3", "branch:3"])
@pytest.mark.parametrize("size", [None, 4])
def test_the_output_is_distributed_as_the_targets(tree: str, size: int | None) -> None:
    """Trees that are cut begin with the sampled nodes, so tables' nodes are verified without."""
    drafter = drafter_of(tree=tree)
    drafter.allocate(REQUESTS, 64)
    pairs = answers(drafter, ROUNDS, torch.ones(REQUESTS).bool(), size=size)
    assert p_value(pairs) > 1e-3
    accepted = hits(drafter)
    assert sum(hit for source, hit in accepted.items() if "draft model" in source) > REQUESTS
    if size is None:
        assert accepted["tables"] > REQUESTS


SHAPES = (TreeShape(2, 2, 10), NO_DRAFTS, NO_DRAFTS, TreeShape(1, 1, 2), TreeShape(3, 1, 6))
"""What is chosen in turn with `tree=auto`; the tables draft alone in two of five steps."""


def planned_drafter(*shapes: TreeShape) -> RsdDrafter:
    """A drafter that follows shapes, and whose tables draft 7 tokens alone, or none."""
    drafter = drafter_of(tree="auto", tables={"prime": False, "memory": 0})
    drafter.allocate(REQUESTS, 64)
    drafter.profile(lambda tokens: 0.01, 200)
    assert isinstance(drafter.tables, DynamicTreeDrafter)
    budget = drafter.tables._budget
    assert budget is not None
    planner, sizes = budget.planner, cycle([TreeChoice(7), TreeChoice(0)])
    planner.should_skip_drafting = lambda *_: False  # type: ignore[method-assign]
    planner.choose_best_first = lambda *_, **__: next(sizes)  # type: ignore[method-assign]
    drafter._budget = ScriptedBudget.of(*shapes)
    return drafter


def test_shapes_that_change_and_tables_that_draft_alone_leave_the_distribution() -> None:
    drafter = planned_drafter(*SHAPES)
    alone: list[tuple[int, int]] = []
    propose = drafter.propose_without_model

    def noted(slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        trees = propose(slots, roots)
        alone.append((trees.tokens.shape[1] - 1, int((trees.tokens[:, 1:] >= 0).sum())))
        return trees

    with patch.object(drafter, "propose_without_model", noted):
        pairs = answers(drafter, ROUNDS, torch.ones(REQUESTS).bool())
    assert p_value(pairs) > 1e-3
    assert {width for width, _ in alone} == {0, 7}
    assert sum(nodes for _, nodes in alone) > 7 * REQUESTS
    accepted = hits(drafter)
    assert sum(hit for source, hit in accepted.items() if "draft model" in source) > REQUESTS
    assert accepted["tables"] > REQUESTS


def test_a_fault_in_shapes_that_change_is_found() -> None:
    drafter = planned_drafter(TreeShape(2, 2, 10), TreeShape(2, 2, 10), NO_DRAFTS)
    pairs = answers(drafter, ROUNDS, torch.ones(REQUESTS).bool(), fault=True)
    assert p_value(pairs) < 1e-6


def test_a_planted_fault_is_found() -> None:
    drafter = drafter_of()
    drafter.allocate(REQUESTS, 64)
    pairs = answers(drafter, ROUNDS, torch.ones(REQUESTS).bool(), fault=True)
    assert p_value(pairs) < 1e-6


@pytest.mark.parametrize("planned", [False, True])
def test_requests_that_are_not_sampled_get_the_most_likely_tokens(planned: bool) -> None:
    drafter, target = planned_drafter(*SHAPES) if planned else drafter_of(), models()[0]
    if not planned:
        drafter.allocate(8, 64)
    sampled = torch.arange(8) % 2 == 0
    found = answers(drafter, 4, sampled, length=12).view(4, 8, 12)
    token, expected = ROOT, []
    for _ in range(12):
        token = int(target[token].argmax())
        expected.append(token)
    assert found[:, 1::2].tolist() == [[expected] * 4] * 4
    assert hits(drafter)["tables"] > 0


def test_sampled_trees_begin_with_all_that_was_sampled() -> None:
    """Those of greedy requests have their best nodes first, whose they are."""
    drafter = drafter_of(tree="branch:3-1")
    drafter.allocate(64, 64)
    answers(drafter, 6, torch.arange(64) % 2 == 0)
    assert drafter.tables is not None
    for slot in range(64):
        drafter.tables.start(slot, [ROOT])
    slots, sampled = torch.arange(64), torch.arange(64) % 2 == 0
    _, draft = models()
    drawn_trees: list[DraftTree] = []

    def forward(trees: DraftTree, first: int) -> torch.Tensor:
        drawn_trees.append(trees)
        return draft[trees.tokens[:, first:].clamp(min=0).long()]

    roots = torch.full((64,), ROOT, dtype=torch.int32)
    trees, drawn = drafter.propose(slots, roots, slots, slots, sampled, forward)
    trees.check(12, by_depth=False)
    assert drawn.columns is not None
    assert drawn.columns[sampled, :7].tolist() == [[*range(7)]] * 32
    assert (drawn.columns[sampled, 7:] == -1).all()
    assert (trees.tokens[sampled, 7:] >= 0).any()
    first = drawn_trees[-2].tokens
    assert torch.equal(trees.tokens[sampled, : first.shape[1]], first[sampled])
    assert (drawn.columns[~sampled, 1:7] == -1).any()
    # The draft model has read the trees as they are verified.
    assert torch.equal(drawn_trees[-1].tokens, trees.tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"tables": True},
        {"tables": {"sharing": "request"}},
        {"tables": {"nodes": 40}, "tree": "branch:3-2-1"},
        {"tables": {"memory": 0, "nodes": 1}, "tree": "beam:1x3"},
        {"tables": True, "tree": "auto"},
        {"tables": {"max_nodes": 9}, "tree": "auto"},
    ],
    ids=str,
)
def test_the_drafter_passes(options: dict[str, Any]) -> None:
    given = {"prime": False}
    tables = given if options["tables"] is True else {**options["tables"], **given}
    assert check_method(METHOD, {"model": "draft", **options, "tables": tables}) > 50


class Text:
    """A target whose next token follows from the last two, and a draft model that often errs."""

    vocab = 40

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        shape = self.vocab, self.vocab, self.vocab
        self.target = 3 * torch.randn(shape, generator=generator)
        self.draft = (self.target + 2.5 * torch.randn(shape, generator=generator)).softmax(-1)


def steps_needed(drafter: Any, length: int) -> int:
    """The steps in which greedy answers of a length are decoded, one request after the other."""
    text, steps, slots = Text(), 0, torch.tensor([0])
    tables = drafter.tables if isinstance(drafter, DraftModelDrafter) else drafter
    drafter.allocate(1, 2 * length)
    for start in range(12):
        answer = [start % 6, 7]
        if tables is not None:
            tables.start(0, answer)
        while len(answer) < length:
            roots, previous = torch.tensor(answer[-1:], dtype=torch.int32), answer[-2]

            def read(trees: DraftTree, first: int, table: torch.Tensor) -> torch.Tensor:
                before = trees.previous_tokens(torch.tensor([previous], dtype=torch.int32))  # noqa: B023
                given = before[:, first:].clamp(min=0), trees.tokens[:, first:].clamp(min=0)
                return table[given[0].long(), given[1].long()]

            if isinstance(drafter, DraftModelDrafter):
                numbers = torch.tensor([1])
                trees, _ = drafter.propose(
                    *(slots, roots, numbers, numbers, torch.tensor([False])),
                    lambda trees, first: read(trees, first, text.draft),
                )
            else:
                trees = drafter.propose(slots, roots)
            logits = read(trees, 0, text.target)
            best = logits.argmax(-1)

            def draw(nodes: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
                return best.gather(1, nodes.long()[:, None])[:, 0].int()  # noqa: B023

            verified = verify_sampled(trees, draw, drafter.max_depth)
            if tables is not None:
                before = trees.previous_tokens(tables.previous_tokens(slots)).flatten()
                rows = slots.expand(trees.tokens.shape[1])
                tables.observe(rows, trees.tokens.flatten(), before, logits[0])
            drafter.on_verified(slots, trees, verified)
            answer += [token for token in verified.emitted[0].tolist() if token >= 0]
            steps += 1
        drafter.release([0])
    return steps


def test_with_tables_more_is_accepted_than_from_either_alone() -> None:
    """Trees are equally large."""
    target = target_of(Text.vocab)
    recycling = TOKEN_RECYCLING.parse({"nodes": 12, "prime": False})
    alone = steps_needed(TOKEN_RECYCLING.drafter(recycling, target), 60)
    without = {"model": "draft", "tree": "beam:3x4"}
    sampled = steps_needed(METHOD.drafter(METHOD.parse(without), target), 60)
    given = METHOD.parse(
        {"model": "draft", "tree": "beam:2x3", "tables": {"nodes": 6, "prime": False}}
    )
    assert given.num_draft_tokens == 12
    both = steps_needed(METHOD.drafter(given, target), 60)
    assert both < min(alone, sampled), (both, alone, sampled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": "yes"}, "tables='yes': use true, false, or an object"),
        ({"tables": {"max_nodes": 8}}, "max_nodes is not used, as RSD's tree decides: leave it"),
        ({"tables": {"nodes": "auto"}}, "nodes=auto .*use a number"),
        ({"tables": {"memory": -1}}, "memory=-1"),
        ({"tables": {"tabels": 1}}, "no option 'tabels'"),
        ({"tables": {"nodes": 8}, "tree": "auto"}, "nodes is not used, as tree=auto decides: le"),
        ({"tables": {"max_nodes": 300}, "tree": "auto"}, "max_nodes=300"),
        ({"tables": True, "verify": "traversal"}, "verify=traversal .*leave verify out"),
        ({"tables": True, "tree": "auto", "verify": "traversal"}, "verify=traversal .*leave ver"),
        ({"tables": {"nodes": 250}}, "nodes=250 of tables are more than 255"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHOD.parse({"model": "any", **options})


def test_trees_have_as_many_nodes_more_as_tables_say() -> None:
    alone = METHOD.parse({"model": "any"})
    assert METHOD.parse({"model": "any", "tables": False}) == alone
    assert METHOD.parse({"model": "any", "tables": True}).num_draft_tokens == 15 + 8
    more = METHOD.parse({"model": "any", "tables": {"nodes": 30}})
    assert more.num_draft_tokens == 15 + 30
    assert more.depth > alone.depth


def test_tree_auto_has_up_to_as_many_nodes_of_tables_as_of_the_draft_model() -> None:
    alone = METHOD.parse({"model": "any", "tree": "auto"})
    shared = METHOD.parse({"model": "any", "tree": "auto", "tables": True})
    for beam, both in zip(alone.shapes, shared.shapes, strict=True):
        assert both == replace(beam, nodes=beam.nodes + min(beam.nodes, 8))
    assert METHOD.parse({"model": "any", "tree": "auto", "tables": False}) == alone


def test_tree_auto_is_refused_with_tables_on_a_gpu() -> None:
    given = METHOD.parse({"model": "any", "tables": True, "tree": "auto"})
    with pytest.raises(ValueError, match=r"tree=auto with tables .*give tree another value"):
        METHOD.drafter(given, replace(target_of(), device=torch.device("cuda")))


def test_texts_are_remembered_with_tables_alone() -> None:
    texts = torch.arange(8, dtype=torch.int32)
    with pytest.raises(ValueError, match="add tables=true"):
        drafter_of(tables=False).remember(texts)
    drafter = drafter_of()
    drafter.remember(texts)
    assert isinstance(drafter.tables, DynamicTreeDrafter)
    assert drafter.tables.tables.memory.text()[:8].tolist() == texts.tolist()
