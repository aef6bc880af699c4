"""The cases of `bench_kernels.py`: the sizes of each kernel and the alternatives to it.

Inputs are made on PyTorch's default device. Where a kernel writes in place, both sides have their
own tensors, which start equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tree_kernels import (
    accept,
    adjacency,
    beam,
    bigrams,
    draw,
    expansion,
    gather,
    gumbel_top,
    memory,
    ngrams,
    noise,
    root_matches,
    selection,
    source_stats,
    step_counts,
)
from tree_kernels.bigrams import bigram_cells
from tree_kernels.candidates import NUM_SOURCES, TOP, CandidateTables
from tree_kernels.ngrams import LONGEST, NgramIndex

from drafttree.tree import StaticTree
from recycle_plugin.dynamic import level_width
from recycle_plugin.priors import DEPTH, MAX_DEPTH, expected_priors, tree_depth
from recycle_plugin.tables import BIGRAM_CELLS, OWN_CELLS
from recycle_plugin.texts import cells_of

Size = dict[str, Any]

PRIORS = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02)
VOCAB = 128256
COMMON = 500
"""Number of different tokens in texts and tables, small enough that lookups often succeed."""


@dataclass(frozen=True)
class Work:
    """One size of a kernel.

    Attributes:
        ours: Runs the kernel and returns its results.
        reference: Runs the PyTorch reference and returns its results, which must be the same.
        bytes: Number of bytes that must be read and written, each input and output once.
        others: Other implementations of about the same, by name. Their results are not compared.
    """

    ours: Callable[[], Sequence[Tensor]]
    reference: Callable[[], Sequence[Tensor]]
    bytes: int
    others: dict[str, Callable[[], object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes:
        make: Makes the `Work` of a size, whose values are keyword arguments.
        sizes: The sizes to time.
        quick: A small size for tests.
        devices: Types of devices that have a kernel; others have the reference alone.
        tolerance: Tolerance of floating-point results, relative and absolute.
    """

    make: Callable[..., Work]
    sizes: Sequence[Size]
    quick: Size
    devices: Sequence[str] = ("cuda", "cpu")
    tolerance: float = 0.0


def grid(**values: Sequence[Any]) -> list[Size]:
    """All combinations of the values."""
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def budget_tree(tree_size: int) -> StaticTree:
    """A static tree of `tree_size` nodes, including the root."""
    return StaticTree.from_budget(tree_size - 1, PRIORS)


def int32(values: Sequence[int]) -> Tensor:
    """An int32 tensor on the default device."""
    return torch.tensor(values, dtype=torch.int32)


def parents_of(tree: StaticTree, requests: int) -> tuple[Tensor, Tensor]:
    """Parents `[B, N]` and tree sizes `[B]` of a batch in which all requests have the same tree."""
    parents = int32(tree.parents).repeat(requests, 1)
    return parents, int32([parents.shape[1]] * requests)


def _recycle(rows: int, vocab: int, dtype: str) -> Work:
    logits = torch.randn(rows, vocab, dtype=getattr(torch, dtype))
    tokens = torch.randint(0, vocab, (rows,), dtype=torch.int32)
    mine, other, third = torch.full((3, vocab, TOP), -1, dtype=torch.int32).unbind()

    def reference() -> Sequence[Tensor]:
        return adjacency._recycle_reference(other, tokens, logits), other

    def plain() -> None:
        third.index_put_((tokens.long(),), logits.topk(TOP).indices.int())

    return Work(
        lambda: (adjacency.recycle(mine, tokens, logits), mine),
        reference,
        logits.nbytes + tokens.nbytes + 2 * 4 * rows * TOP,
        {"topk + index_put": plain},
    )


def _draw(rows: int, vocab: int, dtype: str) -> Work:
    logits = torch.randn(rows, vocab, dtype=getattr(torch, dtype))
    temperatures, seed = torch.full((rows,), 0.8), torch.tensor([7])

    def plain() -> Tensor:
        probabilities = (logits.float() / temperatures[:, None]).softmax(1)
        return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(1)

    return Work(
        lambda: (draw.draw_tokens(logits, temperatures, seed),),
        lambda: (draw._draw_reference(logits, temperatures, seed),),
        logits.nbytes + 2 * 4 * rows,
        {"softmax + exponential": plain},
    )


