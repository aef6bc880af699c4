"""Latency of one forward of SGLang's target model, without scheduling, sampling or drafting.

The batch is synthetic: requests of equal length, of which the last tokens are computed. Neither the
tokens nor the contents of the KV cache change the work.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from tree_kernels.full_mask import full_mask
from tree_kernels.mask import tree_mask

from drafttree.sglang.adapters import use_no_adapters
from drafttree.sglang.kv_plan import plan_kv_writes
from drafttree.sglang.model_inputs import use_text_positions


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
    positions = batch.positions if batch.mrope_positions is None else batch.mrope_positions
    # Some multimodal models have a whole model for text inside.
    model = getattr(runner.model, "language_model", runner.model)
    head = getattr(model, "lm_head", None)
    if head is None:
        head = model.model.embed_tokens  # some models with tied weights have no other
    seconds = []
    with torch.inference_mode(), forward_context(ForwardContext(attn_backend=runner.attn_backend)):
        for _ in range(repeat):
            started = perf_counter()
            runner.attn_backend.init_forward_metadata(batch)
            hidden = model.model(batch.input_ids, positions, batch)
            hidden @ head.weight.T
            seconds.append(perf_counter() - started)
    return seconds


def verification_seconds(runner: Any, requests: int, tokens: int, context: int) -> float:
    """Time one verification on a device, with a CUDA graph if the runner has one for it.

    Args:
        runner: The target's model runner; the cache must be empty.
        requests: Batch size.
        tokens: Nodes of each request's tree.
        context: Cached tokens per request.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    batch = _batch(runner, requests, tokens, context, tree=True)
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    batch.capture_hidden_mode = CaptureHiddenMode.NULL
    device = torch.get_device_module(batch.input_ids.device)
    try:
        # Not inference mode: whatever the graphs' runner keeps is written again by later steps.
        with torch.no_grad():
            device.synchronize()
            started = perf_counter()
            runner.forward(batch)
            device.synchronize()
            return perf_counter() - started
    finally:
        # Padding of batches in CUDA graphs writes to the slots of the first row.
        runner.req_to_token_pool.req_to_token[:requests] = 0


def _batch(runner: Any, requests: int, tokens: int, context: int, tree: bool) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    length = context + tokens
    # SGLang uses page 0 for padding. The rows' old contents are written again before they are used.
    first = runner.page_size
    table = runner.req_to_token_pool.req_to_token
    device = table.device
    slots = first + torch.arange(requests * length, device=device).view(requests, length)
    table[:requests, :length] = slots.to(table.dtype)
    seen = context if tree else length
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND if tokens > 1 else ForwardMode.DECODE,
        batch_size=requests,
        input_ids=torch.zeros(requests * tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.arange(requests, device=device),
        seq_lens=torch.full((requests,), seen, device=device),
        out_cache_loc=slots[:, context:].flatten(),
        seq_lens_sum=requests * seen,
        positions=torch.arange(context, length, device=device).repeat(requests),
    )
    batch.extend_prefix_lens = torch.full((requests,), context, device=device)
    batch.extend_seq_lens = torch.full((requests,), tokens, device=device)
    batch.extend_seq_lens_cpu = [tokens] * requests
    if tree:
        # The mask does not change the work: any tree of this size will do.
        columns = torch.arange(tokens, dtype=torch.int32, device=device)
        parents = ((columns - 1) >> 1).expand(requests, -1)
        tree_size = torch.full((requests,), tokens, dtype=torch.int32, device=device)
        masks = tree_mask(parents, tree_size)
        if device.type != "cpu":
            masks = full_mask(masks, batch.seq_lens, requests * tokens * length)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = NgramVerifyInput(
            custom_mask=masks, positions=batch.positions, draft_token_num=tokens
        )
    use_text_positions(runner, batch)
    use_no_adapters(runner, batch)
    plan_kv_writes(runner, batch)
    return batch
