"""Latency of one forward of vLLM's target model, without scheduling, sampling or drafting.

The batch is synthetic: requests of equal length, of which the last tokens are computed. Neither the
tokens nor the contents of the KV cache change the work.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from tree_kernels.mask import tree_mask


def forward_seconds(
    runner: Any, requests: int, tokens: int, context: int, tree: bool, repeat: int
) -> list[float]:
    """Measure forwards, logits of all tokens included. No request may be running.

    Args:
        runner: The worker's model runner.
        requests: Batch size.
        tokens: Number of tokens to compute for each request.
        context: Number of cached tokens before them.
        tree: Whether the tokens of a request form a draft tree, which needs a drafttree worker, or
            a causal chain.
        repeat: Number of forwards.

    Returns:
        The latency of each forward in seconds.
    """
    from vllm.forward_context import set_forward_context

    total = requests * tokens
    device = runner.device
    positions = torch.arange(context, context + tokens, device=device).repeat(requests)
    ids = torch.zeros(total, dtype=torch.int32, device=device)
    metadata, slots = _attention_metadata(runner, requests, tokens, positions, tree)
    if runner.lora_config:
        # LoRA layers need the adapter of each row: none.
        runner._set_active_loras((0,) * total, (0,) * total, set())
    seconds = []
    with torch.inference_mode():
        for _ in range(repeat):
            started = perf_counter()
            with set_forward_context(
                metadata, runner.vllm_config, num_tokens=total, slot_mapping=slots
            ):
                hidden = runner.model(
                    input_ids=ids,
                    positions=positions,
                    intermediate_tensors=None,
                    inputs_embeds=None,
                )
                runner.model.compute_logits(hidden)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(perf_counter() - started)
    return seconds


def step_seconds(runner: Any, tokens: int) -> float:
    """Measure one forward as in a step of `tokens` tokens, logits included, in seconds.

    The engine runs it from a captured graph if it has one of that size. A multiple of a tree's size
    counts as a step of whole trees.
    """
    with torch.inference_mode():
        torch.accelerator.synchronize(runner.device)
        started = perf_counter()
        hidden, _ = runner._dummy_run(
            tokens,
            force_attention=True,
            uniform_decode=tokens % runner.uniform_decode_query_len == 0,
        )
        runner.model.compute_logits(hidden[:tokens])
        torch.accelerator.synchronize(runner.device)
        return perf_counter() - started


def _attention_metadata(
    runner: Any, requests: int, tokens: int, positions: torch.Tensor, tree: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from drafttree.vllm.step import StepMasks

    device = positions.device
    starts = torch.arange(requests + 1, dtype=torch.int32) * tokens
    length = int(positions[-1]) + 1
    masks = None
    if tree:
        # The topology does not change the work: any tree of this size will do.
        parents = ((torch.arange(tokens, dtype=torch.int32, device=device) - 1) >> 1).expand(
            requests, -1
        )
        sizes = torch.full((requests,), tokens, device=device)
        masks = StepMasks(
            torch.arange(requests, device=device), sizes, tree_mask(parents, sizes.int())
        )
    metadata, slot_mappings = {}, {}
    caches = runner.kv_cache_config.kv_cache_groups
    for groups, cache in zip(runner.attn_groups, caches, strict=True):
        size = cache.kv_cache_spec.block_size
        blocks = 1 + torch.arange(requests * -(-length // size), dtype=torch.int32, device=device)
        blocks = blocks.view(requests, -1)
        slots = blocks.gather(1, positions.view(requests, -1) // size).long() * size
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.full((requests,), length, dtype=torch.int32, device=device),
            num_reqs=requests,
            num_actual_tokens=requests * tokens,
            max_query_len=tokens,
            max_seq_len=length,
            block_table_tensor=blocks,
            slot_mapping=slots.flatten() + positions % size,
        )
        for group in groups:
            builder = group.get_metadata_builder(0)
            if tree:
                builder.step_masks = masks
            built = builder.build(0, common)
            metadata.update(dict.fromkeys(group.layer_names, built))
            slot_mappings.update(dict.fromkeys(group.layer_names, common.slot_mapping))
    return metadata, slot_mappings