def _uniform(requests: int, count: int) -> Work:
    seeds = torch.randint(1 << 62, (requests,))
    lengths = torch.arange(requests)
    return Work(
        lambda: (noise.uniform_numbers(seeds, lengths, 1, count),),
        lambda: (noise._uniform_reference(seeds, lengths, 1, count),),
        4 * requests * count,
        {"rand": lambda: torch.rand(requests, count, device=seeds.device)},
    )


def _gumbel_top(requests: int, width: int, vocab: int) -> Work:
    probs = torch.randn(requests, width, vocab).softmax(2)
    seeds, lengths = torch.randint(1 << 62, (requests,)), torch.arange(requests)
    draws = torch.ones(requests, dtype=torch.bool)
    given = probs, seeds, lengths, draws, 1, width

    def plain() -> None:
        noise = torch.empty_like(probs).exponential_().log_()
        (probs.log() - noise).topk(width, dim=2)

    return Work(
        lambda: gumbel_top.gumbel_top(*given),
        lambda: gumbel_top._reference(*given),
        probs.nbytes,
        {"exponential + topk": plain},
    )


def _best_children(requests: int, nodes: int, count: int) -> Work:
    given = _beam_level(requests, nodes, count)
    return Work(
        lambda: beam.best_children(*given, nodes),
        lambda: beam._reference(*given, nodes),
        16 * requests * nodes * count,
        {"topk": lambda: given[3].values.flatten(1).topk(nodes, dim=1)},
    )


def _beam_level(
    requests: int, nodes: int, count: int
) -> tuple[Tensor, Tensor, Tensor, gumbel_top.Perturbed]:
    """A level of beams, and the best tokens after each of its nodes."""
    paths = torch.randn(requests, nodes, dtype=torch.float64)
    values = torch.randn(requests, nodes, count).sort(2, descending=True).values
    tokens = torch.randint(VOCAB, values.shape)
    children = gumbel_top.Perturbed(values, tokens, values - 1)
    return paths + 1, paths, torch.ones(requests, dtype=torch.bool), children


def _writing(
    kernel: Callable[..., None], to: Tensor, *given: Tensor
) -> Callable[[], tuple[Tensor]]:
    """A call of a kernel that writes to its first tensor; the call returns that tensor."""

    def call() -> tuple[Tensor]:
        kernel(to, *given)
        return (to,)

    return call


def _bigrams(rows: int) -> Work:
    mine, other = torch.full((2, 1, BIGRAM_CELLS, 2 + TOP), -1, dtype=torch.int32).unbind()
    previous, tokens = torch.randint(0, COMMON, (2, rows), dtype=torch.int32).unbind()
    candidates = torch.randint(0, VOCAB, (rows, TOP), dtype=torch.int32)
    given = torch.zeros(rows, dtype=torch.int64), tokens, previous, candidates

    return Work(
        _writing(bigrams.update_bigrams, mine, *given),
        _writing(bigrams._update_reference, other, *given),
        # The inputs of each row, and the cell that it writes.
        rows * (8 + 2 * 4 * (2 + TOP)),
    )


def _gather(requests: int, tree_size: int) -> Work:
    tree = budget_tree(tree_size)
    matrix = torch.randint(0, VOCAB, (VOCAB, TOP), dtype=torch.int32)
    # Empty rows, so that compaction removes nodes.
    matrix[torch.rand(VOCAB) < 0.2] = -1
    roots = torch.randint(0, VOCAB, (requests,), dtype=torch.int32)
    shape = int32(tree.parents), int32(tree.ranks), tree.level_ends

    def ours() -> Sequence[Tensor]:
        tokens = gather.gather_tree(matrix, roots, *shape)
        return tokens, *gather.compact_tree(tokens, shape[0])

    def reference() -> Sequence[Tensor]:
        tokens = gather._gather_reference(matrix, roots, *shape)
        return tokens, *gather._compact_reference(tokens, shape[0])

    # For each node its cell, its token written and read again, and its cells of the compact tree.
    return Work(ours, reference, requests * (tree_size * 4 * 6 + 8) + tree_size * 8)


