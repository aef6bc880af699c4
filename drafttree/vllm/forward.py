"""Forwards of vLLM's target model without scheduling, sampling or drafting.

Their batches are synthetic. Those that are timed have requests of equal length, of which the last
tokens are computed: the contents of the KV cache do not change the work. The tokens are random, as
a mixture of experts would send copies of one token to the same experts, and read no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from tree_kernels.mask import tree_mask

from drafttree.vllm.model_inputs import text_inputs
from drafttree.vllm.step_masks import StepMasks


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
    total = requests * tokens
    device = runner.device
    positions = torch.arange(context, context + tokens, device=device).repeat(requests)
    ids = random_ids(total, runner.model_config.get_vocab_size(), device)
    masks = None
    if tree:
        # The topology does not change the work: any tree of this size will do.
        parents = ((torch.arange(tokens, dtype=torch.int32, device=device) - 1) >> 1).expand(
            requests, -1
        )
        masks = _masks(requests, tokens, tree_mask(parents, _sizes(requests, tokens, device).int()))
    metadata, slots = _attention_metadata(runner, requests, positions, masks)
    _without_adapters(runner, total)
    seconds = []
    with torch.inference_mode():
        for _ in range(repeat):
            started = perf_counter()
            _logits(runner, ids, positions, metadata, slots)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(perf_counter() - started)
    return seconds


def step_seconds(runner: Any, tokens: int) -> float:
    """Measure one forward as in a step of `tokens` tokens, logits included, in seconds.

    The engine runs it from a captured graph if it has one of that size. A multiple of a tree's size
    counts as a step of whole trees.
    """
    # The dummy run reads this buffer as it is, and by default it holds zeros.
    ids = runner.input_ids.gpu
    ids.copy_(random_ids(len(ids), runner.model_config.get_vocab_size(), ids.device))
    if runner.supports_mm_inputs:
        with torch.inference_mode():
            runner.inputs_embeds.gpu[:tokens] = runner.model.embed_input_ids(ids[:tokens])
    seconds = dummy_run_seconds(
        runner,
        tokens,
        force_attention=True,
        uniform_decode=tokens % runner.uniform_decode_query_len == 0,
    )
    ids.zero_()
    return seconds


def random_ids(count: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Random tokens, `int32 [count]`, the same ones in each call."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (count,), dtype=torch.int32, generator=generator)
    return ids.to(device)


def dummy_run_seconds(runner: Any, tokens: int, **settings: bool) -> float:
    """Measure the engine's own dummy run over `tokens` tokens, logits included, in seconds.

    Args:
        runner: The worker's model runner, V1 or V2.
        tokens: Number of tokens.
        settings: Further arguments of the dummy run.
    """
    with torch.inference_mode():
        torch.accelerator.synchronize(runner.device)
        started = perf_counter()
        hidden, _ = runner._dummy_run(tokens, **settings)
        runner.model.compute_logits(hidden[:tokens])
        torch.accelerator.synchronize(runner.device)
        return perf_counter() - started


def child_logits(runner: Any, root: int | None, tokens: torch.Tensor, blocks: Sequence[int]) -> Any:
    """A `PrimeForward`, which writes KV into these blocks of the cache.

    Args:
        runner: The worker's model runner.
        root: The token before each of `tokens`; None for none.
        tokens: `int32 [n]`.
        blocks: Blocks for one token more than n, none of which any request uses.

    Returns:
        `[n, V]`; on other ranks than the first None, if the engine gathers the logits there alone.
    """
    device = runner.device
    before = 0 if root is None else 1
    ids = torch.nn.functional.pad(tokens.to(device), (before, 0), value=root or 0)
    rows = len(ids)
    columns = torch.arange(rows, device=device)
    mask = torch.eye(rows, dtype=torch.bool, device=device)
    mask[:, :before] = True
    masks = _masks(1, rows, mask[None])
    table = torch.tensor([blocks], dtype=torch.int32, device=device)
    metadata, slots = _attention_metadata(runner, 1, columns, masks, table)
    _without_adapters(runner, rows)
    with torch.inference_mode():
        # Without a root all tokens are at position 0.
        logits = _logits(runner, ids, columns.clamp(max=before), metadata, slots)
    return logits if logits is None else logits[before:]


def next_logits(runner: Any, root: int | None, tokens: torch.Tensor, blocks: Sequence[int]) -> Any:
    """A `PrimeForward` for attention without tree masks: each token is a request of its own.

    Args:
        runner: The worker's model runner.
        root: The token before each of `tokens`; None for none.
        tokens: `int32 [n]`.
        blocks: At least n blocks, none of which any request uses.

    Returns:
        `[n, V]`; on other ranks than the first None, if the engine gathers the logits there alone.
    """
    device, count = runner.device, len(tokens)
    length = 1 if root is None else 2
    ids = torch.full((count, length), root or 0, dtype=torch.int32, device=device)
    ids[:, -1] = tokens.to(device)
    columns = torch.arange(length, device=device).repeat(count)
    table = torch.tensor(blocks[:count], dtype=torch.int32, device=device)[:, None]
    metadata, slots = _attention_metadata(runner, count, columns, None, table)
    _without_adapters(runner, len(columns))
    with torch.inference_mode():
        logits = _logits(runner, ids.flatten(), columns, metadata, slots)
    return logits if logits is None else logits[length - 1 :: length]


def _without_adapters(runner: Any, tokens: int) -> None:
    """LoRA layers need the adapter of each row: none."""
    if runner.lora_config:
        runner._set_active_loras((0,) * tokens, (0,) * tokens, set())


def _logits(
    runner: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    metadata: dict[str, Any],
    slots: dict[str, torch.Tensor],
) -> Any:
    from vllm.forward_context import set_forward_context

    with set_forward_context(metadata, runner.vllm_config, num_tokens=len(ids), slot_mapping=slots):
        inputs = text_inputs(runner, ids, positions)
        hidden = runner.model(intermediate_tensors=None, **inputs)
        return runner.model.compute_logits(hidden)


def _sizes(requests: int, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.full((requests,), tokens, device=device)


def _masks(requests: int, tokens: int, masks: torch.Tensor) -> StepMasks:
    """The masks of a batch of which each request is a tree of `tokens` nodes."""
    device = masks.device
    return StepMasks(torch.arange(requests, device=device), _sizes(requests, tokens, device), masks)


def _attention_metadata(
    runner: Any,
    requests: int,
    columns: torch.Tensor,
    masks: StepMasks | None,
    blocks: torch.Tensor | None = None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and KV slots of each layer.

    Args:
        runner: The worker's model runner.
        requests: Batch size.
        columns: Place of each token among its request's tokens, `int64 [tokens]`, the same for
            each request.
        masks: Masks of draft trees; None for causal chains.
        blocks: Blocks of each request, `int32 [requests, n]`; None for the first ones of the cache,
            which requests share where there are too few.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = columns.device
    tokens = len(columns) // requests
    starts = torch.arange(requests + 1, dtype=torch.int32) * tokens
    length = int(columns[-1]) + 1
    metadata, slot_mappings = {}, {}
    caches = runner.kv_cache_config.kv_cache_groups
    for groups, cache in zip(runner.attn_groups, caches, strict=True):
        size = cache.kv_cache_spec.block_size
        table = blocks
        if table is None:
            per_request = -(-length // size)
            table = torch.arange(requests * per_request, dtype=torch.int32, device=device)
            # The engine leaves block 0 unused. A batch that would not fit into the cache, and so
            # never runs together, is measured on the blocks that exist.
            usable = runner.kv_cache_config.num_blocks - 1
            table = (1 + table % usable).view(requests, -1)
        slots = table.gather(1, columns.view(requests, -1) // size).long() * size
        lengths = torch.full((requests,), length, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=requests,
            num_actual_tokens=requests * tokens,
            max_query_len=tokens,
            max_seq_len=length,
            block_table_tensor=table,
            slot_mapping=slots.flatten() + columns % size,
        )
        for group in groups:
            builder = group.get_metadata_builder(0)
            if masks is not None:
                builder.step_masks = masks
            built = builder.build(0, common)
            metadata.update(dict.fromkeys(group.layer_names, built))
            slot_mappings.update(dict.fromkeys(group.layer_names, common.slot_mapping))
    return metadata, slot_mappings
