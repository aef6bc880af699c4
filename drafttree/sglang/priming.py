"""Priming in SGLang: a drafter's forwards outside of batches, at start-up and between requests.

Their KV goes to slots that are taken from SGLang's pool for each forward and given back after it,
so that no cached prefix has them. No request may be running.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from tree_kernels.full_mask import full_mask

from drafttree.sglang.adapters import use_no_adapters
from drafttree.sglang.kv_plan import plan_kv_writes
from drafttree.sglang.model_inputs import use_text_positions

MAX_TOKENS = 64
"""Greatest number of tokens of a forward. More are no faster on a CPU, and their logits take more
memory."""

_ROW = 0
"""Row of SGLang's slot table; version 0.5.23 has no request in it, and 0.5.17 writes a row before
it reads it. Between forwards it is zero: padding of batches in CUDA graphs writes to its slots."""


@contextmanager
def lent_slots(allocator: Any, tree_cache: Any, count: int) -> Iterator[torch.Tensor | None]:
    """Take KV slots from the pool, and give them back afterwards.

    Args:
        allocator: SGLang's allocator of KV slots.
        tree_cache: SGLang's cache of prefixes, which gives up the oldest if too few slots are left;
            None if it does not exist yet.
        count: Number of slots, less than a request of the longest context needs.

    Yields:
        `int64 [n]`, at least `count` slots; None if requests that are not running, such as open
        sessions, hold too many. The pools of all ranks are filled alike.
    """
    count = -(-count // allocator.page_size) * allocator.page_size
    if allocator.available_size() < count:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(tree_cache, count)
    slots = allocator.alloc(count)
    try:
        yield slots
    finally:
        if slots is not None:
            allocator.free(slots)


def child_logits(
    runner: Any, root: int | None, tokens: torch.Tensor, slots: torch.Tensor, width: int
) -> torch.Tensor:
    """A `PrimeForward` whose KV goes to the given slots.

    Args:
        runner: The target's model runner.
        root: The token before each of `tokens`; None for none.
        tokens: `int32 [n]`.
        slots: `int64`, at least `width` of them.
        width: Number of nodes of the tree, at least n + 1. On a GPU it must be that of all trees.
            The tree is padded with children.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    device = tokens.device
    before = 0 if root is None else 1
    ids = F.pad(tokens.long(), (before, 0), value=root or 0)
    ids = F.pad(ids, (0, width - len(ids)))
    # Without a root all tokens are at position 0.
    positions = torch.full((width,), before, device=device)
    positions[:before] = 0
    mask = torch.eye(width, dtype=torch.bool, device=device)
    mask[:, :before] = True
    masks = mask[None]
    lengths = torch.zeros(1, dtype=torch.int64, device=device)
    if device.type != "cpu":
        masks = full_mask(masks, lengths, width * width)
    table = runner.req_to_token_pool.req_to_token
    table[_ROW, :width] = slots[:width].to(table.dtype)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.full((1,), _ROW, device=device),
        seq_lens=lengths,
        out_cache_loc=slots[:width],
        seq_lens_sum=0,
        positions=positions,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    batch.seq_lens_cpu = lengths.cpu()
    batch.spec_info = NgramVerifyInput(
        draft_token=ids, custom_mask=masks, positions=positions, draft_token_num=width
    )
    use_text_positions(runner, batch)
    use_no_adapters(runner, batch)
    plan_kv_writes(runner, batch)
    try:
        with torch.inference_mode():
            logits: torch.Tensor = runner.forward(batch).logits_output.next_token_logits
    finally:
        table[_ROW, :width] = 0
    return logits[before : before + len(tokens)]
