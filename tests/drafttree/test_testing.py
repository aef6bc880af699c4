"""The conformance test of model-free drafters passes good ones and finds planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttree import (
    MODEL_FREE,
    Drafter,
    DraftTree,
    Method,
    MethodOptions,
    ModelFreeDrafter,
    Target,
    Verified,
)
from drafttree.budget.step_timer import StepTimer
from drafttree.testing import check_drafter, check_method, session
from recycle_plugin import METHOD as TOKEN_RECYCLING

WIDTH, DEPTH = 2, 3
NUM_DRAFT_TOKENS = WIDTH * DEPTH


class TwoChains(ModelFreeDrafter):
    """Drafts what followed the last two occurrences of the root in the request's own text."""

    max_depth = DEPTH

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.tried = self.hit = 0

    def start(self, slot: int, text: Sequence[int]) -> None:
        self.texts[slot] = list(text)

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        for slot, row in zip(slots.tolist(), tokens.tolist(), strict=True):
            self.texts[slot] += [token for token in row if token >= 0]

    def previous_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.texts[slot][-2] for slot in slots.tolist()], dtype=torch.int32)

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        tokens = torch.full((len(slots), 1 + NUM_DRAFT_TOKENS), -1, dtype=torch.int32)
        parents = torch.full_like(tokens, -1)
        for row, (slot, root) in enumerate(zip(slots.tolist(), roots.tolist(), strict=True)):
            text = self.texts[slot]
            chains: dict[int, list[int]] = {}
            for at in range(len(text) - 2, -1, -1):
                if text[at] == root and len(chains) < WIDTH:
                    chains.setdefault(text[at + 1], text[at + 1 : at + 1 + DEPTH])
            column, last = 0, [0] * len(chains)
            for depth in range(DEPTH):
                for number, chain in enumerate(chains.values()):
                    if depth < len(chain):
                        column += 1
                        tokens[row, column], parents[row, column] = chain[depth], last[number]
                        last[number] = column
        tokens[:, 0] = roots
        return DraftTree(tokens, parents, torch.full_like(roots, tokens.shape[1]))

    def observe(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        previous: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor | None:
        return logits.argmax(-1).int()

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        self.tried += int((trees.parents == 0).any(1).sum())
        self.hit += int((verified.num_emitted > 1).sum())
        self.extend(slots, verified.emitted)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.texts[slot]

    def reset(self) -> None:
        self.tried = self.hit = 0

    def acceptance(self) -> dict[str, Any]:
        row = {"source": "text", "tried": self.tried, "hit": self.hit, "share": 1.0}
        return {"sources": [row]}


def check(drafter: ModelFreeDrafter) -> int:
    return check_drafter(drafter, NUM_DRAFT_TOKENS, DEPTH)


def test_a_good_drafter_passes_and_is_accepted() -> None:
    assert check(TwoChains()) > 50


def test_a_drafter_may_omit_everything_optional() -> None:
    class Minimal(ModelFreeDrafter):
        max_depth = DEPTH

        def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
            return DraftTree.of_roots(roots)

    assert check(Minimal()) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 12},
        {"nodes": "auto"},
        {"nodes": 12, "sharing": "request"},
        {"tree": "branch:4-2-1"},
    ],
    ids=str,
)
def test_token_recycling_passes_and_is_accepted(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """For `auto`, forwards of the target alone take time, whatever else the machine does."""
    now = 0.0
    stock = StepTimer.__init__

    def with_clock(self: StepTimer, clock: Callable[[], float], **given: Any) -> None:
        stock(self, lambda: now, **given)

    def forward(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(StepTimer, "__init__", with_clock)
    monkeypatch.setattr(session, "sleep", forward)
    assert check_method(TOKEN_RECYCLING, {"prime": False, **options}) > 50


def with_proposals(change: Callable[[DraftTree], DraftTree]) -> type[ModelFreeDrafter]:
    """A drafter whose proposals are changed before they are returned."""

    class Changed(TwoChains):
        def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
            return change(super().propose(slots, roots))

    return Changed


def too_wide(trees: DraftTree) -> DraftTree:
    tokens, parents = (
        torch.nn.functional.pad(each, (0, 1), value=-1) for each in (trees.tokens, trees.parents)
    )
    return DraftTree(tokens, parents, trees.tree_size + 1)


def children_first(trees: DraftTree) -> DraftTree:
    parents = trees.parents.clone()
    parents[:, 1] = torch.where(trees.tokens[:, 2] >= 0, 2, parents[:, 1])
    return DraftTree(trees.tokens, parents, trees.tree_size)


def without_root(trees: DraftTree) -> DraftTree:
    tokens = trees.tokens.clone()
    tokens[0, 0] = -1
    return DraftTree(tokens, trees.parents, trees.tree_size)


def as_int64(trees: DraftTree) -> DraftTree:
    return DraftTree(trees.tokens.long(), trees.parents, trees.tree_size)


def without_the_last_tree(trees: DraftTree) -> DraftTree:
    return DraftTree(trees.tokens[:-1], trees.parents[:-1], trees.tree_size[:-1])


class TooDeep(TwoChains):
    """Declares a maximum depth that is one less than that of its drafts."""

    max_depth = DEPTH - 1


class SecondBest(TwoChains):
    """Returns the second most likely token of each row in place of the first."""

    def observe(self, *given: torch.Tensor) -> torch.Tensor:
        return given[-1].topk(2).indices[:, 1].int()


class WrongDtype(TwoChains):
    """Returns the argmax as `topk` does, in int64."""

    def observe(self, *given: torch.Tensor) -> torch.Tensor:
        return given[-1].argmax(-1)


class ByRow(TwoChains):
    """Looks up its state by the row in the batch."""

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        return super().propose(torch.arange(len(slots)), roots)


class PreviousByRow(TwoChains):
    """Looks up previous tokens by the row in the batch."""

    def previous_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        return super().previous_tokens(torch.arange(len(slots)))


class KeepsText(TwoChains):
    """Appends a new request's text to that of the last request in its slot."""

    def release(self, slots: Sequence[int]) -> None:
        pass

    def start(self, slot: int, text: Sequence[int]) -> None:
        self.texts[slot] = [*self.texts.get(slot, ()), *text[:-1]]


class KeepsCounts(TwoChains):
    """Does not clear its counts."""

    def reset(self) -> None:
        pass


class Overcounts(TwoChains):
    """Counts more hits than tries."""

    def acceptance(self) -> dict[str, Any]:
        return {"tried": [1], "hit": [2]}


@pytest.mark.parametrize(
    ("faulty", "error", "complaint"),
    [
        (with_proposals(too_wide), ValueError, "7 columns for drafts and at most 6 are declared"),
        (with_proposals(children_first), ValueError, "the parent of column 1 is 2"),
        (with_proposals(without_root), AssertionError, "column 0 must contain the roots"),
        (with_proposals(as_int64), ValueError, "must be int32, not torch.int64"),
        (with_proposals(without_the_last_tree), AssertionError, "3 trees for 4 requests"),
        (TooDeep, AssertionError, "has depth 3, but max_depth=2"),
        (SecondBest, AssertionError, "must return the logits' argmax"),
        (WrongDtype, AssertionError, r"must return int32 .*, not torch.int64"),
        (ByRow, AssertionError, "indexed by its slot, not by its row"),
        (PreviousByRow, AssertionError, "previous_tokens of slot"),
        (KeepsText, AssertionError, "previous_tokens of slot"),
        (KeepsCounts, AssertionError, "reset must clear the acceptance counts"),
        (Overcounts, AssertionError, "hit must not exceed tried"),
    ],
)
def test_planted_faults_are_found(
    faulty: type[ModelFreeDrafter], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        check(faulty())


class Options(MethodOptions):
    """Options of a method that drafts two chains."""

    size: int = NUM_DRAFT_TOKENS
    levels: int = DEPTH

    @property
    def num_draft_tokens(self) -> int:
        return self.size

    @property
    def depth(self) -> int:
        return self.levels


def test_a_kind_of_another_package_is_checked_as_far_as_it_can_be() -> None:
    own = replace(method(drafter=object), kind=replace(MODEL_FREE, name="own", drafter=object))
    assert check_method(own) == 0
    with pytest.raises(AssertionError, match="lower-case identifier"):
        check_method(replace(own, name="Own"))
    drafter = Drafter()
    drafter.max_depth = DEPTH
    with pytest.raises(TypeError, match="derives from none of ModelFreeDrafter"):
        check_drafter(drafter, NUM_DRAFT_TOKENS, DEPTH)


def method(name: str = "two_chains", drafter: Any = TwoChains) -> Method[ModelFreeDrafter]:
    def make_drafter(options: Options, target: Target) -> ModelFreeDrafter:
        made: ModelFreeDrafter = drafter()
        return made

    return Method(
        name=name, title="Two chains", kind=MODEL_FREE, options=Options, make_drafter=make_drafter
    )


def test_a_good_method_passes() -> None:
    assert check_method(method()) > 50


@pytest.mark.parametrize(
    ("declared", "options", "error", "complaint"),
    [
        (method("two-chains"), {}, AssertionError, "lower-case identifier"),
        (method("Chains"), {}, AssertionError, "lower-case identifier"),
        (method(), {"size": 0}, AssertionError, "num_draft_tokens=0 must be at least 1"),
        (method(), {"levels": 7}, AssertionError, "depth=7 must be between 1"),
        (method(), {"levels": 2}, AssertionError, "max_depth=3 must be between 1 and depth=2"),
        (method(), {"width": 2}, ValueError, "has no option 'width'"),
        (method(drafter=object), {}, TypeError, "must return a drafter of its kind"),
    ],
)
def test_wrong_declarations_are_found(
    declared: Method[Any], options: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        check_method(declared, options)
