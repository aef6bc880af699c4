"""The ablations and variants of Token Recycling that `ablate_recycling.py` measures.

All are the package's drafters, or these with one change. They draft for one request at a time.
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
"""`(vocab_size, num_draft_tokens) -> drafter`."""


@dataclass(frozen=True)
class Setting:
    """One way of drafting.

    Attributes:
        make: Makes the drafter.
        cold: Whether everything learned is forgotten before each request.
        bigrams: Whether the prompt's bigrams move to the front of their rows.
        prompt_logits: Whether the target's logits at all prompt positions are observed, instead of
            only the last.
        order: Order of the prompts.
        fits: Whether the setting has a tree with a given number of draft tokens.
        primed: Whether the matrix starts primed.
    """

    make: Make
    cold: bool = False
    bigrams: bool = False
    prompt_logits: bool = False
    order: Order = "file"
    fits: Callable[[int], bool] = lambda nodes: True
    primed: bool = False


class MatrixOnly(Tables):
    """Tables that only learn in the adjacency matrix, not in the bigram table."""

    def learn(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        return recycle(self.matrix, tokens, logits)[:, 0]


class WithoutNgrams(DynamicTreeDrafter):
    """Dynamic trees without n-gram matches: the index stays empty."""

    def extend(self, slots: Tensor, tokens: Tensor) -> None:
        super().extend(slots, tokens)
        self._ngrams.index.fill_(-1)


class FixedPriors(DynamicTreeDrafter):
    """Dynamic trees without acceptance statistics: the priors stay fixed."""

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        self.extend(slots, verified.emitted)


class FixedTopology(DynamicTreeDrafter):
    """Dynamic trees' candidates, ranked by prior, on the topology of a static tree."""

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
    """If a token occurs twice in a tree, the first writes its row (the paper's figure 3c)."""

    def observe(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        return (
            super().observe(*(each.flip(0) for each in (slots, tokens, previous, logits))).flip(0)
        )


class Merged(StaticTreeDrafter):
    """If a token repeats, a random occurrence writes each rank, as the paper's race may do."""

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
    """Mixin that only learns at accepted nodes."""

    def observe(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        self._seen = slots, tokens, previous, logits
        return top_candidates(logits, 1)[:, 0]

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        path = verified.path[0][verified.path[0] >= 0].long()
        drafter: Any = super()
        drafter.observe(*(each[path] for each in self._seen))
        drafter.on_verified(slots, trees, verified)


class AcceptedOnlyStatic(AcceptedOnly, StaticTreeDrafter):
    """Static trees that only learn at accepted nodes."""


class AcceptedOnlyGrown(AcceptedOnly, DynamicTreeDrafter):
    """Dynamic trees that only learn at accepted nodes."""


def budget_tree(nodes: int, depth: int) -> StaticTree:
    """The `nodes` nodes of highest path probability among those of depth up to `depth`."""
    # Ties go to the shallower node, then to the lower ranks.
    level: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    paths = []
    for _ in range(depth):
        # At most `nodes` nodes of a level can be among the `nodes` best of all.
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
    tables = _tables(vocab, MatrixOnly, bigrams=False)
    return DynamicTreeDrafter(tables, nodes, auto=False, private=False)


def _private(vocab: int, nodes: int) -> DynamicTreeDrafter:
    return DynamicTreeDrafter(_tables(vocab), nodes, auto=False, private=True)


def _fixed_mask(vocab: int, nodes: int) -> FixedTopology:
    return FixedTopology(_tables(vocab), _paper_tree(nodes))


def _paper_tree(nodes: int, k: int = CANDIDATES) -> StaticTree:
    return RecycleOptions(tree="static", nodes=nodes, k=k).topology


def _fits_rows_of(k: int, nodes: int) -> bool:
    return k > 1 or nodes <= MAX_DEPTH


def _fits_depth(depth: int, nodes: int) -> bool:
    fullest = sum(CANDIDATES ** (level + 1) for level in range(depth))
    return nodes <= fullest and budget_tree(nodes, depth).depth == depth


BALANCED = {15: (3, 2, 1), 80: (5, 3, 2, 1)}
"""Branching factors of balanced trees, by number of draft tokens."""

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
    "grown without copies": Setting(partial(_grown, WithoutNgrams)),
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
    """Move each token of a text to the front of its previous token's row, and of the row of its two
    previous tokens if bigrams are kept; later occurrences in the text win."""
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
