"""More cases of `bench_kernels.py`: masks, KV compaction, sampling of trees, and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from dense_attention import dense
from engine_attention import causal_kernels
from kernel_cases import VOCAB, Case, Work, budget_tree, grid, int32, parents_of
from torch import Tensor
from torch.nn import functional as F
from tree_kernels import (
    cpu_attention,
    full_mask,
    kept_trees,
    kv_move,
    layer_parts,
    layer_rows,
    mask,
    mask_rows,
    merge,
    rejection,
    scheduled_trees,
    token_info,
    token_tree,
    traversal,
    tree_attention,
)
from tree_kernels.attention_prefix import Prefix
from tree_kernels.paged_trees import PagedTrees

from drafttree.tree import StaticTree


def _of_parents(
    ours: Callable[[Tensor, Tensor], Tensor], reference: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Work]:
    """The `make` of a case whose kernel takes parents and tree sizes."""

    def make(requests: int, tree_size: int) -> Work:
        given = parents_of(budget_tree(tree_size), requests)
        size = sum(tensor.nbytes for tensor in (*given, ours(*given)))
        return Work(lambda: (ours(*given),), lambda: (reference(*given),), size)

    return make


def _full_mask(requests: int, tree_size: int, context: int) -> Work:
    masks = mask.tree_mask(*parents_of(budget_tree(tree_size), requests))
    contexts = torch.full((requests,), context) - torch.arange(requests)
    size = masks.numel() + tree_size * int(contexts.sum())
    return Work(
        lambda: (full_mask.full_mask(masks, contexts, size),),
        lambda: (full_mask._full_mask_reference(masks, contexts, size),),
        masks.nbytes + contexts.nbytes + size,
    )


def _mask_rows(requests: int, tree_size: int) -> Work:
    parents, counts = parents_of(budget_tree(tree_size), requests)
    masks, starts = mask.tree_mask(parents, counts), torch.arange(requests) * tree_size
    shape = 2, requests * tree_size, -(-tree_size // 32)
    mine, other = torch.zeros(shape, dtype=torch.int32).unbind()

    def ours() -> tuple[Tensor]:
        mask_rows.mask_rows(masks, starts, counts, mine)
        return (mine,)

    def reference() -> tuple[Tensor]:
        mask_rows._mask_rows_reference(masks, starts, counts, other)
        return (other,)

    return Work(ours, reference, masks.nbytes + starts.nbytes + counts.nbytes + mine.nbytes)


def _scheduled_trees(requests: int, tree_size: int) -> Work:
    parents, counts = parents_of(budget_tree(tree_size), requests)
    total = requests * tree_size
    rows, indices = torch.arange(requests).int(), torch.arange(total)
    ends = (torch.arange(requests + 1) * tree_size).int()
    lengths, prompts = torch.full_like(rows, 500), torch.full_like(rows, 100)
    inputs = torch.randint(0, VOCAB, (total,)).int()
    mine, other = parents.clone(), parents.clone()

    def run(kept: Tensor, lay_out: Any, tokens: Any, roots: Any, keep: Any) -> list[Tensor]:
        positions = indices.clone()
        layout = lay_out(rows, ends, lengths, prompts, kept, indices, positions, tree_size)
        read = tokens(inputs, ends, layout, layout.parents, rows)
        last, following = roots(inputs, rows, counts)
        drafts = keep(kept, rows, read.nodes, layout.parents, last)
        return [positions, *layout, *read, following, drafts]

    def ours() -> list[Tensor]:
        return run(
            mine,
            scheduled_trees.lay_out,
            scheduled_trees.node_tokens,
            kept_trees.next_roots,
            kept_trees.keep_trees,
        )

    def lay_out_reference(*given: Any) -> scheduled_trees.Layout:
        *tensors, width = given
        layout = scheduled_trees.Layout.empty(requests, width, total, rows.device)
        scheduled_trees._lay_out_reference(*tensors, layout)
        return layout

    def reference() -> list[Tensor]:
        return run(
            other,
            lay_out_reference,
            scheduled_trees._tokens_reference,
            kept_trees._roots_reference,
            kept_trees._keep_reference,
        )

    given = parents, rows, indices, ends, lengths, inputs
    return Work(ours, reference, sum(each.nbytes for each in (*given, *ours())))


def _token_table(vocab: int, hot: int) -> tuple[Tensor, Tensor, Tensor]:
    """The table, the rows and the hot tokens as `token_info_top` takes them."""
    table = torch.randn(hot, hot, dtype=torch.bfloat16)
    hot_tokens = torch.randperm(vocab)[:hot].int()
    row_of = torch.full((vocab,), -1, dtype=torch.int32)
    row_of[hot_tokens.long()] = torch.arange(hot, dtype=torch.int32)
    return table, row_of, hot_tokens


def _token_info(requests: int, width: int, vocab: int, hot: int, k: int) -> Work:
    logits = torch.randn(requests, vocab, dtype=torch.bfloat16)
    table, row_of, hot_tokens = _token_table(vocab, hot)
    tokens = hot_tokens[torch.randint(0, hot, (requests, width))]
    given = logits, tokens, table, row_of, hot_tokens, k
    rows = tokens.numel()
    moved = logits.nbytes + hot_tokens.nbytes + rows * (hot * table.element_size() + 8 + 8 * k)
    return Work(
        lambda: token_info.token_info_top(*given),
        lambda: token_info._token_info_reference(*given),
        moved,
    )


def _token_tree(requests: int, steps: int, width: int, vocab: int, hot: int) -> Work:
    logits = torch.randn(requests, steps, vocab, dtype=torch.bfloat16)
    table, row_of, hot_tokens = _token_table(vocab, hot)
    roots, valid = hot_tokens[:requests], torch.full((requests,), steps)
    given = logits, valid, roots, table, row_of, hot_tokens, width
    rows = requests * (1 + (steps - 1) * width)
    moved = logits.nbytes + hot_tokens.nbytes + rows * (hot * table.element_size() + 12 * width)
    return Work(
        lambda: token_tree.expand_token_trees(*given)[2:],
        lambda: token_tree._expand_reference(*given)[2:],
        moved,
    )


def _layer_parts(rows: int, heads: int, kv_heads: int, head_size: int, gates: int) -> Work:
    x, added = torch.randn(2, rows, heads * head_size)
    weight, gate_up = torch.rand(heads * head_size), torch.randn(rows, 2 * gates)
    states = torch.randn(rows, (heads + 2 * kv_heads) * head_size)
    angles = torch.randn(2, 512, head_size)
    positions = torch.randint(0, 512, (rows,))
    of_norm, of_rotation = (x, added, weight, 1e-5), (states, angles, positions, heads, kv_heads)

    def ours() -> Sequence[Tensor]:
        parts = *layer_parts.add_norm(*of_norm), *layer_parts.rotate(*of_rotation)
        return (*parts, layer_parts.gate(gate_up))

    def reference() -> Sequence[Tensor]:
        normed = layer_parts._add_norm_reference(*of_norm)
        rotated = layer_parts._rotate_reference(*of_rotation)
        return (*normed, *rotated, layer_parts._gate_reference(gate_up))

    read = 2 * x.nbytes + weight.nbytes + gate_up.nbytes + 2 * states.nbytes
    # The angles of each row's position, both results of the norm, and the gated half.
    moved = read + 2 * rows * head_size * 4 + 2 * x.nbytes + gate_up.nbytes // 2
    return Work(ours, reference, moved)


def _merge(requests: int, tree_size: int) -> Work:
    # Ranks serve as tokens, so that the trees share nodes.
    trees = [budget_tree(tree_size), StaticTree.from_budget(tree_size - 1, (0.4, 0.3, 0.3))]
    first, second = (
        (int32(tree.ranks).repeat(requests, 1), *parents_of(tree, requests)) for tree in trees
    )
    depth = max(tree.depth for tree in trees)
    return Work(
        lambda: merge.merge_trees(first, second, depth),
        lambda: merge._merge_reference(first, second, depth),
        4 * requests * (2 * 2 * tree_size + 2 * (2 * tree_size - 1) + 3),
    )


def _layer_rows(requests: int, tree_size: int) -> Work:
    sizes = torch.full((requests,), tree_size, dtype=torch.int32)
    starts = torch.arange(0, requests * tree_size + 1, tree_size, dtype=torch.int32)
    path = torch.arange(0, min(tree_size, 8), 2, dtype=torch.int32).repeat(requests, 1)
    rows = requests * tree_size
    tokens = torch.arange(rows, dtype=torch.int32)
    given = tokens, torch.arange(rows), starts, sizes, path, path + 1
    return Work(
        lambda: layer_rows.rows_to_read(*given),
        lambda: layer_rows._rows_reference(*given),
        sum(each.nbytes for each in given) + rows * 20 + requests * 8,
    )


def _reject(requests: int, vocab: int, children: int) -> Work:
    def filtered(logits: Tensor) -> Tensor:
        best, ids = logits.topk(50)
        return torch.zeros_like(logits).scatter_(1, ids, best.softmax(1))

    logits = 2 * torch.randn(requests, vocab)
    target, draft = filtered(logits), filtered(logits + torch.randn_like(logits) / 2)
    rows = torch.arange(requests)
    drawn = torch.multinomial(draft, children).int()
    given = target, draft, rows, rows, drawn, torch.rand(requests, children + 1)
    return Work(
        lambda: rejection.reject_step(*given),
        lambda: rejection._reject_reference(*given),
        target.nbytes + draft.nbytes + requests * (16 + 4 * (2 * children + 3)),
    )


def _traverse(requests: int, vocab: int, width: int) -> Work:
    """Beams: the nodes of a level are the children of the level's first node above."""
    tree_size = 1 + 5 * width
    column = torch.arange(tree_size)
    parents = ((column - 1) // width - 1).clamp(min=0) * width + 1
    parents[: width + 1] = 0
    parents[0] = -1
    logits = 2 * torch.randn(requests * tree_size, vocab)
    target, draft = logits.softmax(1), (logits + torch.randn_like(logits) / 2).softmax(1)
    rows = torch.arange(requests * tree_size).view(requests, tree_size)
    drawn = torch.multinomial(draft, width).view(requests, tree_size, width)
    tokens = torch.zeros(requests, tree_size, dtype=torch.int64)
    tokens[:, 1:] = drawn[:, parents[1:], (column[1:] - 1) % width]
    given = (
        *(draft, rows, rows.masked_fill(column > tree_size - 1 - width, -1), tokens.int()),
        *(parents.int().repeat(requests, 1), torch.rand(requests, tree_size)),
    )
    return Work(
        lambda: (traversal.traverse_trees(target.clone(), *given),),
        lambda: (traversal._traverse_reference(target, *given),),
        3 * target.nbytes + draft.nbytes + requests * tree_size * 32,
    )


def _paged(requests: int, length: int, page: int) -> tuple[Tensor, int]:
    """Scattered pages of each request, `int32 [B, P]`, and the number of all pages."""
    pages = -(-length // page)
    return torch.randperm(requests * pages).int().view(requests, pages), requests * pages


def trees_over_pages(
    requests: int, tree_size: int, context: int, heads: int, kv_heads: int, head_size: int
) -> tuple[Tensor, ...]:
    """The arguments of `tree_attention` up to the masks, for a tree of each request."""
    page, dtype, length = 16, torch.bfloat16, context + tree_size
    table, pages = _paged(requests, length, page)
    cache = torch.randn(2, pages, page, kv_heads, head_size, dtype=dtype)
    query = torch.randn(requests * tree_size, heads, head_size, dtype=dtype)
    parents, counts = parents_of(budget_tree(tree_size), requests)
    masks = torch.zeros(requests * tree_size, -(-tree_size // 32), dtype=torch.int32)
    mask_rows.mask_rows(
        mask.tree_mask(parents, counts), torch.arange(requests) * tree_size, counts, masks
    )
    return (
        *(query, *cache.unbind(), table, tree_size * torch.arange(requests + 1).int()),
        *(int32([length] * requests), int32([0] * requests), masks),
    )


def _attention(
    requests: int, tree_size: int, context: int, heads: int, kv_heads: int, head_size: int
) -> Work:
    shape, length = (heads, kv_heads), context + tree_size
    given = trees_over_pages(requests, tree_size, context, *shape, head_size)
    query, keys, values, table, *_, masks = given
    scale, other = head_size**-0.5, torch.empty_like(query)

    def reference() -> tuple[Tensor]:
        tree_attention._tree_attention_reference(*given, scale, tree_size, other)
        return (other,)

    kv = 2 * requests * length * kv_heads * head_size * query.element_size()
    return Work(
        lambda: (tree_attention.tree_attention(*given, scale, tree_size),),
        reference,
        kv + 2 * query.nbytes + table.nbytes + masks.nbytes,
        dense(requests, tree_size, context, shape, head_size, query.dtype)
        | causal_kernels(query, keys, values, *given[3:6], (tree_size, length)),
    )


def _attention_after_flash(
    requests: int, tree_size: int, context: int, heads: int, kv_heads: int, head_size: int
) -> Work:
    """The tree's own part, merged with what flash attention has said about the context."""
    given = trees_over_pages(requests, tree_size, context, heads, kv_heads, head_size)
    query, *_, masks = given
    before, scale = torch.randn_like(query), head_size**-0.5
    prefix = Prefix(int32([context] * requests), 5 + torch.randn(heads, len(query)))
    mine, other = before.clone(), before.clone()

    def ours() -> tuple[Tensor]:
        # Further calls merge with what the last one has written, which takes the same time.
        tree_attention.tree_attention(*given, scale, tree_size, mine, prefix=prefix)
        return (mine,)

    def reference() -> tuple[Tensor]:
        tree_attention._tree_attention_reference(*given, scale, tree_size, other, prefix=prefix)
        return (other,)

    kv = 2 * requests * tree_size * kv_heads * head_size * query.element_size()
    moved = kv + 3 * query.nbytes + prefix.log_sums.nbytes + masks.nbytes
    return Work(ours, reference, moved)


def _cpu_attention(
    requests: int,
    tree_size: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    tiles: bool = False,
) -> Work:
    page, length = 128, context + tree_size
    dtype = torch.bfloat16 if tiles else torch.float32
    blocks, pages = _paged(requests, length, page)
    trees = PagedTrees(
        starts=torch.arange(requests) * tree_size,
        tree_sizes=torch.full((requests,), tree_size),
        lengths=torch.full((requests,), length),
        blocks=blocks,
        masks=mask.tree_mask(*parents_of(budget_tree(tree_size), requests)),
    )
    of_keys, of_values = (head_size, page), (page, head_size)
    if tiles:
        of_keys, of_values = (
            (rows // 16, columns // 2, 16, 2)
            for rows, columns in ((page, head_size), (head_size, page))
        )
    keys, values = (
        torch.randn(pages, kv_heads, *shape).to(dtype) for shape in (of_keys, of_values)
    )
    query = torch.randn(requests * tree_size, heads, head_size).to(dtype)

    layer = cpu_attention.TreeAttention(heads, kv_heads, head_size, page, dtype, tiles=tiles)
    mine, other = torch.empty_like(query), torch.empty_like(query)
    given, scale = (trees, query, keys, values), head_size**-0.5

    def ours() -> tuple[Tensor]:
        layer(*given, mine, scale)
        return (mine,)

    def reference() -> tuple[Tensor]:
        cpu_attention._attend_reference(layer, *given, other, scale)
        return (other,)

    kv = 2 * requests * length * kv_heads * head_size * dtype.itemsize
    return Work(
        ours,
        reference,
        kv + 2 * query.nbytes + blocks.nbytes + trees.masks.nbytes,
        dense(requests, tree_size, context, (heads, kv_heads), head_size, dtype),
    )


def _kv_move(requests: int, layers: int, heads: int, head_size: int, moves: int) -> Work:
    width, page = 81, 16
    pages = -(-width // page)
    shape = requests * pages, heads, page, head_size
    mine = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(layers)]
    other = [cache.clone() for cache in mine]
    slots = torch.arange(requests)[:, None] * pages * page + torch.arange(width)
    below = 1 + torch.rand(requests, width - 1).argsort(1)[:, :moves].sort(1).values
    path = F.pad(below, (1, 0)).int()
    mover, plain = kv_move.KvMover(mine), kv_move.KvMover(other)

    def ours() -> Sequence[Tensor]:
        mover(slots, path)
        return mine

    def reference() -> Sequence[Tensor]:
        kv_move._move_reference(plain, slots, path)
        return other

    rows = layers * requests * moves * heads
    return Work(ours, reference, 2 * rows * head_size * 2 + slots.nbytes + path.nbytes)


_BATCHES = (1, 8, 64)
_TREES = grid(requests=_BATCHES, tree_size=(81,))
_QUICK = {"requests": 2, "tree_size": 21}
_QUICK_ATTENTION = {**_QUICK, "context": 64, "heads": 4, "kv_heads": 2, "head_size": 64}
_GPU = ("cuda",)

CASES: dict[str, Case] = {
    "kv_move": Case(
        _kv_move,
        grid(requests=_BATCHES, layers=(32,), heads=(8,), head_size=(128,), moves=(7,)),
        {"requests": 2, "layers": 2, "heads": 2, "head_size": 16, "moves": 3},
    ),
    "depths": Case(_of_parents(mask.depths, mask.depths_reference), _TREES, _QUICK),
    "tree_mask": Case(_of_parents(mask.tree_mask, mask._tree_mask_reference), _TREES, _QUICK),
    "full_mask": Case(
        _full_mask,
        grid(requests=_BATCHES, tree_size=(81,), context=(256, 4096)),
        {**_QUICK, "context": 64},
        _GPU,
    ),
    "mask_rows": Case(_mask_rows, _TREES, _QUICK, _GPU),
    "scheduled_trees": Case(_scheduled_trees, _TREES, _QUICK),
    "token_info": Case(
        _token_info,
        grid(requests=_BATCHES, width=(12,), vocab=(49152, VOCAB), hot=(8192,), k=(4,)),
        {"requests": 2, "width": 21, "vocab": 1000, "hot": 64, "k": 4},
        _GPU,
        tolerance=1e-4,
    ),
    "token_tree": Case(
        _token_tree,
        grid(requests=_BATCHES, steps=(3,), width=(4,), vocab=(49152,), hot=(8192,)),
        {"requests": 2, "steps": 3, "width": 4, "vocab": 1000, "hot": 64},
        ("cpu",),
        tolerance=1e-4,
    ),
    "layer_parts": Case(
        _layer_parts,
        grid(rows=(1, 8, 512), heads=(9,), kv_heads=(3,), head_size=(64,), gates=(1536,)),
        {"rows": 3, "heads": 3, "kv_heads": 1, "head_size": 16, "gates": 40},
        ("cpu",),
        tolerance=1e-4,
    ),
    "layer_rows": Case(_layer_rows, _TREES, _QUICK, _GPU),
    "merge": Case(_merge, grid(requests=_BATCHES, tree_size=(13, 81)), _QUICK),
    "rejection": Case(
        _reject,
        grid(requests=_BATCHES, vocab=(49152, VOCAB), children=(4,)),
        {"requests": 2, "vocab": 1000, "children": 3},
    ),
    "traversal": Case(
        _traverse,
        grid(requests=_BATCHES, vocab=(49152,), width=(3,)),
        {"requests": 2, "vocab": 1000, "width": 2},
    ),
    "tree_attention": Case(
        _attention,
        grid(
            requests=(1, 8),
            tree_size=(81,),
            context=(256, 1024, 4096, 16384),
            heads=(32,),
            kv_heads=(8,),
            head_size=(128,),
        ),
        _QUICK_ATTENTION,
        _GPU,
        tolerance=2e-2,
    ),
    "tree_attention_after_flash": Case(
        _attention_after_flash,
        grid(
            requests=(1, 8),
            tree_size=(81,),
            context=(4096,),
            heads=(32,),
            kv_heads=(8,),
            head_size=(128,),
        ),
        _QUICK_ATTENTION,
        _GPU,
        tolerance=2e-2,
    ),
    "cpu_attention": Case(
        _cpu_attention,
        grid(
            requests=(1, 8),
            tree_size=(81,),
            context=(256, 1024, 4096),
            heads=(9,),
            kv_heads=(3,),
            head_size=(64,),
        ),
        _QUICK_ATTENTION,
        ("cpu",),
        tolerance=1e-4,
    ),
    "cpu_attention_tiles": Case(
        _cpu_attention,
        grid(
            requests=(1, 8),
            tree_size=(10, 81),
            context=(256, 1024),
            heads=(9,),
            kv_heads=(3,),
            head_size=(64,),
            tiles=(True,),
        ),
        {**_QUICK_ATTENTION, "tiles": True},
        ("cpu",),
        tolerance=2e-2,
    ),
}
