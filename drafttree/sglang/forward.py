"""Latency of one forward of SGLang's target model, without scheduling, sampling or drafting.

The batch is synthetic: requests of equal length, of which the last tokens are computed. Neither the
tokens nor the contents of the KV cache change the work.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from tree_kernels.mask import tree_mask

from drafttree.sglang.adapters import use_no_adapters


def forward_seconds(
    runner: Any, requests: int, tokens: int, context: int, tree: bool, repeat: int
) -> list[float]:
    """Time forwards, logits of all tokens included; the cache must be empty.

    Args:
        runner: The target's model runner.
        requests: Batch size.
        tokens: Query tokens per request.
        context: Cached tokens per request.
        tree: Whether the query tokens form a draft tree, which needs a tree method's attention, or
            a causal chain.
        repeat: Number of forwards.

    Returns:
        Latency of each forward in seconds.
    """
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batch = _batch(runner, requests, tokens, context, tree)
    seconds = []
    with torch.inference_mode(), forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        for _ in range(repeat):
            started = perf_counter()
            runner.attn_backend.init_forward_metadata(batch)
            hidden = runner.model.model(batch.input_ids, batch.positions, batch)
            hidden @ runner.model.lm_head.weight.T
            seconds.append(perf_counter() - started)
    return seconds


def _batch(runner: Any, requests: int, tokens: int, context: int, tree: bool) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    length = context + tokens
    # SGLang uses page 0 for padding. The rows' old contents are written again before they are used.
    first = runner.page_size
    slots = first + torch.arange(requests * length).view(requests, length)
    table = runner.req_to_token_pool.req_to_token
    table[:requests, :length] = slots.to(table.dtype)
    lengths = torch.full((requests,), context if tree else length)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND if tokens > 1 else ForwardMode.DECODE,
        batch_size=requests,
        input_ids=torch.zeros(requests * tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(requests),
        seq_lens=lengths,
        out_cache_loc=slots[:, context:].flatten(),
        seq_lens_sum=int(lengths.sum()),
        positions=torch.arange(context, length).repeat(requests),
    )
    batch.extend_prefix_lens = torch.full((requests,), context)
    batch.extend_seq_lens = torch.full((requests,), tokens)
    batch.extend_seq_lens_cpu = [tokens] * requests
    if tree:
        # The mask does not change the work: any tree of this size will do.
        parents = ((torch.arange(tokens, dtype=torch.int32) - 1) >> 1).expand(requests, -1)
        tree_size = torch.full((requests,), tokens, dtype=torch.int32)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = NgramVerifyInput(
            custom_mask=tree_mask(parents, tree_size), draft_token_num=tokens
        )
    use_no_adapters(runner, batch)
    return batch
