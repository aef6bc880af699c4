"""Drawing along draft trees with SGLang's own sampler.

At every level of a tree the sampler sees one row a request, exactly what it would see without
speculation. So temperature, top-k, top-p, min-p, penalties, biases, grammars, seeds and logprobs
need no second implementation. The host's own verification draws nothing on a CPU: there it takes
the argmax, whatever the temperature.

On a GPU draws from a plain softmax at a temperature are made for all rows at once, and one walk
follows them: a handful of launches, whatever the depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from tree_kernels.adjacency import top_candidates

from drafttree.drafter import DraftTree, Rule
from drafttree.sglang.penalties import RequestPenalties
from drafttree.verify import Verified, draw_ahead, draws_ahead, verify_sampled, verify_target


def is_plain_greedy(batch: Any) -> bool:
    """Whether every request's next token is the argmax of its raw logits, and nothing else asked.

    Then the best of the candidates that the drafter takes from the logits is the answer.
    """
    return batch.sampling_info.is_all_greedy and _asks_for_tokens_alone(batch)


def _asks_for_tokens_alone(batch: Any) -> bool:
    """Whether no request asks for logprobs or for logits other than the raw ones."""
    info = batch.sampling_info
    return (
        not has_penalties(batch)
        and info.logit_bias is None
        and not info.has_custom_logit_processor
        and not batch.has_grammar
        and not batch.return_logprob
    )


def _draws_from_softmax(runner: Any, batch: Any) -> bool:
    """Whether every request draws from the softmax of its raw logits at its temperature, unseeded
    and by the host's own sampler.

    The host takes greedy requests among others for ones of top-k 1.
    """
    info = batch.sampling_info
    filtered = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    # Masks and watermarks came after 0.5.17.
    marked = getattr(info, "has_watermark_candidates", False)
    masked = getattr(info, "sampling_mask_batch_indices", None) is not None
    return (
        type(runner.sampler) is Sampler
        and not (info.is_all_greedy or filtered or marked or masked)
        and info.sampling_seed is None
        and _asks_for_tokens_alone(batch)
    )


def has_penalties(batch: Any) -> bool:
    """Whether any request of a batch on its way through the forward asks for penalties."""
    info = batch.sampling_info
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


def verify_trees(
    runner: Any,
    batch: Any,
    trees: DraftTree,
    max_depth: int,
    output: LogitsProcessorOutput,
    argmax: torch.Tensor | None,
    penalties: Sequence[RequestPenalties | None],
    rule: Rule | None = None,
) -> Verified:
    """Verify a step's trees and write the logprobs that were asked for into `output`.

    Args:
        runner: the target's model runner.
        trees: `[B, N]`.
        output: of the target, with the raw logits of all nodes, `[B * N, V]`.
        argmax: `int32 [B, N]`, the most likely token of each row, where it is known.
        penalties: of each request; None where it asks for none.
        rule: chooses where the sampler would draw; the runner's must be a `RuleSampler` then.
    """
    requests, nodes = trees.tokens.shape
    if is_plain_greedy(batch):
        if argmax is None:
            argmax = top_candidates(output.next_token_logits, 1).view(requests, nodes)
        return verify_target(trees, argmax, max_depth)
    logits = output.next_token_logits.view(requests, nodes, -1)
    if rule is None and draws_ahead(logits) and _draws_from_softmax(runner, batch):
        temperatures = batch.sampling_info.temperatures.expand(-1, nodes).flatten()
        target = draw_ahead(logits.flatten(0, 1), temperatures).view(requests, nodes)
        return verify_target(trees, target, max_depth)
    draw = _Draw(runner, batch, logits, penalties, rule)
    verified = verify_sampled(trees, draw, max_depth)
    if batch.return_logprob:
        draw.write_logprobs(output)
    return verified


class _Draw:
    """Draws one level after the other; `verify.Draw` says what it must give."""

    def __init__(
        self,
        runner: Any,
        batch: Any,
        logits: torch.Tensor,
        penalties: Sequence[RequestPenalties | None],
        rule: Rule | None,
    ) -> None:
        self._runner = runner
        self._batch = batch
        self._logits = logits
        self._penalties = penalties
        self._rule = rule
        self._rows = torch.arange(len(logits), device=logits.device)
        # The host's penalties know one token of the last step; ours know all.
        self._info = dataclasses.replace(
            batch.sampling_info, acc_additive_penalties=None, acc_scaling_penalties=None
        )
        self._levels: list[LogitsProcessorOutput] = []

    def __call__(self, node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        level, info = len(self._levels), self._info
        if level == 0:
            info.update_regex_vocab_mask()
        else:
            # Requests with a grammar or a processor of their own have no draft, so none is here.
            info.grammar_mask = None
            info.has_custom_logit_processor = False
        # Indexing copies: the sampler writes into what it is given.
        rows = self._logits[self._rows, node.long()]
        penalised = self._penalised(alive)
        for row, penalties in penalised:
            penalties.apply(rows[row : row + 1])
        info.apply_logits_bias(rows)
        output = LogitsProcessorOutput(next_token_logits=rows)
        batch = self._batch
        if (rule := self._rule) is not None:
            self._runner.sampler.choose = lambda probs: rule(probs, node)
        tokens = self._runner.sampler(
            output,
            info,
            batch.return_logprob,
            batch.top_logprobs_nums,
            batch.token_ids_logprobs,
            # A node's position, with which seeds are combined: one level is one position.
            batch.seq_lens + level,
        )
        self._levels.append(output)
        for row, penalties in penalised:
            penalties.add(int(tokens[row]))
        return tokens.to(torch.int32)

    def _penalised(self, alive: torch.Tensor) -> list[tuple[int, RequestPenalties]]:
        return [
            (row, penalties)
            for row, penalties in enumerate(self._penalties)
            if penalties is not None and bool(alive[row])
        ]

    def write_logprobs(self, output: LogitsProcessorOutput) -> None:
        """The logprobs of all levels, request by request, as the host reads them."""
        levels = self._levels
        output.next_token_logprobs = torch.stack([each.next_token_logprobs for each in levels], 1)
        for field in (
            "next_token_top_logprobs_val",
            "next_token_top_logprobs_idx",
            "next_token_token_ids_logprobs_val",
            "next_token_token_ids_logprobs_idx",
        ):
            if getattr(levels[0], field):
                by_level = [getattr(each, field) for each in levels]
                flat = [values[row] for row in range(len(self._logits)) for values in by_level]
                setattr(output, field, flat)