def _texts(requests: int, length: int, room: int) -> tuple[NgramIndex, Tensor]:
    cells = cells_of(requests, room)
    index = NgramIndex.of(requests, room, cells, torch.get_default_device())
    tokens = torch.randint(0, COMMON, (requests, length), dtype=torch.int32)
    ngrams.extend_ngrams(index, torch.arange(requests), tokens)
    return index, tokens


def _remembering(texts: Tensor) -> tuple[memory.TextMemory, tuple[Tensor, ...]]:
    """A memory of texts `[P, T]`, and the arguments that append them."""
    requests, length = texts.shape
    remembered = memory.TextMemory.of(1 << 20, texts.device)
    lengths = torch.full((requests,), length, dtype=torch.int32)
    given = texts, lengths, torch.arange(requests), torch.zeros_like(lengths), 0
    memory.append_texts(remembered, *given)
    return remembered, given


def _expanding(requests: int, length: int, num_draft_tokens: int) -> tuple[Any, ...]:
    """The arguments of `expand_trees`."""
    index, tokens = _texts(requests, length, 2 * length)
    matrix = torch.randint(0, COMMON, (VOCAB, TOP), dtype=torch.int32)
    table = torch.full((BIGRAM_CELLS, 2 + TOP), -1, dtype=torch.int32)
    previous, after = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    rows = torch.randint(0, COMMON, (len(after), TOP), dtype=torch.int32)
    table[bigram_cells(previous, after, BIGRAM_CELLS)] = torch.cat(
        (previous[:, None], after[:, None], rows), 1
    )
    own = torch.full((requests, OWN_CELLS, 2 + TOP), -1, dtype=torch.int32)
    priors = expected_priors().to(matrix.device)
    tables = CandidateTables(matrix, table, own, index, _remembering(tokens)[0], priors)
    slots, roots = torch.arange(requests), tokens[:, -1].contiguous()
    spine = tree_depth(num_draft_tokens) - DEPTH
    return tables, slots, roots, level_width(num_draft_tokens), DEPTH, spine


def _expand(requests: int, length: int, num_draft_tokens: int) -> Work:
    given = _expanding(requests, length, num_draft_tokens)
    spine = given[-1]
    columns = expansion.columns_of(level_width(num_draft_tokens), DEPTH, spine)
    # A node with children reads two rows of the matrix and of each bigram table, and the cells of
    # its suffixes; a node of the spine the same without the suffixes.
    above_last = expansion.columns_of(level_width(num_draft_tokens), DEPTH - 1, spine)
    each = 4 * (above_last * (TOP + 3 * (TOP + 2) + LONGEST) + columns * 4)

    def parts(expanded: expansion.ExpandedTrees) -> Sequence[Tensor]:
        return expanded.tokens, expanded.parents, expanded.sources, expanded.scores

    def reference() -> Sequence[Tensor]:
        trees = expansion.ExpandedTrees.empty(requests, columns, given[0].matrix.device)
        expansion._expand_reference(*given, trees)
        return parts(trees)

    return Work(
        lambda: parts(expansion.expand_trees(*given)),
        reference,
        requests * each,
    )


def _root_matches(requests: int, length: int) -> Work:
    index, tokens = _texts(requests, length, 2 * length)
    remembered, _ = _remembering(tokens)
    slots = torch.arange(requests)
    lookups = LONGEST + 1 + len(memory.MEMORY_NGRAMS)
    return Work(
        lambda: (root_matches.root_matches(index, remembered, slots),),
        lambda: (root_matches._match_reference(index, remembered, slots),),
        4 * requests * lookups * (1 + root_matches.MAX_MATCH),
    )


