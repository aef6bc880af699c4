"""What SGLang's batches contain for draft trees: the rows to verify, and the next step's roots."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from tree_kernels.full_mask import full_mask
from tree_kernels.mask import depths, tree_mask

from drafttree.tree import DraftTree


def drop_unusable(trees: DraftTree, left: torch.Tensor) -> tuple[DraftTree, torch.Tensor]:
    """Drop the nodes that cannot be used, and compute the depths of the others.

    Args:
        trees: The trees, N columns.
        left: `int64 [B]`, number of tokens that each request may still emit after the root; less
            than 1 for requests that are not drafted for.

    Returns:
        The trees, on a CPU without trailing columns that no request uses, and the depths of their
        nodes, `int32 [B, N]`.
    """
    depth = depths(trees.parents, trees.tree_size)
    # Tokens after a node at this depth would be beyond the request's end.
    useful = (trees.tokens >= 0) & (depth < left[:, None])
    useful[:, 0] = True
    columns = torch.arange(1, useful.shape[1] + 1, dtype=torch.int32, device=depth.device)
    tree_size = (useful * columns).amax(1)
    # Reading the result would stall a GPU, whose graphs need trees of one width anyway; on a CPU it
    # saves the rows of padding.
    width = int(tree_size.max()) if depth.device.type == "cpu" else useful.shape[1]
    dropped, depth = ~useful[:, :width], depth[:, :width]
    used = DraftTree(
        tokens=trees.tokens[:, :width].masked_fill(dropped, -1),
        parents=trees.parents[:, :width].masked_fill(dropped, -1),
        tree_size=tree_size,
    )
    return used, depth.masked_fill(dropped, 0)


def prepare_verify(
    batch: Any, trees: DraftTree, depth: torch.Tensor, slot_table: torch.Tensor, first: int = 0
) -> None:
    """Make nodes the rows of a batch to verify; SGLang restores the batch afterwards.

    Args:
        batch: SGLang's batch.
        trees: The trees, N columns.
        depth: `int32 [B, N]`, the nodes' depths.
        slot_table: SGLang's `req_to_token`, the KV slot of each position of each request.
        first: First column that becomes a row; the KV of earlier ones is cached. Greater than 0 on
            a CPU only: SGLang's own attention backends take whole trees.
    """
    width = trees.tokens.shape[1]
    tokens = trees.tokens[:, first:].clamp(min=0).flatten().long()
    columns = batch.seq_lens[:, None] + torch.arange(first, width, device=tokens.device)
    masks = tree_mask(trees.parents, trees.tree_size)
    if tokens.device.type != "cpu":
        # SGLang's own backends take one flat mask, which begins with the context.
        size = width * (int(batch.seq_lens_cpu.sum()) + width * len(masks))
        masks = full_mask(masks, batch.seq_lens, size)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.input_ids = tokens
    batch.out_cache_loc = slot_table[batch.req_pool_indices[:, None], columns].flatten().long()
    batch.spec_info = NgramVerifyInput(
        draft_token=tokens,
        custom_mask=masks,
        positions=(batch.seq_lens[:, None] + depth[:, first:]).flatten(),
        draft_token_num=width - first,
    )


def relay(roots: torch.Tensor, lengths: torch.Tensor) -> NgramVerifyInput:
    """What SGLang passes to the next step: the roots, as the result of accepting one token each.

    Args:
        roots: `int [B]`, the last emitted tokens.
        lengths: `int64 [B]`, the requests' lengths before the roots.
    """
    return NgramVerifyInput(
        draft_token_num=1,
        new_seq_lens=lengths,
        accept_tokens=roots.to(torch.int32),
        accept_lens=torch.ones_like(lengths, dtype=torch.int32),
    )
