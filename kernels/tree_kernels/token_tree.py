"""Token-info sampling of whole trees (Lyanna, section 4.2, algorithm 1), without pruning."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels._dispatch import CppFunction, Op
from tree_kernels.token_info import FLOAT8, token_info_top

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    FLOAT8: "float8",
}
_EXPAND = {
    (logits, table): CppFunction(
        "token_tree.cpp", f"expand_{_NAMES[logits]}_{_NAMES[table]}", "ppiiipippiipppi"
    )
    for logits in (torch.float32, torch.bfloat16, torch.float16)
    for table in (logits, FLOAT8)
}


def _expand_reference(
    logits: Tensor,
    steps: Tensor,
    roots: Tensor,
    table: Tensor,
    row_of: Tensor,
    hot_tokens: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    expanded = roots[:, None]
    columns = torch.zeros_like(expanded)
    joint = torch.zeros_like(expanded, dtype=torch.float32)
    tokens, parents, scores = [expanded], [columns - 1], [joint]
    first = 1
    for step in range(logits.shape[1]):
        live = expanded.masked_fill((steps <= step)[:, None], -1)
        children, log_probs = token_info_top(
            logits[:, step], live, table, row_of, hot_tokens, width
        )
        # Rounding must not score a child above its parent.
        joined = (joint[:, :, None] + log_probs.clamp(max=0)).flatten(1)
        tokens.append(children.flatten(1))
        parents.append(columns[:, :, None].expand_as(children).flatten(1))
        scores.append(joined)
        # As in `best_nodes`, on a tie the earlier node is the better one.
        order = joined.sort(dim=1, descending=True, stable=True)
        best = order.indices[:, :width]
        expanded, joint = tokens[-1].gather(1, best), order.values[:, :width]
        columns = (first + best).int()
        first += joined.shape[1]
    nodes = torch.cat(tokens, 1)
    return nodes, torch.cat(parents, 1).masked_fill(nodes < 0, -1), torch.cat(scores, 1).exp()


def _expand_cpp(
    logits: Tensor,
    steps: Tensor,
    roots: Tensor,
    table: Tensor,
    row_of: Tensor,
    hot_tokens: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    expand = _EXPAND.get((logits.dtype, table.dtype))
    if expand is None:
        return _expand_reference(logits, steps, roots, table, row_of, hot_tokens, width)
    batch, length, vocab = logits.shape
    columns = 1 + width + (length - 1) * width**2 if length else 1
    unknown = torch.empty(batch, columns - 1, dtype=torch.int32)
    tokens = torch.cat((roots.int()[:, None], unknown), 1)
    parents, scores = torch.empty_like(tokens), torch.empty(batch, columns)
    logits, steps, table = logits.contiguous(), steps.long().contiguous(), table.contiguous()
    expand.call(
        *(logits.data_ptr(), steps.data_ptr(), batch, length, vocab),
        *(table.data_ptr(), len(hot_tokens), row_of.data_ptr(), hot_tokens.data_ptr()),
        *(width, columns, tokens.data_ptr(), parents.data_ptr(), scores.data_ptr()),
        torch.get_num_threads(),
    )
    return tokens, parents, scores


_EXPAND_TOKEN_TREES = Op(
    "token_tree.expand_token_trees",
    _expand_reference,
    cpp=_expand_cpp,
    needs=_EXPAND[torch.float32, torch.float32],
)


def expand_token_trees(
    logits: Tensor,
    steps: Tensor,
    roots: Tensor,
    table: Tensor,
    row_of: Tensor,
    hot_tokens: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give every expanded node its `width` most likely children, level by level.

    In each level the `width` most likely paths are expanded. On a GPU, each level is one call of
    `token_info_top`.

    Args:
        logits: `[B, L, V]` as in `token_info_top`; step i, counted from 0, predicts the nodes of
            depth i + 1.
        steps: Int `[B]`, number of valid steps of each request.
        roots: Int32 `[B]`, the roots.
        table: As in `token_info_top`.
        row_of: As in `token_info_top`.
        hot_tokens: As in `token_info_top`.
        width: Number of children of a node, and of expanded nodes in a level.

    Returns:
        Tokens, int32 `[B, F]`, the roots first, in breadth-first order, -1 where there is no node;
        the columns of their parents, int32 `[B, F]`, -1 for roots and where there is no node; and
        their joint probabilities, float32 `[B, F]`, 1 for roots and 0 where there is no node. F is
        `1 + width + (L - 1) * width**2`, and 1 without steps. No node is more likely than its
        parent. Impossible tokens may be there as nodes with the probability 0.

    Raises:
        ValueError: The width is not between 1 and V, or shapes do not fit.
    """
    hot = len(hot_tokens)
    if (
        logits.dim() != 3
        or steps.shape != logits.shape[:1]
        or roots.shape != logits.shape[:1]
        or table.shape != (hot, hot)
        or row_of.shape != logits.shape[2:]
        or not 1 <= width <= logits.shape[2]
    ):
        shapes = [[*t.shape] for t in (logits, steps, roots, table, row_of)]
        raise ValueError(
            f"expected [B, L, V], [B], [B], [{hot}, {hot}], [V] and a width from 1 to V, not "
            f"{shapes}, {width}"
        )
    run = _EXPAND_TOKEN_TREES.on(logits)
    return run(logits, steps, roots, table, row_of, hot_tokens, width)