def _append(requests: int, tokens: int) -> Work:
    texts = torch.randint(0, COMMON, (requests, tokens), dtype=torch.int32)
    (mine, given), (other, _) = _remembering(texts), _remembering(texts)

    def appended(remembered: memory.TextMemory, append: Callable[..., None]) -> Sequence[Tensor]:
        append(remembered, *given)
        return remembered.tokens, remembered.index, remembered.end

    return Work(
        lambda: appended(mine, memory.append_texts),
        lambda: appended(other, memory._append_reference),
        4 * texts.numel() * (2 + len(memory.MEMORY_NGRAMS)),
    )


def _best_nodes(requests: int, length: int, num_draft_tokens: int) -> Work:
    expanded = expansion.expand_trees(*_expanding(requests, length, num_draft_tokens))
    return Work(
        lambda: selection.best_nodes(expanded, num_draft_tokens),
        lambda: selection._best_reference(expanded, num_draft_tokens, 0, 0.0),
        4 * (4 * expanded.tokens.numel() + requests * (3 * (num_draft_tokens + 1) + 1)),
    )


def _followed(tokens: Tensor, parents: Tensor) -> Tensor:
    """The token of one child of each node, `int32 [B, N]`: a target that leads to a leaf."""
    requests, width = tokens.shape
    above = torch.where(parents < 0, width, parents).long()
    target = torch.full((requests, width + 1), -1, dtype=torch.int32)
    return target.scatter_(1, above, tokens)[:, :width].contiguous()


