"""The distributions from which children are sampled in vLLM's V1 model runner: a draft model's
logits, with what the engine's sampler does to the target's."""

from __future__ import annotations

import torch
from tree_kernels.mask import tree_mask
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from drafttree.tree import NO_TOKEN, DraftTree


def adjusted(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    outputs: torch.Tensor | None,
    trees: DraftTree,
    first: int,
) -> torch.Tensor:
    """Apply the target's penalties, biases and allowed tokens along each node's path.

    Stateful processors and bad words are left to verification.

    Args:
        logits: Logits of the columns from `first` on, `[B, n, V]`.
        metadata: How the step's requests are sampled.
        outputs: Their output tokens, `int64 [B, n]`, padded with -1; None without penalties.
        trees: The trees drafted so far.
        first: The first of these columns.
    """
    requests, nodes, vocab = logits.shape
    if metadata.allowed_token_ids_mask is not None:
        logits = logits.masked_fill(metadata.allowed_token_ids_mask[:, None], -torch.inf)
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if type(processor) is LogitBiasLogitsProcessor and processor.biases:
            columns = [processor.apply(column) for column in logits.unbind(1)]
            logits = torch.stack(columns, 1)
    if outputs is None:
        return logits
    on_path = tree_mask(trees.parents, trees.tree_size)[:, first : first + nodes]
    paths = trees.tokens[:, None].masked_fill(~on_path, NO_TOKEN)
    paths[..., 0] = NO_TOKEN  # the root has been emitted
    outputs = outputs.repeat_interleave(nodes, 0)
    outputs = torch.cat((outputs, paths.flatten(0, 1).long()), 1)
    prompts, *penalties = (
        each.repeat_interleave(nodes, 0)
        for each in (
            *(metadata.prompt_token_ids, metadata.presence_penalties),
            *(metadata.frequency_penalties, metadata.repetition_penalties),
        )
    )
    penalised: torch.Tensor = apply_penalties(
        logits.reshape(-1, vocab),
        prompts,
        outputs.masked_fill(outputs < 0, vocab),  # as vLLM pads
        *penalties,
    )
    return penalised.view(requests, nodes, vocab)


def distributions(
    logits: torch.Tensor, metadata: SamplingMetadata, sampled: torch.Tensor
) -> torch.Tensor:
    """Distributions of the children, `float32 [B, n, V]`, with the target's own filters.

    Verification is lossless with any distribution here, but the closer it is to the target's,
    the more drafts are accepted. Requests that are not sampled keep all tokens.

    Args:
        logits: Logits, `[B, n, V]`.
        metadata: How the step's requests are sampled.
        sampled: Whether each is sampled rather than greedy, `bool [B]`.
    """
    plain = logits.softmax(-1)
    if metadata.temperature is None:
        return plain
    requests, nodes, vocab = logits.shape
    temperatures = torch.where(sampled, metadata.temperature, 1.0)
    rows = (logits / temperatures[:, None, None]).view(-1, vocab)
    for processor in metadata.logitsprocs.argmax_invariant:
        if type(processor) is MinPLogitsProcessor and processor.min_p_count:
            least = processor.min_p.view(-1).repeat_interleave(nodes)[:, None]
            probs = rows.softmax(-1)
            rows = rows.masked_fill(probs < probs.amax(1, keepdim=True) * least, -torch.inf)
    k, p = (
        None if each is None else each.repeat_interleave(nodes)
        for each in (metadata.top_k, metadata.top_p)
    )
    drawn = apply_top_k_top_p(rows, k, p).softmax(-1).view(requests, nodes, vocab)
    return torch.where(sampled[:, None, None], drawn, plain)
