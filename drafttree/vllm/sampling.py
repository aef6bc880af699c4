"""Drawing along draft trees with the engine's own sampler.

At every level of a tree the sampler sees one row a request, exactly what it would see without
speculation, and the requests' output lists and logits processors are brought to that state first.
So temperature, top-k, top-p, min-p, penalties, bad words, biases, seeds, logprobs and custom
processors need no second implementation.

On a GPU draws from a plain softmax at a temperature are made for all rows at once, and one walk
follows them: a handful of launches, whatever the depth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    build_logitsprocs,
)
from vllm.v1.sample.sampler import Sampler

from drafttree.drafter import DraftTree, Rule
from drafttree.verify import Verified, draw_ahead, draws_ahead, verify_sampled, verify_target

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.metadata import SamplingMetadata

    from drafttree.vllm.rule_sampler import RuleSampler
    from drafttree.vllm.runner import TreeModelRunner
    from drafttree.vllm.step import StepTrees


_OF_ROWS = (LogitBiasLogitsProcessor, MinPLogitsProcessor)
"""Processors to which what was drawn before is nothing."""


def build_logits_processors(
    vllm_config: VllmConfig, device: torch.device, custom: Sequence[Any] | None
) -> LogitsProcessors:
    """All processors that the engine builds without speculation, of which it builds one with."""
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(plain, device, False, False, custom or ())


def is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Whether every request's next token is the argmax of its raw logits, and nothing else asked.

    Then the best of the candidates that the drafter takes from the logits is the answer.
    """
    return (
        metadata.all_greedy
        and _asks_for_tokens_alone(metadata)
        and not any(map(_is_active, metadata.logitsprocs.non_argmax_invariant))
    )


def _asks_for_tokens_alone(metadata: SamplingMetadata) -> bool:
    """Whether no request asks for logprobs or for logits other than the raw ones; logits
    processors apart."""
    return (
        metadata.no_penalties
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and not _thinking_budgets(metadata)
    )


def _thinking_budgets(metadata: SamplingMetadata) -> dict[int, Any]:
    """The engine's state of each request, by row, that has a thinking budget."""
    holder = metadata.thinking_budget_state_holder
    return {} if holder is None else holder._state


def _is_active(processor: Any) -> bool:
    if type(processor) is MinTokensLogitsProcessor:
        return bool(processor.min_toks)
    if type(processor) is LogitBiasLogitsProcessor:
        return bool(processor.biases)
    if type(processor) is MinPLogitsProcessor:
        return bool(processor.min_p_count)
    return True


def _follows_texts(metadata: SamplingMetadata) -> bool:
    """Whether what is drawn at a level depends, on the host, on what was drawn above it."""
    return bool(
        metadata.generators
        or not metadata.no_penalties
        or metadata.bad_words_token_ids
        or _thinking_budgets(metadata)
        or any(_is_active(each) and type(each) not in _OF_ROWS for each in metadata.logitsprocs.all)
    )


def _draws_from_softmax(runner: TreeModelRunner) -> bool:
    """Whether every request draws from the softmax of its raw logits at its temperature, which is 0
    where it is greedy, unseeded and by the engine's own sampler with noise in float32.
    """
    metadata: SamplingMetadata = runner.input_batch.sampling_metadata
    return (
        type(runner.sampler) is Sampler
        and not runner.sampler.use_fp64_gumbel
        and not metadata.generators
        and metadata.top_k is None
        and metadata.top_p is None
        and _asks_for_tokens_alone(metadata)
        and not any(map(_is_active, metadata.logitsprocs.all))
    )


