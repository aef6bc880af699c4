"""Verification on the V2 model runner: the engine samples a token for every node at once.

Its noise is drawn from a request's seed and a token's position. So a node's token is the one that
plain decoding would sample there, and the path along these tokens is plain decoding's text. A
method's acceptance rule, if it has one, chooses the tokens instead, one level after another or for
whole trees at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from drafttree.acceptance_rules import AcceptanceRule, TreeRule
from drafttree.tree import DraftTree, Verified
from drafttree.verify import verify_sampled, verify_target
from drafttree.vllm.v2.chunks import Chunk, chunks_of

if TYPE_CHECKING:
    from tree_kernels.scheduled_trees import Layout
    from vllm.v1.worker.gpu.input_batch import InputBatch

RuleOf = Callable[[DraftTree, slice], AcceptanceRule | None]
"""`(trees, requests)`: the acceptance rule of the trees of some of a step's requests."""

LogitsOf = Callable[[Chunk], torch.Tensor]
"""Computes the target's logits after a chunk's rows, masked by grammars, `[n, V]`."""


def sample_trees(
    sampler: Any,
    batch: InputBatch,
    step: Layout,
    trees: DraftTree,
    logits_of: LogitsOf,
    tokens: torch.Tensor,
    max_depth: int,
    max_rows: int,
    rule_of: RuleOf,
) -> tuple[Verified, LogprobsTensors | None]:
    """Sample a token after each node, and follow each request's path.

    The engine's sampler processes a copy of the logits in float32.

    Args:
        sampler: The engine's sampler.
        batch: The engine's batch, in which positions are those of the trees.
        step: The step.
        trees: The step's trees.
        logits_of: Computes the logits of a chunk; called once for each, in order.
        tokens: The input token of each row, `[R]`.
        max_depth: Greatest depth of a node.
        max_rows: Greatest number of rows to sample at a time, unless one request has more.
        rule_of: The method's acceptance rule of some of the requests, if it has one.

    Returns:
        The outcome, of D + 1 columns, D the greatest depth of a node in this step; and the logprobs
        of the emitted tokens if any request asks for them, in D + 1 rows for each request.
    """
    dims = sampler.get_logprobs_dims(batch.idx_mapping_np)
    depth = min(max_depth, step.width - 1)
    positions = batch.positions[batch.logits_indices]
    lengths = batch.seq_lens_cpu_upper_bound.numpy()

    def sampled(chunk: Chunk) -> tuple[Verified, LogprobsTensors | None]:
        # Nothing outside refers to the logits, so those of the next chunk can take their place.
        logits = logits_of(chunk)
        part = (
            logits,
            chunk.rows_of(batch.expanded_idx_mapping),
            chunk.requests_of(batch.idx_mapping),
            chunk.requests_of(batch.idx_mapping_np),
            chunk.rows_of(positions),
            chunk.rows_of(tokens),
            chunk.rows_of(batch.expanded_local_pos),
            chunk.requests_of(lengths),
        )
        nodes, drafts = step.row_of_node, trees
        if not chunk.is_whole:
            nodes = nodes[chunk.requests] - chunk.rows.start
            drafts = _of_requests(trees, chunk.requests)
        rule = rule_of(drafts, chunk.requests)
        if rule is None:
            drawn, processed = sampler.sample(*part, return_logprobs=dims is not None)
            verified = verify_target(drafts, drawn, depth, nodes)
        else:
            processed = sampler.apply_sampling_params(*part)
            states, greedy = sampler.sampling_states, None
            if states.any_greedy(part[3]):
                slots = part[1] if isinstance(rule, TreeRule) else part[2]
                greedy = states.temperature.gpu[slots] == 0
            if isinstance(rule, TreeRule):
                drawn = rule.of_trees(_distributions(processed, greedy), nodes)
                verified = verify_target(drafts, drawn, depth)
            else:
                draw = partial(_draw_by_rule, rule, processed, nodes, greedy)
                verified = verify_sampled(drafts, draw, depth, waits=False)
        if dims is None:
            return verified, None
        path = nodes.gather(1, verified.path.clamp(min=0).long()).flatten()
        requests = chunk.requests_of(batch.idx_mapping).repeat_interleave(
            depth + 1, output_size=len(path)
        )
        emitted = verified.emitted.clamp(min=0).flatten().long()
        is_processed = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        source = processed if is_processed else logits
        # Requests without drafts have as many rows in `path` as those with the deepest trees, so
        # there may be many more than the chunk has logits.
        parts = (each.split(len(source)) for each in (path, emitted, requests))
        scored = [
            compute_topk_scores(
                source[rows],
                dims[0],
                tokens_of,
                None,
                sampler.logprob_token_ids_state,
                requests_of,
                dims[1],
                sampler.logprobs_mode in ("raw_logits", "processed_logits"),
            )
            for rows, tokens_of, requests_of in zip(*parts, strict=True)
        ]
        return verified, LogprobsTensors.cat(scored)

    outcomes, scores = zip(*map(sampled, chunks_of(batch.cu_num_logits_np, max_rows)), strict=True)
    return _joined(outcomes), _joined_scores(scores, batch.num_reqs, depth + 1)


def _draw_by_rule(
    rule: AcceptanceRule,
    logits: torch.Tensor,
    rows: torch.Tensor,
    greedy: torch.Tensor | None,
    nodes: torch.Tensor,
    alive: torch.Tensor,
) -> torch.Tensor:
    """A `verify.Draw` that follows an acceptance rule.

    Args:
        rule: The rule.
        logits: The target's processed logits, `[R, V]`.
        rows: The row of each node, `int64 [B, N]`.
        greedy: Which requests are not sampled, `bool [B]`; None if all are.
        nodes: `int32 [B]`.
        alive: `bool [B]`.
    """
    here = logits[rows.gather(1, nodes.long()[:, None])[:, 0]]
    return rule(_distributions(here, greedy), nodes)


def _distributions(logits: torch.Tensor, greedy: torch.Tensor | None) -> torch.Tensor:
    """The target's distributions, `float32 [n, V]`, one-hot where `greedy [n]` is true."""
    logits = logits.float()
    if greedy is None:
        return logits.softmax(-1)
    sure = torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], sure, logits.softmax(-1))


def _of_requests(trees: DraftTree, requests: slice) -> DraftTree:
    return DraftTree(trees.tokens[requests], trees.parents[requests], trees.tree_size[requests])


def _joined(outcomes: Sequence[Verified]) -> Verified:
    if len(outcomes) == 1:
        return outcomes[0]
    return Verified(
        torch.cat([each.path for each in outcomes]),
        torch.cat([each.emitted for each in outcomes]),
        torch.cat([each.num_emitted for each in outcomes]),
    )


def _joined_scores(
    scores: Sequence[LogprobsTensors | None], requests: int, width: int
) -> LogprobsTensors | None:
    """The logprobs of all requests, each of which has `width` rows; None if none are asked for."""
    asked = [each for each in scores if each is not None]
    if not asked:
        return None
    return LogprobsTensors.cat(asked, [width * request for request in range(requests + 1)])
