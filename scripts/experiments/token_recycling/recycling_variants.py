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
from tree_kernels.candidates import TOP, find_candidates, find_rows
from tree_kernels.copies import Pointers, find_copies, follow
from tree_kernels.ngrams import LONGEST
from tree_kernels.root_matches import root_matches
from tree_kernels.selection import best_nodes

from drafttree.tree import MAX_DEPTH, DraftTree, StaticTree, Verified
from recycle_plugin import DynamicTreeDrafter, RecycleOptions, StaticTreeDrafter, Tables
from recycle_plugin.config import CANDIDATES
from recycle_plugin.priors import ROW_PRIORS

CPU = torch.device("cpu")

MEMORY = 1 << 20
"""Tokens of finished answers that dynamic drafters remember, as by default."""
SPINE = 56
"""Further draft tokens of `WithSpine`."""
SPINE_SCORE = 0.3
"""Their least acceptance probability."""

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
        prompt_bigrams: Whether the prompt's bigrams move to the front of their rows.
        prompt_logits: Whether the target's logits at all prompt positions are observed, instead of
            only the last.
        order: Order of the prompts.
        fits: Whether the setting has a tree with a given number of draft tokens.
        primed: Whether the matrix starts primed.
    """

    make: Make
    cold: bool = False
    prompt_bigrams: bool = False
    prompt_logits: bool = False
    order: Order = "file"
    fits: Callable[[int], bool] = lambda num_draft_tokens: True
    primed: bool = False


class MatrixOnly(Tables):
    """Tables that only learn in the adjacency matrix, not in the bigram table."""

    def learn(self, slots: Tensor, tokens: Tensor, previous: Tensor, logits: Tensor) -> Tensor:
        return recycle(self.matrix, tokens, logits)[:, 0]


class WithoutNgrams(DynamicTreeDrafter):
    """Dynamic trees without n-gram matches: the index stays empty."""

    def start(self, slot: int, text: Sequence[int]) -> None:
        super().start(slot, text)
        self._texts.ngrams.index.zero_()

    def _append(self, slots: Tensor, tokens: Tensor) -> None:
        super()._append(slots, tokens)
        self._texts.ngrams.index.zero_()


class WithSpine(DynamicTreeDrafter):
    """Dynamic trees with up to `SPINE` further draft tokens that are likely to be accepted."""

    def __init__(self, tables: Tables, num_draft_tokens: int, *, auto: bool, private: bool) -> None:
        super().__init__(tables, num_draft_tokens + SPINE, auto=auto, private=private)

    def propose(self, slots: Tensor, roots: Tensor) -> DraftTree:
        base = self._num_draft_tokens - SPINE
        expanded = self._expand(slots, roots)
        tokens, parents, _, tree_size = best_nodes(
            expanded, base, SPINE, SPINE_SCORE, into=(self._sources, slots)
        )
        return DraftTree(tokens, parents, tree_size)


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
        ngrams, priors = self._texts.ngrams, self.tables.source_stats.priors
        candidates = self.tables.candidates(ngrams, len(roots))
        places = ngrams.lengths[slots].long()[:, None] + torch.arange(-LONGEST, 0)
        suffix = ngrams.history[slots[:, None], places.clamp(min=0)]
        suffix = suffix.masked_fill(places < 0, -1)[:, None]
        pointers = Pointers(*root_matches(ngrams, candidates.memory, slots)[:, None].unbind(-1))
        tokens, sources, first = roots[:, None], torch.zeros(1, 1, dtype=torch.int32), 0
        for level, (start, end) in enumerate(pairwise(self._level_ends)):
            copies = find_copies(ngrams, candidates.memory, slots, suffix, pointers, level)
            offered, source = find_candidates(find_rows(candidates, slots, suffix), copies)
            score = priors[source].masked_fill(offered < 0, -1)
            best = score.sort(dim=-1, descending=True, stable=True).indices[..., :TOP]
            above, rank = self._parents[start:end] - first, self._ranks[start:end]
            token = offered.gather(-1, best)[:, above, rank]
            ring = len(candidates.memory.tokens)
            pointers = follow(copies, pointers, above.expand_as(token), token, ring)
            suffix = torch.cat((suffix[:, above, 1:], token[..., None]), -1)
            suffix = suffix.masked_fill(token[..., None] < 0, -1)
            tokens = torch.cat((tokens, token.int()), 1)
            sources = torch.cat((sources, source.gather(-1, best)[:, above, rank].int()), 1)
            first = start
        self._sources[slots, : sources.shape[1]] = sources
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


class AcceptedOnlyDynamic(AcceptedOnly, DynamicTreeDrafter):
    """Dynamic trees that only learn at accepted nodes."""


def budget_tree(num_draft_tokens: int, depth: int) -> StaticTree:
    """The draft tokens of highest path probability among those of depth up to `depth`."""
    # Ties go to the shallower node, then to the lower ranks.
    level: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    paths = []
    for _ in range(depth):
        # At most `num_draft_tokens` nodes of a level can be among the best of all.
        level = nsmallest(
            num_draft_tokens,
            (
                (score * prior, deep + 1, (*path, rank))
                for score, deep, path in level
                for rank, prior in enumerate(ROW_PRIORS)
            ),
        )
        paths += level
    return StaticTree.from_paths(path for _, _, path in nsmallest(num_draft_tokens, paths))


def _tables(
    vocab: int, kind: type[Tables] = Tables, *, bigrams: bool = True, memory: int = MEMORY
) -> Tables:
    return kind(vocab, CANDIDATES, CPU, bigrams=bigrams, hot_start=True, memory=memory)


def _make_static(
    kind: type[StaticTreeDrafter],
    vocab: int,
    num_draft_tokens: int,
    tree: Callable[[int], StaticTree],
) -> StaticTreeDrafter:
    return kind(_tables(vocab, bigrams=False, memory=0), tree(num_draft_tokens))


def _of_rank(k: int, vocab: int, num_draft_tokens: int) -> StaticTreeDrafter:
    tables = Tables(vocab, k, CPU, bigrams=False, hot_start=True)
    return StaticTreeDrafter(tables, _paper_tree(num_draft_tokens, k))


def _make_dynamic(
    kind: type[DynamicTreeDrafter], vocab: int, num_draft_tokens: int, memory: int = MEMORY
) -> DynamicTreeDrafter:
    tables = _tables(vocab, memory=memory)
    return kind(tables, num_draft_tokens, auto=False, private=False)


def _rows_only(vocab: int, num_draft_tokens: int) -> DynamicTreeDrafter:
    tables = _tables(vocab, MatrixOnly, bigrams=False)
    return DynamicTreeDrafter(tables, num_draft_tokens, auto=False, private=False)


def _private(vocab: int, num_draft_tokens: int) -> DynamicTreeDrafter:
    tables = _tables(vocab, memory=0)
    return DynamicTreeDrafter(tables, num_draft_tokens, auto=False, private=True)


def _fixed_mask(vocab: int, num_draft_tokens: int) -> FixedTopology:
    return FixedTopology(_tables(vocab), _paper_tree(num_draft_tokens))


def _paper_tree(num_draft_tokens: int, k: int = CANDIDATES) -> StaticTree:
    return RecycleOptions(tree="static", nodes=num_draft_tokens, k=k).topology


def _fits_rows_of(k: int, num_draft_tokens: int) -> bool:
    return k > 1 or num_draft_tokens <= MAX_DEPTH


def _fits_depth(depth: int, num_draft_tokens: int) -> bool:
    fullest = sum(CANDIDATES ** (level + 1) for level in range(depth))
    return num_draft_tokens <= fullest and budget_tree(num_draft_tokens, depth).depth == depth


BALANCED = {15: (3, 2, 1), 80: (5, 3, 2, 1)}
"""Branching factors of balanced trees, by number of draft tokens."""

STATIC = Setting(partial(_make_static, StaticTreeDrafter, tree=_paper_tree))
DYNAMIC = Setting(partial(_make_dynamic, DynamicTreeDrafter))

_FAMILIES = {"static": STATIC, "dynamic": DYNAMIC}

_ORDERS: dict[str, Order] = {"by category": "category", "shuffled": "shuffled"}


def _static(
    kind: type[StaticTreeDrafter], tree: Callable[[int], StaticTree] = _paper_tree
) -> Setting:
    return replace(STATIC, make=partial(_make_static, kind, tree=tree))


def _of_depth(depth: int) -> Setting:
    setting = _static(StaticTreeDrafter, partial(budget_tree, depth=depth))
    return replace(setting, fits=partial(_fits_depth, depth))


SETTINGS: dict[str, Setting] = {
    **_FAMILIES,
    **{f"{name} cold": replace(family, cold=True) for name, family in _FAMILIES.items()},
    "dynamic private": Setting(_private),
    "dynamic without bigram table": Setting(_rows_only),
    "dynamic without n-gram matches": Setting(partial(_make_dynamic, WithoutNgrams)),
    "dynamic without memory": Setting(partial(_make_dynamic, DynamicTreeDrafter, memory=0)),
    "dynamic with a spine": Setting(partial(_make_dynamic, WithSpine)),
    "dynamic with fixed priors": Setting(partial(_make_dynamic, FixedPriors)),
    "dynamic on a fixed mask": Setting(_fixed_mask),
    **{
        f"{name} with {' and '.join(what)}": replace(
            family, prompt_bigrams="prompt bigrams" in what, prompt_logits="prompt logits" in what
        )
        for name, family in _FAMILIES.items()
        for what in (["prompt bigrams"], ["prompt logits"], ["prompt bigrams", "prompt logits"])
    },
    "static accepted only": _static(AcceptedOnlyStatic),
    "dynamic accepted only": Setting(partial(_make_dynamic, AcceptedOnlyDynamic)),
    **{
        f"static k={k}": replace(STATIC, make=partial(_of_rank, k), fits=partial(_fits_rows_of, k))
        for k in (1, 2, 4, 6)
    },
    "static balanced": replace(
        _static(StaticTreeDrafter, lambda size: StaticTree.from_branching(BALANCED[size])),
        fits=BALANCED.__contains__,
    ),
    **{f"static depth={depth}": _of_depth(depth) for depth in range(2, 9)},
    "static first wins": _static(FirstWins),
    "static merged": _static(Merged),
    **{
        f"{name} {words}": replace(family, order=order)
        for name, family in _FAMILIES.items()
        for words, order in _ORDERS.items()
    },
}
SETTINGS |= {f"{name} primed": replace(each, primed=True) for name, each in SETTINGS.items()}

# Committed results were measured before the settings got these names.
FORMER_NAMES = {
    "paper": "static",
    "grown": "dynamic",
    "without pairs": "without bigram table",
    "without copies": "without n-gram matches",
    "with bigrams": "with prompt bigrams",
}


def current_name(setting: str) -> str:
    """The name of a setting, given its present or former name."""
    for former, name in FORMER_NAMES.items():
        setting = setting.replace(former, name)
    return setting


def move_bigrams(tables: Tables, text: Sequence[int]) -> None:
    """Move each token of a text to the front of its previous token's row, and of the row of its two
    previous tokens if bigrams are kept; later occurrences in the text win."""
    for token, after in pairwise(text):
        _to_front(tables.matrix[token], after)
    bigrams = tables.bigrams
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
