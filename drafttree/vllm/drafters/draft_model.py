"""vLLM's model runner with a draft model beside the target.

The draft model's layers join the engine's KV cache groups, so they share the target's block tables:
both models read prompts, use cached prefixes, and have the KV of accepted paths moved. The
scheduler grants KV slots for as many draft tokens as the tree has columns, and the tree is sampled
at the beginning of the step that verifies it, when the slots exist.

Tensor-parallel ranks share the draft model's layers too, so all of them sample. After each level
they go on with the first rank's nodes, and its tokens are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.sample.sampler import Sampler

from drafttree.acceptance_rules import AcceptanceRule
from drafttree.arrays import IntArray
from drafttree.method import Method
from drafttree.model_drafters import DraftModelDrafter
from drafttree.seeds import Seeds
from drafttree.tensor_parallel import rule_of_first_rank, shape_of_first_rank
from drafttree.transfer import on_device
from drafttree.tree import NO_TOKEN, DraftTree
from drafttree.vllm.acceptance_sampler import AcceptanceSampler
from drafttree.vllm.drafters.child_distributions import adjusted, distributions
from drafttree.vllm.drafters.columns import of_first_rank, without_nodes
from drafttree.vllm.drafters.draft_graphs import DraftGraphs
from drafttree.vllm.drafters.draft_model_loader import PREFIX, load_draft_model
from drafttree.vllm.drafters.draft_model_texts import DraftModelTexts
from drafttree.vllm.drafters.in_step import PLACEHOLDER, InStepRunner, InStepState
from drafttree.vllm.drafters.level_forwards import LevelForwards, StepRows, with_columns
from drafttree.vllm.processors import GREEDY_BELOW
from drafttree.vllm.step import StepTrees


@dataclass
class DraftModelStep(InStepState):
    """A step whose trees are sampled from a draft model.

    Attributes:
        rule: The acceptance rule of the step's trees; None if the engine's sampler verifies them.
        outputs: Output tokens of the requests, see `DraftModelRunner._outputs`.
    """

    rule: AcceptanceRule | None = None
    outputs: torch.Tensor | None = None


class DraftModelRunner(InStepRunner[DraftModelStep]):
    """Drafts with a `DraftModelDrafter`."""

    dropped = (*InStepRunner.dropped, "_draft_model", "_draft_graphs", "_unread")
    _drafter: DraftModelDrafter

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        self._drafter = method.drafter(method.parse(options), self._target())
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)
        self._draft_path = str(options["model"])
        self._planned = self._drafter.columns
        self._unread: DraftModelTexts | None = None
        replica = self.parallel_config.data_parallel_index
        self._seeds = Seeds(self.device, self.model_config.seed, replica)
        self._rule_sampler = AcceptanceSampler(self.sampler)

    def _load_drafter(self) -> None:
        self._draft_model = load_draft_model(
            self._draft_path, self.vllm_config, self.load_config, self._drafter
        )
        rows = self.scheduler_config.max_num_batched_tokens
        self._draft_graphs = DraftGraphs(self._draft_model, rows, self.device)
        self._draft_graphs.capture_with(self.get_model(), lambda: self._step is not None)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, of which nothing is read yet."""
        super().initialize_kv_cache(*args, **kwargs)
        self._draft_graphs.forget()
        self._unread = None
        on_cpu = self.device.type == "cpu"
        if self._drafter.plans and on_cpu and not kwargs.get("is_profiling"):
            self._unread = DraftModelTexts(self, self._draft_graphs)

    def _propose(self, roots: IntArray) -> DraftTree:
        """Propose placeholders, for which the scheduler grants KV slots.

        All trees that the model has a part in have the same shape, so they are made on the host,
        which passes it on.
        """
        self._known = None
        if (unread := self._unread) is not None:
            slots = self._batch_slots()
            # A step that reads prompts alone is not measured, so it is none to try a shape in.
            if not (drafted := int((roots >= 0).sum())):
                return self._propose_without_model(slots, roots)
            texts = list(enumerate(self._read_in_step(len(roots))))
            shape = shape_of_first_rank(
                lambda: self._drafter.plan(slots, drafted, lambda: unread.count(texts)),
                get_tp_group(),
            )
            if not shape.depth:
                return self._propose_without_model(slots, roots)
            self._planned = self._drafter.follow_plan(shape)
        parents = torch.tensor(self._planned, dtype=torch.int32)
        parents = parents.expand(len(roots), -1).contiguous()
        tree_size = torch.full((len(roots),), parents.shape[1], dtype=torch.int32)
        trees = DraftTree(torch.full_like(parents, PLACEHOLDER), parents, tree_size)
        return self._as_declared(trees)

    def _read_in_step(self, count: int) -> list[int]:
        """How many tokens of the texts of `count` requests the target has read after a step."""
        batch, starts = self.input_batch, self.query_start_loc.np[: count + 1]
        # Up to the last row of the step, in which a prompt may be read in part. The last rows of
        # other requests may be those of rejected drafts.
        ends = batch.num_computed_tokens_cpu[:count] + np.diff(starts)
        lengths: list[int] = np.minimum(ends, batch.num_tokens_no_spec[:count] - 1).tolist()
        return lengths

    def _new_step(self, trees: StepTrees) -> DraftModelStep:
        return DraftModelStep(trees)

    def _draft(self, step: DraftModelStep, roots: torch.Tensor) -> DraftTree:
        """Sample the step's trees, and run the draft model over all of the step's tokens."""
        names = self.input_batch.req_ids
        seeds = self._seeds.of([self._seed(name) for name in names])
        lengths, levels = step.root_positions, self._level_forwards(step)
        known = self._trees_without_model(step, roots)
        if known is not None:
            self._read_undrafted(step, levels)
            rule = self._drafter.undrafted_rule(roots, seeds, lengths)
            step.rule = rule_of_first_rank(rule, get_tp_group())
            return known
        step.model_drafts = True
        self._catch_up(step)
        sampled = self._sampled(len(names))
        step.outputs = self._outputs(len(names))

        def forward(trees: DraftTree, first: int) -> torch.Tensor:
            if first:  # all ranks know the roots
                trees = of_first_rank(trees)
            return self._read(step, levels, trees, first, sampled)

        slots = self._batch_slots()
        trees, drawn = self._drafter.propose(slots, roots, seeds, lengths, sampled, forward)
        if self._drafter.tables is None:
            drafts = self._as_planned(step, of_first_rank(self._as_scheduled(step, trees)))
            self._show_trees(step, drafts.parents)
        else:
            drafts = self._place_trees(step, trees)
        rule = self._drafter.acceptance_rule(drafts, drawn)
        step.rule = rule_of_first_rank(rule, get_tp_group())
        return drafts

    def _read_undrafted(self, step: DraftModelStep, levels: LevelForwards) -> None:
        """Let the draft model read a step without its drafts, unless it may fall behind."""
        if self._unread is not None:
            self._unread.step_written(len(step.trees.position_offsets), read=False)
        else:
            levels.read_undrafted()

    def _catch_up(self, step: DraftModelStep) -> None:
        """Let the draft model read what it has missed of the step's texts."""
        if self._unread is None:
            return
        started = perf_counter()
        computed = self.input_batch.num_computed_tokens_cpu[: len(step.ends)]
        step.read_tokens = self._unread.read(enumerate(computed.tolist()))
        # Its own rows are read with the trees.
        self._unread.step_written(len(step.trees.position_offsets), read=True)
        step.read_seconds = perf_counter() - started

    def _as_planned(self, step: DraftModelStep, drafts: DraftTree) -> DraftTree:
        """Trees without those nodes for which another shape was scheduled.

        A request that was left out of a step keeps the placeholders, and their positions, of the
        shape that was planned before.
        """
        stored, sizes = step.trees.parents, step.trees.tree_sizes
        width = stored.shape[1]
        planned = np.full(width, NO_TOKEN, np.int32)
        planned[: len(self._planned)] = self._planned[:width]
        differs = (stored != planned) & (np.arange(width) < sizes[:, None])
        if not differs.any():
            return drafts
        others = on_device(differs.any(1), self.device)[:, None]
        return without_nodes(drafts, others.expand_as(drafts.tokens))

    def _level_forwards(self, step: DraftModelStep) -> LevelForwards:
        """How the draft model reads the step's rows."""
        trees, starts = step.trees, slice(len(step.trees.tree_sizes) + 1)
        rows = StepRows(
            *(step.input_ids, step.positions),
            *(self.query_start_loc.gpu[starts], self.query_start_loc.np[starts]),
            *(trees.tensors.tree_size, trees.tree_sizes),
            *(step.rows, step.root_positions),
        )
        return LevelForwards(self._draft_graphs, self.step_parts(PREFIX), rows)

    def _read(
        self,
        step: DraftModelStep,
        levels: LevelForwards,
        trees: DraftTree,
        first: int,
        sampled: torch.Tensor,
    ) -> torch.Tensor:
        """A `DraftForward` within the step."""
        requests, width = step.rows.shape
        columns = trees.tokens.shape[1]
        if first >= width:  # the engine scheduled none of these columns
            shape = requests, columns - first, self._vocab_size
            return torch.zeros(shape, device=self.device)
        last = min(columns, width)
        if first == 0:
            hidden = levels.read_roots()[:, None]
        else:
            known = trees.truncated(last - 1)
            if self._drafter.tables is not None:
                known = self._place_nodes(step, known)
            hidden = levels.read_level(first, known)
        if columns == len(self._planned):
            return hidden[:0]  # nothing is drafted below the leaves
        logits = self._drafter.logits(hidden.flatten(0, 1), self._draft_model.compute_logits)
        logits = logits.float().view(requests, last - first, -1)
        metadata = self.input_batch.sampling_metadata
        logits = adjusted(logits, metadata, step.outputs, trees, first)
        return with_columns(distributions(logits, metadata, sampled), columns - first)

    def _max_depth(self, step: DraftModelStep) -> int:
        if self._drafter.tables is None and step.model_drafts:
            return step.trees.max_depth  # that of placeholders, which have the trees' shape
        return super()._max_depth(step)

    def _sampler_and_rule(self, step: DraftModelStep) -> tuple[Sampler, AcceptanceRule | None]:
        return (self.sampler if step.rule is None else self._rule_sampler), step.rule

    # What the distributions from which children are sampled depend on.

    @property
    def _vocab_size(self) -> int:
        return int(self.model_config.get_vocab_size())

    def _seed(self, name: str) -> int | None:
        """The seed of a request, if it has one."""
        parameters = self.requests[name].sampling_params
        return None if parameters is None else parameters.seed

    def _sampled(self, count: int) -> torch.Tensor:
        """Whether each of `count` requests is sampled rather than greedy, `bool [B]`."""
        temperature = self.input_batch.sampling_metadata.temperature
        if temperature is None:
            return torch.zeros(count, dtype=torch.bool, device=self.device)
        return temperature >= GREEDY_BELOW

    def _outputs(self, count: int) -> torch.Tensor | None:
        """The output tokens of `count` requests where penalties need them, `int64 [B, n]`.

        They are padded with -1.
        """
        if self.input_batch.sampling_metadata.no_penalties:
            return None
        given = self.input_batch.req_output_token_ids[:count]
        padded = np.full((count, max(map(len, given), default=0)), NO_TOKEN, np.int64)
        for row, tokens in zip(padded, given, strict=True):
            row[: len(tokens)] = tokens
        return on_device(padded, self.device)