def sample_trees(
    runner: TreeModelRunner,
    step: StepTrees,
    drafts: DraftTree,
    logits: torch.Tensor,
    argmax: torch.Tensor | None,
    rule: tuple[RuleSampler, Rule] | None = None,
) -> tuple[SamplerOutput, Verified]:
    """Verify a step's trees.

    Args:
        logits: `[R, V]`, raw.
        argmax: `int32 [R]` where that is all that is asked for, else None.
        rule: chooses where the engine's sampler would draw, called by the sampler beside it.
    """
    target = argmax
    if target is None and rule is None and draws_ahead(logits) and _draws_from_softmax(runner):
        temperatures = runner.input_batch.sampling_metadata.temperature
        target = draw_ahead(logits, temperatures[step.sent.request_of_row])
    if target is not None:
        verified = verify_target(drafts, step.by_node(target), step.max_depth)
        return SamplerOutput(verified.emitted, logprobs_tensors=None), verified
    with _Draw.along(runner, step, logits, rule) as draw:
        verified = verify_sampled(drafts, draw, step.max_depth, watched=draw.follows)
    emitted = verified.emitted[:, : draw.levels]
    return SamplerOutput(emitted, logprobs_tensors=draw.logprobs()), verified


class _Draw:
    """Draws one level after the other; `verify.Draw` says what it must give.

    Attributes:
        levels: drawn so far.
        follows: whether the host must know of each level before the next is drawn.
    """

    def __init__(
        self,
        runner: TreeModelRunner,
        step: StepTrees,
        logits: torch.Tensor,
        rule: tuple[RuleSampler, Rule] | None,
    ) -> None:
        batch = runner.input_batch
        self.levels = 0
        self._sampler = runner.sampler if rule is None else rule[0]
        self._rule = rule
        self._metadata: SamplingMetadata = batch.sampling_metadata
        self._logits = logits
        self._starts = step.sent.starts
        self._outputs: list[list[int]] = batch.req_output_token_ids[: batch.num_reqs]
        self._budgets = _thinking_budgets(self._metadata)
        self.follows = _follows_texts(self._metadata)
        self._last: list[int] = []
        self._logprobs: list[LogprobsTensors] = []

    @classmethod
    @contextmanager
    def along(
        cls,
        runner: TreeModelRunner,
        step: StepTrees,
        logits: torch.Tensor,
        rule: tuple[RuleSampler, Rule] | None,
    ) -> Iterator[_Draw]:
        """Penalties and stateful processors read the requests' output lists, which grow with the
        path and are cut back in the end: the engine appends the accepted tokens itself."""
        draw = cls(runner, step, logits, rule)
        lengths = [len(output) for output in draw._outputs]
        try:
            yield draw
        finally:
            for output, length in zip(draw._outputs, lengths, strict=True):
                del output[length:]
            draw._show_budgets(draw._budgets)

    def __call__(self, node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        # Only rejection sampling looks for the whole drafts.
        metadata = replace(self._metadata, spec_token_ids=[])
        if self.follows:
            active: list[bool] = alive.tolist()
            if self.levels:
                self._go_down(active)
            # Whoever has left its tree must not be counted again.
            self._show_budgets({row: each for row, each in self._budgets.items() if active[row]})
            # A generator moves on by one draw for each token that its request emits, no more.
            generators = self._metadata.generators.items()
            metadata.generators = {row: each for row, each in generators if active[row]}
        whole = len(self._logits) == len(node)
        logits = self._logits if whole else self._logits[self._starts + node]
        if self._rule is not None:
            sampler, rule = self._rule
            sampler.choose(lambda probs: rule(probs, node))
        sampled = self._sampler(logits, metadata)
        if sampled.logprobs_tensors is not None:
            self._logprobs.append(sampled.logprobs_tensors)
        tokens = sampled.sampled_token_ids.view(-1)
        if self.follows:
            self._last = tokens.tolist()
        self.levels += 1
        return tokens

    def _show_budgets(self, budgets: dict[int, Any]) -> None:
        if self._budgets:
            self._metadata.thinking_budget_state_holder._state = budgets

    def _go_down(self, active: list[bool]) -> None:
        for output, token, alive in zip(self._outputs, self._last, active, strict=True):
            if alive:
                output.append(token)
        for processor in self._metadata.logitsprocs.all:
            processor.update_state(None)

    def logprobs(self) -> LogprobsTensors | None:
        """The logprobs of all levels, request by request, as the engine parses them."""
        if not self._logprobs:
            return None
        fields = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        return LogprobsTensors(
            *(
                torch.stack([getattr(level, field) for level in self._logprobs], 1).flatten(0, 1)
                for field in fields
            )
        )
