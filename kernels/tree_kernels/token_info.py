"""Token-info sampling of one level (Lyanna, section 4.2, algorithm 1).

All nodes of a request share the logits of the step. A node's token adds a row of the token-info
table to the logits of the hot (frequent) tokens, and the most likely tokens become its children.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import Op
from tree_kernels._running_top import keep_largest, no_keys
from tree_kernels._triton import jit, next_power_of_2, tl
from tree_kernels.adjacency import top_reference

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_SCALE = tl.constexpr(2.0**120) if tl is not None else None
_BLOCK = 1024


@jit
def _token_info_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    table: tl.tensor,
    row_of: tl.tensor,
    best_tokens: tl.tensor,
    best_log_probs: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    hot: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """Find the top tokens in one pass over the vocabulary; one program per node. Keys are as in
    `_running_top`."""
    node = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + node)
    row = tl.load(row_of + tl.maximum(token, 0)).to(tl.int64)
    row = tl.where(token >= 0, row, -1)
    line = logits + (node // width) * stride
    slots = tl.arange(0, K_PAD)
    best = no_keys(slots)
    most = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        inside = ids < vocab
        values = tl.load(line + ids, mask=inside, other=float("-inf")).to(tl.float32)
        column = tl.load(row_of + ids, mask=inside, other=-1)
        added_to = column >= tl.where(row >= 0, 0, hot)
        added = tl.load(table + tl.maximum(row, 0) * hot + column, mask=added_to, other=0)
        if BYTES:
            # Move sign, exponent and mantissa to their places in float32: not all GPUs have FP8.
            byte = added.to(tl.int32)
            bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
            values += bits.to(tl.float32, bitcast=True) * _FLOAT8_SCALE
        else:
            values += added.to(tl.float32)
        higher = tl.maximum(most, tl.max(values, 0))
        # There is no mass to scale before the first finite value.
        kept = tl.where(most == float("-inf"), 0.0, tl.exp(most - higher))
        mass = mass * kept + tl.sum(
            tl.where(values == float("-inf"), 0.0, tl.exp(values - higher)), 0
        )
        most = higher
        best = keep_largest(best, values, ids, vocab)
    place = tl.sum((best[None, :] > best[:, None]).to(tl.int32), 1)
    order = (best >> 32).to(tl.int32)
    value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    at = node * K + place
    found = tl.where(token >= 0, 0x7FFFFFFF - best.to(tl.int32), -1)
    tl.store(best_tokens + at, found, mask=place < K)
    log_prob = tl.where(token >= 0, value - most - tl.log(mass), float("-inf"))
    tl.store(best_log_probs + at, log_prob, mask=place < K)


def _token_info_triton(
    logits: Tensor, tokens: Tensor, table: Tensor, row_of: Tensor, hot_tokens: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    requests, width = tokens.shape
    best = torch.empty((requests, width, k), dtype=torch.int32, device=logits.device)
    log_probs = torch.empty_like(best, dtype=torch.float32)
    # The logits of one step of several are not copied.
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if best.numel():
        _token_info_kernel[(requests * width,)](
            *(logits, tokens.contiguous()),
            *(table.view(torch.uint8) if table.dtype == FLOAT8 else table, row_of),
            *(best, log_probs),
            *(width, logits.stride(0), logits.shape[1], len(hot_tokens)),
            K=k,
            K_PAD=next_power_of_2(k),
            BLOCK=_BLOCK,
            BYTES=table.dtype == FLOAT8,
        )
    return best, log_probs


def _token_info_reference(
    logits: Tensor, tokens: Tensor, table: Tensor, row_of: Tensor, hot_tokens: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    rows = row_of[tokens.clamp(min=0).long()].long()
    is_hot = (rows >= 0) & (tokens >= 0)
    # PyTorch cannot index FP8 tensors.
    kept = table.view(torch.uint8) if table.dtype == FLOAT8 else table
    added = kept[rows.clamp(min=0)].view(table.dtype).float() * is_hot[..., None]
    whole = logits.float()[:, None].expand(-1, tokens.shape[1], -1)
    whole = whole.index_add(2, hot_tokens.long(), added)
    best = top_reference(whole.flatten(0, 1), k).view(*tokens.shape, k)
    log_probs = whole.gather(2, best.long()) - whole.logsumexp(2, keepdim=True)
    missing = (tokens < 0)[..., None]
    return best.masked_fill(missing, -1), log_probs.masked_fill(missing, -torch.inf)


_TOKEN_INFO_TOP = Op("token_info.token_info_top", _token_info_reference, triton=_token_info_triton)


def token_info_top(
    logits: Tensor, tokens: Tensor, table: Tensor, row_of: Tensor, hot_tokens: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens after each node, and their log-probabilities.

    Args:
        logits: Float32, bfloat16 or float16 `[B, V]`, shared by all nodes of a request.
        tokens: Int32 `[B, n]`, the nodes' own tokens; -1 where there is no node.
        table: `[H, H]` of the logits' type or FP8 (e4m3): row i is added to the hot tokens'
            logits after hot token i.
        row_of: Int32 `[V]`, the row of each token in the table; -1 for cold tokens.
        hot_tokens: Int32 `[H]`, the tokens of the rows.
        k: Number of tokens for each node.

    Returns:
        Tokens, int32 `[B, n, k]`, most likely first, -1 where there is no node; and their
        log-probabilities, float32 `[B, n, k]`, -inf where there is no node.

    Raises:
        ValueError: Shapes do not fit, or k is not between 1 and V.
    """
    hot = len(hot_tokens)
    if (
        logits.dim() != 2
        or tokens.dim() != 2
        or len(tokens) != len(logits)
        or table.shape != (hot, hot)
        or row_of.shape != logits.shape[1:]
        or not 1 <= k <= logits.shape[1]
    ):
        shapes = [[*t.shape] for t in (logits, tokens, table, row_of)]
        raise ValueError(
            f"expected [B, V], [B, n], [{hot}, {hot}], [V] and k from 1 to V, not {shapes}, {k}"
        )
    run = _TOKEN_INFO_TOP.on(logits)
    return run(logits, tokens, table, row_of, hot_tokens, k)
