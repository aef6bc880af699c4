"""Attention over a paged KV cache for prompts, single tokens and draft trees in one launch.

A node of a tree attends to the context before the tree, its ancestors and itself (Token Recycling,
arXiv 2408.08696, section 3.3); every other row is causal. The softmax is computed online, tile by
tile (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels._attention_parts import ones, request_of, tanh
from tree_kernels._dispatch import Op
from tree_kernels._kv_shares import merge_shares, shares_of
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.attention_prefix import Prefix
from tree_kernels.attention_variant import PLAIN, AttentionVariant

_BITS = 32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MIN_LANES = 16  # minimum rows of a matrix product on tensor cores
_MAX_LANES = 64
_QUERY_BYTES = 32768  # shared memory for the queries of a block of rows
_TILE_BYTES = 16384  # shared memory for the keys of a tile


@jit(
    do_not_specialize=(
        *("requests", "request_blocks", "search", "words", "mask_stride"),
        *("log_sums_share_stride", "prefix_log_sums_stride"),
    )
)
def _attend_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    query_starts: tl.tensor,
    lengths: tl.tensor,
    tree_starts: tl.tensor,
    masks: tl.tensor,
    sinks: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    prefix_lengths: tl.tensor,
    prefix_log_sums: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    requests: tl.tensor,
    request_blocks: tl.tensor,
    search: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_page_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_page_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_stride: tl.tensor,
    mask_stride: tl.tensor,
    prefix_log_sums_stride: tl.tensor,
    out_share_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    log_sums_share_stride: tl.tensor,
    log_sums_stride: tl.tensor,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFIX: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Attend; one program per block of rows, KV head and share of the KV.

    A lane is one query head of a row.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    share = tl.program_id(2)
    if search != 0:
        request = request_of(query_starts, requests, block, BLOCK_ROWS)
        block -= tl.load(query_starts + request) // BLOCK_ROWS + request
    else:
        request = block // request_blocks
        block = block % request_blocks
    start = tl.load(query_starts + request)
    rows = tl.load(query_starts + request + 1) - start
    if block * BLOCK_ROWS >= rows:
        return
    length = tl.load(lengths + request)
    tree = tl.load(tree_starts + request)
    context = length - rows
    root = context + tree

    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, HEAD_PAD)
    row = block * BLOCK_ROWS + lanes // GROUP
    there = (lanes < BLOCK_ROWS * GROUP) & (row < rows)
    line = (start + row).to(tl.int64)
    head = kv_head * GROUP + lanes % GROUP
    cells = there[:, None] & (dims < HEAD_SIZE)[None, :]
    queries = query + line * query_stride + head * query_head_stride
    q = tl.load(queries[:, None] + dims[None, :], mask=cells, other=0.0)
    if SCALED:
        scale *= tl.load(key_scale)
    position = context + row
    in_tree = there & (row >= tree)

    # All rows of the block attend to every token before `clear`, and none from `end` on.
    last = tl.minimum(block * BLOCK_ROWS + BLOCK_ROWS, rows) - 1
    end = tl.where(last >= tree, length, context + last + 1)
    tree_lines = masks + line * mask_stride
    oldest = 0
    if PREFIX:
        oldest = tl.load(prefix_lengths + request)
    if WINDOW > 0:
        # Pages before the window of the block's first row belong to the request no more.
        oldest = tl.maximum(tl.minimum(context + block * BLOCK_ROWS, root) - WINDOW + 1, 0)
        # A node's position follows from its depth, the number of its ancestors.
        depth = tl.zeros([LANES], tl.int32) - 1
        for word_at in range(words):
            depth += ones(tl.load(tree_lines + word_at, mask=in_tree, other=0))
        hidden_to = tl.where(in_tree, root + depth, position) - WINDOW
    clear = tl.minimum(context + block * BLOCK_ROWS + 1, root) - oldest
    clear = oldest + tl.maximum(clear, 0) // TILE * TILE
    size = tl.cdiv(tl.cdiv(end - oldest, TILE), tl.num_programs(2)) * TILE
    begin = oldest + share * size
    end = tl.minimum(begin + size, end)
    clear = tl.minimum(tl.maximum(clear, begin), end)
    if WINDOW > 0:
        clear = begin

    highest = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    if SINKS:
        # A sink counts as a token of the first share.
        sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * 1.4426950409
        highest = tl.where(share == 0, sink, highest)
        total = tl.where(share == 0, total + 1.0, total)
    weighted = tl.zeros([LANES, HEAD_PAD], tl.float32)
    if PREFIX:
        # The prefix counts as a token: its log-sum is the score, and attention to it the value.
        log_sum = tl.load(
            prefix_log_sums + head * prefix_log_sums_stride + line, mask=there, other=float("-inf")
        )
        # Of no tokens it is -inf, or inf in some versions of flash attention.
        log_sum = tl.where(log_sum < float("inf"), log_sum * 1.4426950409, float("-inf"))
        known = cells & (log_sum > float("-inf"))[:, None]
        places = out + line * out_stride + head * out_head_stride
        before = tl.load(places[:, None] + dims[None, :], mask=known, other=0.0)
        sunk = highest
        highest = tl.maximum(sunk, log_sum)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(log_sum - level)
        total = total * tl.exp2(sunk - level) + weight
        weighted = before.to(tl.float32) * weight[:, None]
    pages = table + request.to(tl.int64) * table_stride
    key_head = keys + kv_head * key_head_stride
    value_head = values + kv_head * value_head_stride
    for masked in tl.static_range(2):
        for first in range(clear if masked else begin, end if masked else clear, TILE):
            tokens = first + tl.arange(0, TILE)
            inside = tokens < end
            page = tl.load(pages + tokens // PAGE, mask=inside, other=0).to(tl.int64)
            slot = tokens % PAGE
            # Slots after the last token may contain anything, even NaN, and 0 * NaN is not 0.
            loaded = inside[:, None] & (dims < HEAD_SIZE)[None, :]
            at = key_head + page * key_page_stride + slot * key_slot_stride
            key = tl.load(at[:, None] + dims[None, :], mask=loaded, other=0.0)
            if SCALED:
                key = key.to(q.dtype)
            scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
            if SOFT_CAP:
                scores = soft_cap * tanh(scores)
            if masked:
                node = tl.maximum(tokens - root, 0)
                is_node = (tokens >= root) & inside & (node // 32 < words)
                word = tl.load(
                    tree_lines[:, None] + (node // 32)[None, :],
                    mask=in_tree[:, None] & is_node[None, :],
                    other=0,
                )
                in_mask = (word >> (node % 32)[None, :]) & 1
                seen = tl.where(
                    in_tree[:, None],
                    (tokens < root)[None, :] | (in_mask != 0),
                    tokens[None, :] <= position[:, None],
                )
                if WINDOW > 0:
                    place = tokens
                    if words * 32 > WINDOW:
                        # A tree may be deeper than the window.
                        depth_of = tl.zeros([TILE], tl.int32) - 1
                        node_lines = masks + (start + tree + node).to(tl.int64) * mask_stride
                        for word_at in range(words):
                            depth_of += ones(tl.load(node_lines + word_at, mask=is_node, other=0))
                        place = tl.where(is_node, root + depth_of, tokens)
                    seen = seen & (place[None, :] > hidden_to[:, None])
                scores = tl.where(seen & inside[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            # While a row has no visible token, -inf - -inf would be NaN.
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - base[:, None])
            rescale = tl.exp2(highest - base)
            at = value_head + page * value_page_stride + slot * value_slot_stride
            value = tl.load(at[:, None] + dims[None, :], mask=loaded, other=0.0)
            if SCALED:
                value = value.to(q.dtype)
            total = total * rescale + tl.sum(weights, 1)
            weighted = tl.dot(
                weights.to(value.dtype), value, weighted * rescale[:, None], input_precision="ieee"
            )
            highest = new_highest

    # The result of a row without a visible token is zero.
    attended = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    if SCALED:
        attended *= tl.load(value_scale)
    to = out + share.to(tl.int64) * out_share_stride + line * out_stride + head * out_head_stride
    tl.store(to[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=cells)
    if SPLIT:
        log_sum = highest + tl.log2(tl.where(total == 0.0, 1.0, total))
        to = share.to(tl.int64) * log_sums_share_stride + line * log_sums_stride + head
        tl.store(log_sums + to, log_sum, mask=there)


def _tree_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    tree_starts: Tensor,
    masks: Tensor,
    scale: float,
    max_query: int,
    out: Tensor,
    variant: AttentionVariant = PLAIN,
    prefix: Prefix | None = None,
    shares: int | None = None,
) -> None:
    """`shares`: number of shares of the KV, a power of two; None to choose it."""
    tokens, heads, head_size = query.shape
    requests, pages = block_table.shape
    page, kv_heads = key_cache.shape[1:3]
    if tokens == 0 or requests == 0:
        return
    group = heads // kv_heads
    head_pad = max(next_power_of_2(head_size), _MIN_LANES)
    line_bytes = head_pad * query.element_size()
    most_lanes = min(_MAX_LANES, _QUERY_BYTES // line_bytes)
    lanes = max(
        _MIN_LANES,
        next_power_of_2(group),
        min(next_power_of_2(group * max_query), most_lanes),
    )
    block_rows = lanes // group
    # No search is needed where every request has the same number of blocks.
    request_blocks = -(-max_query // block_rows)
    most_blocks = tokens // block_rows + requests
    search = requests * request_blocks > most_blocks
    blocks = most_blocks if search else requests * request_blocks
    if prefix is not None:
        shares = 1
    if shares is None:
        reach = pages * page
        if variant.window:
            reach = min(reach, variant.window + max_query)
        shares = shares_of(blocks * kv_heads, reach)
    parts = log_sums = out[None]
    if shares > 1:
        parts = query.new_empty(shares, *query.shape, dtype=torch.float32)
        log_sums = query.new_empty(shares, tokens, heads, dtype=torch.float32)
    in_octaves, cap = math.log2(math.e), variant.soft_cap
    sinks = out if variant.sinks is None else variant.sinks
    scales = variant.kv_scales or (out, out)
    before = (lengths, out) if prefix is None else (prefix.lengths, prefix.log_sums)
    _attend_kernel[(blocks, kv_heads, shares)](
        *(query, key_cache, value_cache, block_table, query_starts, lengths, tree_starts, masks),
        *(sinks, *scales, *before, parts, log_sums, requests, request_blocks, int(search)),
        masks.shape[1],
        # The tangent's argument is the score relative to the cap.
        *(scale / cap if cap else scale * in_octaves, cap * in_octaves),
        *(*query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]),
        *(block_table.stride(0), masks.stride(0), before[1].stride(0)),
        *(*parts.stride()[:3], *log_sums.stride()[:2]),
        GROUP=group,
        PAGE=page,
        HEAD_SIZE=head_size,
        HEAD_PAD=head_pad,
        BLOCK_ROWS=block_rows,
        LANES=lanes,
        TILE=max(_MIN_LANES, min(_MAX_LANES, _TILE_BYTES // line_bytes)),
        SPLIT=shares > 1,
        PREFIX=prefix is not None,
        WINDOW=variant.window,
        SOFT_CAP=cap > 0,
        SINKS=variant.sinks is not None,
        # With fewer warps a thread would hold more values than it has registers.
        num_warps=8 if lanes == _MAX_LANES else 4,
        SCALED=variant.kv_scales is not None,
        num_stages=2,
    )
    if shares > 1:
        merge_shares(parts, log_sums, query_starts, out)


def _in_view(rows: int, length: int, tree: int, masks: Tensor, window: int) -> Tensor:
    """The tokens that each row of a request attends to, bool `[rows, length]`."""
    row = torch.arange(rows, device=masks.device)[:, None]
    token = torch.arange(length, device=masks.device)
    node = token - (length - rows + tree)
    # Nodes beyond the last word are not attended to.
    words = F.pad(masks, (0, 1))
    at = node.clamp(0, masks.shape[1] * _BITS)
    in_mask = (words[:, at // _BITS] >> (at % _BITS).int()) & 1
    seen = torch.where(row >= tree, (node < 0) | in_mask.bool(), token <= length - rows + row)
    if window:
        root = length - rows + tree
        depth = (in_mask * (node >= 0)).sum(1, keepdim=True) - 1
        place = torch.where(row >= tree, root + depth, length - rows + row)
        token[max(root, 0) :] = place[tree:, 0]
        seen &= token > place - window
    return seen


def _tree_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    tree_starts: Tensor,
    masks: Tensor,
    scale: float,
    max_query: int,
    out: Tensor,
    variant: AttentionVariant = PLAIN,
    prefix: Prefix | None = None,
) -> None:
    page, kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // kv_heads
    # On a GPU, tolist waits for the device; decode steps there use the Triton kernel.
    before = [0] * len(lengths) if prefix is None else prefix.lengths.tolist()
    for (start, stop), length, tree, first, pages in zip(
        pairwise(query_starts.tolist()),
        lengths.tolist(),
        tree_starts.tolist(),
        before,
        block_table.long(),
        strict=True,
    ):
        used = pages[: -(-length // page)]
        key, value = (
            cache[used].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for cache in (key_cache, value_cache)
        )
        hidden = ~_in_view(stop - start, length, tree, masks[start:stop], variant.window)
        hidden[:, :first] = True
        if variant.kv_scales is not None:
            key, value = key * variant.kv_scales[0], value * variant.kv_scales[1]
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), key) * scale
        log_sums = None if prefix is None else prefix.log_sums[:, start:stop]
        weights, share = variant.weights(scores, hidden, log_sums)
        attended = torch.einsum("hqk,khd->qhd", weights, value)
        if share is not None:
            share = share.mT[..., None]
            # Where there is no prefix, `out` may hold anything.
            attended += share * out[start:stop].float().masked_fill(share == 0, 0.0)
        out[start:stop] = attended.to(out.dtype)


_TREE_ATTENTION = Op(
    "tree_attention.tree_attention", _tree_attention_reference, triton=_tree_attention_triton
)


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    tree_starts: Tensor,
    masks: Tensor,
    max_query: int,
    out: Tensor,
    variant: AttentionVariant,
    prefix: Prefix | None,
) -> None:
    quantised = variant.kv_scales is not None
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        fits = cache.dtype in _FP8 if quantised else cache.dtype == query.dtype
        if not fits or query.dtype not in _DTYPES:
            raise ValueError(
                f"query is {query.dtype} and {name} {cache.dtype}: the query must be in float32, "
                "bfloat16 or float16, and so must the cache, or in FP8 with scales"
            )
    requests = len(block_table)
    if (
        query.dim() != 3
        or key_cache.dim() != 4
        or key_cache.shape != value_cache.shape
        or key_cache.shape[3] != query.shape[2]
        or query.shape[1] % key_cache.shape[2]
        or block_table.dim() != 2
        or query_starts.shape != (requests + 1,)
        or lengths.shape != (requests,)
        or tree_starts.shape != (requests,)
        or masks.dim() != 2
        or len(masks) != len(query)
        or out.shape != query.shape
        or max_query < 1
    ):
        shapes = [
            [*tensor.shape]
            for tensor in (
                *(query, key_cache, value_cache, block_table),
                *(query_starts, lengths, tree_starts, masks, out),
            )
        ]
        raise ValueError(
            "expected [T, H, D], [C, S, K, D] twice, [B, P], [B + 1], [B], [B], [T, W] and "
            f"[T, H, D], H a multiple of K, and rows, not {shapes} and {max_query} rows"
        )
    strided = (query, key_cache, value_cache, block_table, query_starts, lengths, tree_starts)
    if any(tensor.stride(-1) != 1 for tensor in (*strided, masks, out) if tensor.numel()):
        raise ValueError("the last dimension of every tensor must be contiguous")
    if prefix is not None:
        prefix.check(query, requests, variant)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    tree_starts: Tensor,
    masks: Tensor,
    scale: float,
    max_query: int,
    out: Tensor | None = None,
    variant: AttentionVariant = PLAIN,
    prefix: Prefix | None = None,
) -> Tensor:
    """Attend for the rows of a batch, whose keys and values are already in the cache.

    The call does not wait for the device, and its launches depend only on shapes and `max_query`,
    so a CUDA graph of it can be replayed for other lengths and trees.

    Args:
        query: Float32, bfloat16 or float16 `[T, H, D]`, the rows of one request after another.
        key_cache: `[C, S, K, D]` of the query's type, C pages of S tokens. H is a multiple of K,
            and consecutive query heads share a KV head. With scales it is in FP8.
        value_cache: `[C, S, K, D]` of the keys' type; its strides may differ from theirs.
        block_table: Int32 `[B, P]`, the pages of each request in the order of its tokens.
        query_starts: Int32 `[B + 1]`, the first row of each request, and the number of all rows.
        lengths: Int32 `[B]`, the number of tokens of each request in the cache, including those of
            this step, which are the last.
        tree_starts: Int32 `[B]`, the position of the root among the request's rows, which are nodes
            from there on; the request's number of rows if it has no tree. It is negative where the
            first nodes have no row because they are in the cache already, which a window does not
            allow.
        masks: Int32 `[T, W]`: bit j % 32 of word j // 32 says that the row attends to node j of its
            request's tree. Rows before a tree are not read.
        scale: Factor of the attention scores.
        max_query: Upper bound on the number of rows of a request.
        out: `[T, H, D]`, written and returned; None allocates it. Rows after the last request's
            stay unchanged.
        variant: How the attention differs from softmax attention to all tokens. With a window,
            the masks must be those of trees: every node attends to all its ancestors.
        prefix: The first tokens of each request, to which something else has attended already.
            What came of it is in `out`, and is merged with attention to the other tokens. None if
            there is nothing to merge with.

    Returns:
        `[T, H, D]` of the query's type, accumulated in float32; zero for a row that attends to
        nothing.

    Raises:
        ValueError: Shapes, types or strides do not fit, or `prefix` is given without `out`.
    """
    if prefix is not None and out is None:
        raise ValueError("with a prefix, `out` must hold the attention to it")
    if variant.sinks is not None and variant.sinks.shape != query.shape[1:2]:
        raise ValueError(f"{query.shape[1]} heads have sinks of shape {[*variant.sinks.shape]}")
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    paged = (key_cache, value_cache, block_table, query_starts, lengths, tree_starts, masks)
    _check(query, *paged, max_query, out, variant, prefix)
    _TREE_ATTENTION.on(query)(query, *paged, scale, max_query, out, variant, prefix)
    return out
