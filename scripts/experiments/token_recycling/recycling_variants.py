"""Token Recycling without its parts, and in other ways: what `ablate_recycling.py` measures.

All are the product's drafters, or these with one thing changed. They draft for one request at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from tree_kernels.adjacency import recycle, top_candidates, write_rows
from tree_kernels.bigrams import bigram_cells
from tree_kernels.candidates import TOP, find_candidates
from tree_kernels.ngrams import LONGEST

from drafttree.tree import MAX_DEPTH, DraftTree, StaticTree, Verified
from recycle_plugin import DynamicTreeDrafter, RecycleOptions, StaticTreeDrafter, Tables
from recycle_plugin.config import CANDIDATES
from recycle_plugin.priors import ROW_PRIORS

CPU = torch.device("cpu")

TableDrafter = DynamicTreeDrafter | StaticTreeDrafter
Order = Literal["file", "category", "shuffled"]
Make = Callable[[int, int], TableDrafter]
"""`(tokens in the vocabulary, nodes) -> drafter`."""


@dataclass(frozen=True)
class Setting:
    """One way of drafting.

    Attributes:
        cold: everything learnt is forgotten before each request.
        bigrams: the prompt's bigrams move to the front of their rows.
        prompt_logits: the target's logits at all of the prompt are observed, not only at its end.
        order: of the prompts.
        fits: whether there is such a tree of so many nodes.
        primed: the matrix begins with what the target says after each token alone.
    """

    make: Make
    cold: bool = False
    bigrams: bool = False
    prompt_logits: bool = False
    order: Order = "file"
    fits: Callable[[int], bool] = lambda nodes: True
    primed: bool = False


class Rows(Tables):
    """Tables of rows alone: nothing is learnt of pairs."""

    def learn(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        return recycle(self.matrix, tokens, logits)[:, 0]


class WithoutCopies(DynamicTreeDrafter):
    """Never finds what it looks for in the request's text."""

    def extend(self, slots: Tensor, tokens: Tensor) -> None:
        super().extend(slots, tokens)
        self._ngrams.index.fill_(-1)


class FixedPriors(DynamicTreeDrafter):
    """Learns nothing of what candidates are worth."""

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        self.extend(slots, verified.emitted)


class FixedMask(DynamicTreeDrafter):
    """The candidates of grown trees, the best first, on the nodes of a static tree."""

    def __init__(self, tables: Tables, tree: StaticTree) -> None:
        super().__init__(tables, tree.num_draft_tokens, auto=False, private=False)
        self.max_depth = tree.depth
        self._level_ends = tree.level_ends
        self._parents = torch.tensor(tree.parents)
        self._ranks = torch.tensor(tree.ranks)

    def propose(self, slots: Tensor, roots: Tensor) -> DraftTree:
        ngrams, priors = self._ngrams, self.tables.source_stats.priors
        places = ngrams.lengths[slots].long()[:, None] + torch.arange(-LONGEST, 0)
        suffix = ngrams.history[slots[:, None], places.clamp(min=0)]
        suffix = suffix.masked_fill(places < 0, -1)[:, None]
        tokens, sources, first = roots[:, None], torch.zeros(1, 1, dtype=torch.int32), 0
        for start, end in pairwise(self._level_ends):
            offered, source = find_candidates(
                self.tables.matrix, self.tables.bigrams, ngrams, slots, suffix
            )
            score = priors[source].masked_fill(offered < 0, -1)
            best = score.sort(dim=-1, descending=True, stable=True).indices[..., :TOP]
            above, rank = self._parents[start:end] - first, self._ranks[start:end]
            token = offered.gather(-1, best)[:, above, rank]
            suffix = torch.cat((suffix[:, above, 1:], token[..., None]), -1)
            suffix = suffix.masked_fill(token[..., None] < 0, -1)
            tokens = torch.cat((tokens, token.int()), 1)
            sources = torch.cat((sources, source.gather(-1, best)[:, above, rank].int()), 1)
            first = start
        self._sources[slots] = sources
        parents = self._parents.int()[None].masked_fill(tokens < 0, -1)
        return DraftTree(tokens, parents, torch.tensor([tokens.shape[1]], dtype=torch.int32))