def _walking(requests: int, tree_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """The arguments of `accept_walk`."""
    tree = budget_tree(tree_size)
    parents, counts = parents_of(tree, requests)
    tokens = torch.randint(0, VOCAB, (requests, tree_size), dtype=torch.int32)
    return tokens, parents, counts, _followed(tokens, parents), tree.depth


def _count(requests: int, length: int, num_draft_tokens: int) -> Work:
    expanded = expansion.expand_trees(*_expanding(requests, length, num_draft_tokens))
    tokens, parents, sources, counts = selection.best_nodes(expanded, num_draft_tokens)
    path = accept.accept_walk(tokens, parents, counts, _followed(tokens, parents), MAX_DEPTH)[0]
    priors = expected_priors().to(tokens.device)
    mine, other = source_stats.SourceStats.of(priors), source_stats.SourceStats.of(priors)

    def ours() -> Sequence[Tensor]:
        source_stats.count(mine, tokens, parents, sources, path)
        return mine.tried, mine.hit, mine.priors

    def reference() -> Sequence[Tensor]:
        source_stats._count_reference(other, tokens, parents, sources, path)
        return other.tried, other.hit, other.priors

    return Work(ours, reference, 4 * (3 * tokens.numel() + path.numel() + 4 * NUM_SOURCES))


def _count_step(requests: int, tree_size: int) -> Work:
    tokens, parents, *rest = _walking(requests, tree_size)
    path = accept.accept_walk(tokens, parents, *rest)[0]
    counted = torch.ones(requests, dtype=torch.bool)
    mine, other = torch.zeros(2, len(step_counts.COUNTS), dtype=torch.int64).unbind()
    given = counted, tokens, parents, path

    return Work(
        _writing(step_counts.count_step, mine, *given),
        _writing(step_counts._count_reference, other, *given),
        sum(each.nbytes for each in given) + 2 * mine.nbytes,
    )


def _extend(requests: int, tokens: int) -> Work:
    length = 1024
    mine, _ = _texts(requests, length, length + tokens)
    other = replace(
        mine, history=mine.history.clone(), lengths=mine.lengths.clone(), index=mine.index.clone()
    )
    added = torch.randint(0, COMMON, (requests, tokens), dtype=torch.int32)
    slots = torch.arange(requests)

    def extended(
        texts: NgramIndex, extend: Callable[[NgramIndex, Tensor, Tensor], None]
    ) -> Sequence[Tensor]:
        # Reset the end of the text each time, as it would fill up otherwise.
        texts.lengths.fill_(length)
        extend(texts, slots, added)
        return texts.history, texts.lengths, texts.index

    return Work(
        lambda: extended(mine, ngrams.extend_ngrams),
        lambda: extended(other, ngrams._extend_reference),
        4 * added.numel() * (2 + LONGEST) + requests * 16,
    )


def _accept_walk(requests: int, tree_size: int) -> Work:
    given = _walking(requests, tree_size)
    depth = given[-1]
    return Work(
        lambda: accept.accept_walk(*given),
        lambda: accept._walk_reference(*given),
        4 * requests * (3 * tree_size + 2 * (depth + 1) + 2),
    )


def _accept_step(requests: int, tree_size: int) -> Work:
    parents, counts = parents_of(budget_tree(tree_size), requests)
    tokens = torch.randint(0, VOCAB, (requests, tree_size), dtype=torch.int32)
    roots = torch.zeros(requests, dtype=torch.int32)
    given = tokens, parents, counts, roots, tokens[:, 1].contiguous()
    return Work(
        lambda: (accept.accept_step(*given),),
        lambda: (accept._step_reference(*given),),
        4 * requests * (2 * tree_size + 4),
    )


_BATCHES = (1, 8, 64)
_DYNAMIC = grid(requests=_BATCHES, length=(1024,), num_draft_tokens=(80,))
_DYNAMIC_QUICK = {"requests": 2, "length": 64, "num_draft_tokens": 20}
_TREES = grid(requests=_BATCHES, tree_size=(81,))
_TREES_QUICK = {"requests": 2, "tree_size": 21}

CASES: dict[str, Case] = {
    "recycle": Case(
        _recycle,
        grid(
            rows=(81, 324, 648, 2000), vocab=(49152, VOCAB, 262144), dtype=("bfloat16", "float32")
        ),
        {"rows": 9, "vocab": 5000, "dtype": "bfloat16"},
    ),
    "draw": Case(
        _draw,
        grid(rows=(81, 324, 1296), vocab=(VOCAB,), dtype=("bfloat16", "float32")),
        {"rows": 9, "vocab": 5000, "dtype": "bfloat16"},
        devices=("cuda",),
    ),
    "update_bigrams": Case(_bigrams, grid(rows=(81, 324, 648, 2000)), {"rows": 9}),
    "uniform_numbers": Case(
        _uniform,
        grid(requests=_BATCHES, count=(3 * VOCAB,)),
        {"requests": 2, "count": 5000},
    ),
    "gumbel_top": Case(
        _gumbel_top,
        grid(requests=_BATCHES, width=(3,), vocab=(VOCAB,)),
        {"requests": 2, "width": 3, "vocab": 5000},
        tolerance=2e-5,
        devices=("cuda",),
    ),
    "best_children": Case(
        _best_children,
        grid(requests=_BATCHES, nodes=(5,), count=(5,)),
        {"requests": 2, "nodes": 3, "count": 3},
        tolerance=1e-9,
        devices=("cuda",),
    ),
    "gather": Case(_gather, _TREES, _TREES_QUICK),
    "root_matches": Case(
        _root_matches, grid(requests=_BATCHES, length=(1024,)), {"requests": 2, "length": 64}
    ),
    "expand_trees": Case(_expand, _DYNAMIC, _DYNAMIC_QUICK),
    "best_nodes": Case(_best_nodes, _DYNAMIC, _DYNAMIC_QUICK),
    "count": Case(_count, _DYNAMIC, _DYNAMIC_QUICK),
    "count_step": Case(_count_step, _TREES, _TREES_QUICK),
    "extend_ngrams": Case(
        _extend, grid(requests=_BATCHES, tokens=(7, 2048)), {"requests": 2, "tokens": 7}
    ),
    "append_texts": Case(
        _append, grid(requests=(1, 8), tokens=(128, 2048)), {"requests": 2, "tokens": 30}
    ),
    "accept_walk": Case(_accept_walk, _TREES, _TREES_QUICK),
    "accept_step": Case(_accept_step, _TREES, _TREES_QUICK),
}
"""Drafting and verification; the other kernels are in `kernel_cases_target`."""
