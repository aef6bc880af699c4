"""Verification of draft trees with the engine's own sampler.

At each level of a tree the sampler gets one row per request, exactly as without speculation, after
the requests' output lists and logits processors have been brought to the state of that position.
So temperature, top-k, top-p, min-p, penalties, bad words, biases, seeds, logprobs and custom
processors need no second implementation.

On a GPU, requests that sample from a plain softmax are handled without a loop over levels: a token
is drawn for every row at once, and one kernel walks along the accepted path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from tree_kernels.adjacency import top_candidates
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, build_logitsprocs
from vllm.v1.sample.sampler import Sampler

from drafttree.acceptance_rules import AcceptanceRule, TreeRule
from drafttree.tree import DraftTree, Verified
from drafttree.verify import Chosen, draw_ahead, draws_ahead, verify_sampled, verify_target
from drafttree.vllm import patches
from drafttree.vllm.processors import follows_texts, is_active, thinking_budgets
from drafttree.vllm.step_logits import StepLogits
from drafttree.vllm.tree_rules import LogitsRows, choose_whole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from drafttree.vllm.acceptance_sampler import AcceptanceSampler
    from drafttree.vllm.step import StepTrees

Observe = Callable[[slice, torch.Tensor], torch.Tensor | None]
"""`(rows, logits [n, V])`: reads the logits of some rows of a step, and returns their argmax if it
has computed it, `int32 [n]`."""


def build_logits_processors(
    vllm_config: VllmConfig, device: torch.device, custom: Sequence[Any] | None
) -> LogitsProcessors:
    """Build all logits processors that the engine builds without speculation.

    With speculation the engine builds only one of them.
    """
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(plain, device, False, False, custom or ())


def is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Whether each request asks for the argmax of its raw logits and nothing else.

    Then the argmax that some drafters compute in `observe` can be used.
    """
    return (
        metadata.all_greedy
        and _asks_for_tokens_alone(metadata)
        and not any(map(is_active, metadata.logitsprocs.non_argmax_invariant))
    )


def _asks_for_no_logprobs(metadata: SamplingMetadata) -> bool:
    return metadata.max_num_logprobs is None and not metadata.logprob_token_ids


def _asks_for_tokens_alone(metadata: SamplingMetadata) -> bool:
    """Whether no request asks for logprobs or changes the raw logits, logits processors aside."""
    return (
        metadata.no_penalties
        and _asks_for_no_logprobs(metadata)
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and not thinking_budgets(metadata)
    )


def _follows_texts(metadata: SamplingMetadata, rule: AcceptanceRule | None) -> bool:
    """Whether the host needs the tokens of the levels above in order to sample a level."""
    return bool(
        # A rule chooses by numbers of its own, and advances no generator.
        (metadata.generators and rule is None)
        or not metadata.no_penalties
        or metadata.bad_words_token_ids
        or thinking_budgets(metadata)
        or any(map(follows_texts, metadata.logitsprocs.all))
    )


def _draws_from_softmax(metadata: SamplingMetadata, sampler: Sampler) -> bool:
    """Whether `draw_ahead` samples as the engine's own sampler would.

    It does where each request samples, unseeded, from the softmax of its raw logits at its
    temperature, which is 0 for greedy requests, and the sampler's noise is float32.
    """
    return (
        type(sampler) is Sampler
        and not sampler.use_fp64_gumbel
        and not metadata.generators
        and metadata.top_k is None
        and metadata.top_p is None
        and _asks_for_tokens_alone(metadata)
        and not any(map(is_active, metadata.logitsprocs.all))
    )


def sample_trees(
    batch: InputBatch,
    sampler: Sampler,
    trees: StepTrees,
    drafts: DraftTree,
    logits: StepLogits,
    max_depth: int,
    observe: Observe | None = None,
    rule: AcceptanceRule | None = None,
    ends: Mapping[int, Collection[int]] | None = None,
) -> tuple[SamplerOutput, Verified]:
    """Verify a step's trees.

    Args:
        batch: The engine's input batch.
        sampler: The engine's sampler; with a rule, an `AcceptanceSampler`.
        trees: Layout of the step's trees.
        drafts: The trees.
        logits: The target's raw logits.
        max_depth: Greatest depth of a node, or more.
        observe: Gets the logits of all rows before they are masked, if it is given.
        rule: Acceptance rule that chooses tokens in place of the sampler's random choice.
        ends: The tokens that end each seeded request, by its row in the batch.
    """
    metadata: SamplingMetadata = batch.sampling_metadata
    greedy = is_plain_greedy(metadata)
    ahead = not greedy and rule is None and draws_ahead(logits.first)
    ahead = ahead and _draws_from_softmax(metadata, sampler)
    chosen = []
    for rows, chunk in logits.chunks() if observe or greedy or ahead else ():
        best = observe(rows, chunk) if observe else None
        if logits.mask(rows, chunk):
            best = None
        if greedy:
            chosen.append(top_candidates(chunk, 1)[:, 0] if best is None else best)
        elif ahead:
            temperatures = metadata.temperature[trees.tensors.request_of_row[rows]]
            chosen.append(draw_ahead(chunk, temperatures))
    if chosen:
        target = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        verified = verify_target(drafts, trees.by_node(target), max_depth)
        return SamplerOutput(verified.emitted, logprobs_tensors=None), verified
    with _Draw.along(batch, sampler, trees, logits, rule, ends or {}) as draw:
        if isinstance(rule, TreeRule) and not metadata.all_greedy:
            chosen_whole = draw.choose_whole(rule, drafts)
            if chosen_whole.by_level is None and _asks_for_no_logprobs(metadata):
                verified = verify_target(drafts, chosen_whole.tokens, max_depth)
                return SamplerOutput(verified.emitted, logprobs_tensors=None), verified
        verified = verify_sampled(drafts, draw, max_depth, waits=draw.on_host or None)
    emitted = verified.emitted[:, : draw.levels]
    return SamplerOutput(emitted, logprobs_tensors=draw.logprobs()), verified