class FirstWins(StaticTreeDrafter):
    """Of equal tokens of a tree the first writes the row (the paper's figure 3c)."""

    def observe(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        return (
            super().observe(*(each.flip(0) for each in (slots, tokens, previous, logits))).flip(0)
        )


class Merged(StaticTreeDrafter):
    """Of equal tokens any writes each place of the row, as the paper's race may leave it."""

    def __init__(self, tables: Tables, tree: StaticTree) -> None:
        super().__init__(tables, tree)
        self._generator = torch.Generator().manual_seed(0)

    def observe(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        matrix = self.tables.matrix
        likely = top_candidates(logits, matrix.shape[1])
        for rank in range(matrix.shape[1]):
            order = torch.randperm(len(tokens), generator=self._generator)
            place = slice(rank, rank + 1)
            write_rows(matrix[:, place], tokens[order], likely[order, place])
        return likely[:, 0]


class AcceptedOnly:
    """Learns nothing at nodes that were not accepted."""

    def observe(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        self._seen = slots, tokens, previous, logits
        return top_candidates(logits, 1)[:, 0]

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        path = verified.path[0][verified.path[0] >= 0].long()
        drafter: Any = super()
        drafter.observe(*(each[path] for each in self._seen))
        drafter.on_verified(slots, trees, verified)


class AcceptedOnlyStatic(AcceptedOnly, StaticTreeDrafter):
    """The paper's drafting without what was rejected."""


class AcceptedOnlyGrown(AcceptedOnly, DynamicTreeDrafter):
    """Grown trees without what was rejected."""


def budget_tree(nodes: int, depth: int) -> StaticTree:
    """The `nodes` nodes of highest path probability of those that are no deeper than `depth`."""
    # Of equal scores the less deep come first, then those of lower ranks.
    level: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    paths = []
    for _ in range(depth):
        # No more than `nodes` of a level can be among the best of all.
        level = nsmallest(
            nodes,
            (
                (score * prior, deep + 1, (*path, rank))
                for score, deep, path in level
                for rank, prior in enumerate(ROW_PRIORS)
            ),
        )
        paths += level
    return StaticTree.from_paths(path for _, _, path in nsmallest(nodes, paths))


def _tables(vocab: int, kind: type[Tables] = Tables, *, bigrams: bool = True) -> Tables:
    return kind(vocab, CANDIDATES, CPU, bigrams=bigrams, hot_start=True)


def _static(
    kind: type[StaticTreeDrafter], vocab: int, nodes: int, tree: Callable[[int], StaticTree]
) -> StaticTreeDrafter:
    return kind(_tables(vocab, bigrams=False), tree(nodes))


def _of_rank(k: int, vocab: int, nodes: int) -> StaticTreeDrafter:
    tables = Tables(vocab, k, CPU, bigrams=False, hot_start=True)
    return StaticTreeDrafter(tables, _paper_tree(nodes, k))


def _grown(kind: type[DynamicTreeDrafter], vocab: int, nodes: int) -> DynamicTreeDrafter:
    return kind(_tables(vocab), nodes, auto=False, private=False)


def _rows_only(vocab: int, nodes: int) -> DynamicTreeDrafter:
    tables = _tables(vocab, Rows, bigrams=False)
    return DynamicTreeDrafter(tables, nodes, auto=False, private=False)


def _private(vocab: int, nodes: int) -> DynamicTreeDrafter:
    return DynamicTreeDrafter(_tables(vocab), nodes, auto=False, private=True)


def _fixed_mask(vocab: int, nodes: int) -> FixedMask:
    return FixedMask(_tables(vocab), _paper_tree(nodes))


def _paper_tree(nodes: int, k: int = CANDIDATES) -> StaticTree:
    return RecycleOptions(tree="static", nodes=nodes, k=k).topology


def _fits_rows_of(k: int, nodes: int) -> bool:
    return k > 1 or nodes <= MAX_DEPTH


def _fits_depth(depth: int, nodes: int) -> bool:
    fullest = sum(CANDIDATES ** (level + 1) for level in range(depth))
    return nodes <= fullest and budget_tree(nodes, depth).depth == depth


BALANCED = {15: (3, 2, 1), 80: (5, 3, 2, 1)}
"""Branching factors of trees in which all nodes of a level are alike, by nodes."""

PAPER = Setting(partial(_static, StaticTreeDrafter, tree=_paper_tree))
GROWN = Setting(partial(_grown, DynamicTreeDrafter))

_FAMILIES = {"paper": PAPER, "grown": GROWN}

_ORDERS: dict[str, Order] = {"by category": "category", "shuffled": "shuffled"}


def _paper(
    kind: type[StaticTreeDrafter], tree: Callable[[int], StaticTree] = _paper_tree
) -> Setting:
    return replace(PAPER, make=partial(_static, kind, tree=tree))


def _of_depth(depth: int) -> Setting:
    setting = _paper(StaticTreeDrafter, partial(budget_tree, depth=depth))
    return replace(setting, fits=partial(_fits_depth, depth))


SETTINGS: dict[str, Setting] = {
    **_FAMILIES,
    **{f"{name} cold": replace(family, cold=True) for name, family in _FAMILIES.items()},
    "grown private": Setting(_private),
    "grown without pairs": Setting(_rows_only),
    "grown without copies": Setting(partial(_grown, WithoutCopies)),
    "grown with fixed priors": Setting(partial(_grown, FixedPriors)),
    "grown on a fixed mask": Setting(_fixed_mask),
    **{
        f"{name} with {' and '.join(what)}": replace(
            family, bigrams="bigrams" in what, prompt_logits="prompt logits" in what
        )
        for name, family in _FAMILIES.items()
        for what in (["bigrams"], ["prompt logits"], ["bigrams", "prompt logits"])
    },
    "paper accepted only": _paper(AcceptedOnlyStatic),
    "grown accepted only": Setting(partial(_grown, AcceptedOnlyGrown)),
    **{
        f"paper k={k}": replace(PAPER, make=partial(_of_rank, k), fits=partial(_fits_rows_of, k))
        for k in (1, 2, 4, 6)
    },
    "paper balanced": replace(
        _paper(StaticTreeDrafter, lambda nodes: StaticTree.from_branching(BALANCED[nodes])),
        fits=BALANCED.__contains__,
    ),
    **{f"paper depth={depth}": _of_depth(depth) for depth in range(2, 9)},
    "paper first wins": _paper(FirstWins),
    "paper merged": _paper(Merged),
    **{
        f"{name} {words}": replace(family, order=order)
        for name, family in _FAMILIES.items()
        for words, order in _ORDERS.items()
    },
}
SETTINGS |= {f"{name} primed": replace(each, primed=True) for name, each in SETTINGS.items()}


def move_bigrams(tables: Tables, text: Sequence[int]) -> None:
    """Let each token of a text come first in the row of the one before it, and in the pair's of
    the two before it where pairs are kept; the text's last bigrams win."""
    for token, after in pairwise(text):
        _to_front(tables.matrix[token], after)
    (bigrams,) = tables.bigrams
    if len(bigrams) > 1:
        known = torch.tensor(text)
        cells = bigram_cells(known[:-2], known[1:-1], len(bigrams))
        for cell, bigram, after in zip(cells, known.unfold(0, 2, 1), text[2:], strict=False):
            row = bigrams[cell]
            if not torch.equal(row[:2].long(), bigram):
                row[:2], row[2:] = bigram, -1
            _to_front(row[2:], after)


def _to_front(row: Tensor, token: int) -> None:
    others = row[row != token]
    row.copy_(torch.cat((row.new_tensor([token]), others))[: len(row)])