class _Draw:
    """Samples one level of the trees after another, as a `verify.Draw`.

    Attributes:
        levels: Number of levels sampled so far.
        on_host: Whether the host needs each level's tokens before the next is sampled.
    """

    def __init__(
        self,
        batch: InputBatch,
        sampler: Sampler,
        trees: StepTrees,
        logits: StepLogits,
        rule: AcceptanceRule | None,
        ends: Mapping[int, Collection[int]],
    ) -> None:
        self.levels = 0
        self._sampler = sampler
        self._rule = rule
        self._metadata: SamplingMetadata = batch.sampling_metadata
        self._logits = logits
        self._trees = trees
        self._starts = trees.root_rows
        self._outputs: list[list[int]] = batch.req_output_token_ids[: batch.num_reqs]
        self._budgets = thinking_budgets(self._metadata)
        self.on_host = _follows_texts(self._metadata, rule)
        self._last: list[int] = []
        self._ends = ends
        self._ended: set[int] = set()
        self._logprobs: list[LogprobsTensors] = []

    @classmethod
    @contextmanager
    def along(
        cls,
        batch: InputBatch,
        sampler: Sampler,
        trees: StepTrees,
        logits: StepLogits,
        rule: AcceptanceRule | None,
        ends: Mapping[int, Collection[int]],
    ) -> Iterator[_Draw]:
        """Sample along the trees, and restore the requests' state afterwards.

        Penalties and stateful processors read the requests' output lists, which grow along the
        path. The engine appends the accepted tokens itself afterwards.
        """
        draw = cls(batch, sampler, trees, logits, rule, ends)
        lengths = [len(output) for output in draw._outputs]
        try:
            yield draw
        finally:
            for output, length in zip(draw._outputs, lengths, strict=True):
                del output[length:]
            draw._set_budgets(draw._budgets)

    def choose_whole(self, rule: TreeRule, drafts: DraftTree) -> Chosen:
        """Let a rule choose for whole trees, before the first level is sampled."""
        self._set_budgets({})
        rows = torch.arange(len(self._trees.rows), device=self._starts.device)
        requests = self._trees.tensors.request_of_row
        self._rule = chosen = choose_whole(
            rule,
            cast("AcceptanceSampler", self._sampler),
            self._metadata,
            self._logits,
            LogitsRows(self._trees.by_node(rows), requests),
            drafts,
            self._outputs,
            self._budgets,
        )
        return chosen

    def __call__(self, node: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        # The sampler would append these drafts to the output lists, which contain the path already.
        metadata = replace(self._metadata, spec_token_ids=[])
        if self.on_host:
            active: list[bool] = alive.tolist()
            if self.levels:
                self._append_last(active)
            # Requests that have left their tree must not count a token twice.
            self._set_budgets({row: each for row, each in self._budgets.items() if active[row]})
            # A generator advances once for each token that its request emits. Where an accepted
            # draft has ended the answer, a session's next turn goes on with the generator.
            generators = self._metadata.generators.items()
            metadata.generators = {
                row: each for row, each in generators if active[row] and row not in self._ended
            }
        logits = self._logits.of(self._starts + node)
        if (rule := self._rule) is not None:
            cast("AcceptanceSampler", self._sampler).choose_with(lambda probs: rule(probs, node))
        sampled = self._sampler(logits, metadata)
        if sampled.logprobs_tensors is not None:
            self._logprobs.append(sampled.logprobs_tensors)
        tokens: torch.Tensor = sampled.sampled_token_ids.view(-1)
        if self.on_host:
            self._last = tokens.tolist()
            self._ended |= {row for row, ends in self._ends.items() if self._last[row] in ends}
        self.levels += 1
        return tokens

    def _set_budgets(self, budgets: dict[int, Any]) -> None:
        if self._budgets:
            holder = self._metadata.thinking_budget_state_holder
            patches.replace_budget_states(holder, budgets)

    def _append_last(self, active: list[bool]) -> None:
        """Append the last level's tokens to the output lists, and let processors read them."""
        for output, token, alive in zip(self._outputs, self._last, active, strict=True):
            if alive:
                output.append(token)
        for processor in self._metadata.logitsprocs.all:
            processor.update_state(None)

    def logprobs(self) -> LogprobsTensors | None:
        """The logprobs of all levels, request by request, as the engine expects them."""
        if not self._logprobs:
            return None
        fields = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        return LogprobsTensors(
            *(
                torch.stack([getattr(level, field) for level in self._logprobs], 1).flatten(0, 1)
                for field in fields
            )
        )
