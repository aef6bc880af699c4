"""vLLM's V2 model runner with a draft model beside the target.

The draft model's layers join the engine's KV cache groups, so they share the target's block tables:
both models read prompts, use cached prefixes, and have the KV of accepted paths moved. Each step
samples its tree level by level, right before the target verifies it. Where shapes are chosen, the
draft model reads nothing while nothing is drafted, and then what it has missed. The host waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad
from tree_kernels.kv_move import KvMover
from tree_kernels.mask import depths
from tree_kernels.scheduled_trees import Layout
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from drafttree.acceptance_rules import AcceptanceRule
from drafttree.method import Method
from drafttree.model_drafters import DraftModelDrafter
from drafttree.transfer import all_on_device
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.drafters.draft_graphs import DraftGraphs
from drafttree.vllm.drafters.draft_model_loader import PREFIX, load_draft_model
from drafttree.vllm.drafters.level_forwards import LevelForwards, StepRows, with_columns
from drafttree.vllm.drafters.step_parts import StepParts
from drafttree.vllm.drafters.text_rows import group_of
from drafttree.vllm.v2.hooks import check_sampler
from drafttree.vllm.v2.in_step import InStepRunnerV2
from drafttree.vllm.v2.missed_texts import MissedTexts, pieces

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class DraftModelRunnerV2(InStepRunnerV2):
    """Drafts with a `DraftModelDrafter`."""

    dropped = (
        *InStepRunnerV2.dropped,
        *("_draft_model", "_draft_graphs", "_movers_apart", "_missed", "_drawn"),
    )
    _drafter: DraftModelDrafter
    _drawn: Any = None
    _movers_apart: Sequence[list[list[KvMover]]] = ()
    _missed: MissedTexts | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and movers that compact those of one of the models alone."""
        self._movers_apart = ()
        super().initialize_kv_cache(*args, **kwargs)
        self._draft_graphs.forget()
        self._missed = self._no_missed_texts() if self._plans else None
        if self._movers:

            def is_draft(name: str) -> bool:
                return name.startswith(PREFIX)

            def is_target(name: str) -> bool:
                return not is_draft(name)

            self._movers_apart = [*map(self._make_movers, (is_target, is_draft))]

    def _make_drafter(self, method: Method[Any], options: Any) -> None:
        check_sampler(self.sampler, self.max_num_reqs)
        self._drafter = method.drafter(options, self._target())
        path = str(options.model)
        self._draft_model = load_draft_model(
            path, self.vllm_config, self.load_config, self._drafter
        )
        rows = self.scheduler_config.max_num_batched_tokens
        self._draft_graphs = DraftGraphs(self._draft_model, rows, self.device)
        self._draft_graphs.capture_with(self.get_model(), lambda: self._step is not None)
        self._planned = self._drafter.columns
        # Known before any step, which would wait for them. The largest shape is the last one.
        planned = self._planned, *map(self._drafter.follow_plan, self._reports.shapes)
        most = 1 + self.num_speculative_steps
        self._depths_of = {each: _column_depths(each, most).to(self.device) for each in planned}

    def _no_missed_texts(self) -> MissedTexts:
        """What the draft model has missed: nothing yet."""
        self._cache_group = group_of(self, PREFIX)
        size = self.block_tables.block_sizes[self._cache_group]
        return MissedTexts(self.max_num_reqs, size, self.kv_cache_config.num_blocks)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Add the requests that start, whose first blocks may have KV already."""
        super().add_requests(scheduler_output)
        if self._missed is None:
            return
        for request in scheduler_output.scheduled_new_reqs:
            row = self.req_states.req_id_to_index[request.req_id]
            blocks = request.block_ids[self._cache_group]
            self._missed.start(row, blocks, request.num_computed_tokens)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Give the running requests further blocks."""
        super().update_requests(scheduler_output)
        if self._missed is None:
            return
        running = scheduler_output.scheduled_cached_reqs
        for name, blocks in zip(running.req_ids, running.new_block_ids, strict=True):
            if blocks is not None:
                row = self.req_states.req_id_to_index[name]
                self._missed.append(row, blocks[self._cache_group])

    def _stop(self, row: int) -> None:
        super()._stop(row)
        if self._missed is not None:
            self._missed.stop(row)

    def _num_unread(self, batch: InputBatch) -> int:
        return 0 if self._missed is None else int(self._missed.of(batch.idx_mapping_np).sum())

    def draft(self, batch: InputBatch, step: Layout) -> Layout:
        """Sample the trees; the draft model reads each of the step's rows once."""
        slots, states = batch.idx_mapping, self.sampler.sampling_states
        self._roots_read, lengths = self._roots(batch, step)
        self._seeds, self._lengths = states.seeds.gpu[slots], lengths
        self._drawn = None
        starts = slice(batch.num_reqs + 1)
        rows = StepRows(
            *(batch.input_ids, batch.positions),
            *(batch.query_start_loc[starts], batch.query_start_loc_np[starts]),
            *(step.sizes, np.diff(batch.cu_num_logits_np)),
            *(step.place_of_node, lengths),
        )
        parts = self._parts(batch.num_reqs, PREFIX)
        levels = LevelForwards(self._draft_graphs, parts, rows)
        if step.width == 1:
            self._read_undrafted(batch, levels)
            return step
        if self._plans:
            self._planned = self._drafter.follow_plan(self._shape_of(step))
        if self._missed is not None:
            with self._clock.reading():
                self._clock.read_tokens = self._read_missed(self._missed, batch, parts)
        column_depths = self._depths_of[self._planned][batch.expanded_local_pos.long()]
        self._move_rows(batch, column_depths)

        def forward(trees: DraftTree, first: int) -> torch.Tensor:
            return self._read(batch, step, levels, trees, first)

        sampled = states.temperature.gpu[slots] > 0
        trees, drawn = self._drafter.propose(
            slots, self._roots_read, self._seeds, lengths, sampled, forward
        )
        trees = self._scheduled(step, trees, self._undrafted(batch, step))
        trees, columns_drawn = self._cut(batch, trees)
        self._drawn = drawn, columns_drawn
        if columns_drawn is not None:
            # A chain's node is in the column of its depth.
            self._write_tokens(batch, step, trees)
            depth = step.by_row(depths(trees.parents, step.sizes), batch.expanded_local_pos)
            self._move_rows(batch, depth - column_depths)
        self._show_trees(step, trees.parents)
        return step._replace(parents=trees.parents)

    def _read_undrafted(self, batch: InputBatch, levels: LevelForwards) -> None:
        """Let the draft model read a step without drafts, unless it may fall behind."""
        if self._missed is None:
            levels.read_undrafted()
            return
        counts = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
        # The outcomes of drafts in two steps may be unknown when a step is scheduled.
        unknown = np.where(batch.is_prefilling_np, 0, 2 * self.num_speculative_steps)
        earliest = (batch.num_computed_tokens_np - unknown).clip(min=0)
        self._missed.miss(batch.idx_mapping_np, counts, earliest)

    def _read_missed(self, missed: MissedTexts, batch: InputBatch, parts: StepParts) -> int:
        """Let the draft model read what it has missed of the step's texts; returns how many tokens.

        It reads the step's own rows after that, with the trees.
        """
        rows = batch.idx_mapping_np
        counts = missed.of(rows)
        first_rows = batch.query_start_loc[: batch.num_reqs].long()
        texts = self.req_states.all_token_ids.gpu
        for places, behind, read in pieces(counts):
            place = np.repeat(places, read)
            # How far each token is before the first row of its request in this step.
            ahead = np.repeat(behind + read.cumsum() - read, read) - np.arange(read.sum())
            of_rows, before = all_on_device((place, ahead), self.device)
            positions = batch.positions[first_rows[of_rows]] - before
            with parts.reading_before(places, read, positions):
                self._draft_graphs.forward(texts[batch.idx_mapping[of_rows], positions], positions)
        missed.read(rows)
        return int(counts.sum())

    def _read(
        self,
        batch: InputBatch,
        step: Layout,
        levels: LevelForwards,
        trees: DraftTree,
        first: int,
    ) -> torch.Tensor:
        """A `DraftForward` within the step."""
        requests, columns = trees.tokens.shape
        if first >= step.width:  # the engine scheduled none of these columns
            return torch.zeros(requests, columns - first, self.vocab_size, device=self.device)
        last = min(columns, step.width)
        if first == 0:
            hidden = levels.read_roots()[:, None]
        else:
            hidden = levels.read_level(first, trees.truncated(last - 1))
        if columns == len(self._planned):
            return hidden[:0]  # nothing is drafted below the leaves
        logits = self._drafter.logits(hidden.flatten(0, 1), self._draft_model.compute_logits)
        probs = self._distributions(batch, step, logits.float(), slice(first, last))
        return with_columns(probs.view(requests, last - first, -1), columns - first)

    def _distributions(
        self, batch: InputBatch, step: Layout, logits: torch.Tensor, columns: slice
    ) -> torch.Tensor:
        """Distributions of the children, `float32 [B * n, V]`, with the target's own filters.

        Verification is lossless with any distribution here, but the closer it is to the target's,
        the more drafts are accepted. What depends on a text, as penalties do, is left to it.

        Args:
            batch: The engine's batch.
            step: The step.
            logits: The draft model's, float32 `[B * n, V]`.
            columns: The columns of the nodes.
        """
        if not self.sampler.needs_logits_processing[batch.idx_mapping_np].any():
            return logits.softmax(-1)
        rows = batch.logits_indices[step.row_of_node[:, columns].flatten()]
        count = columns.stop - columns.start
        slots = batch.idx_mapping.repeat_interleave(count, output_size=len(logits))
        places = torch.arange(columns.start, columns.stop, device=self.device)
        context = LogitsContext(
            expanded_idx_mapping=slots,
            idx_mapping=batch.idx_mapping,
            idx_mapping_np=batch.idx_mapping_np,
            expanded_local_pos=places.int().repeat(len(batch.req_ids)),
            input_ids=batch.input_ids[rows],
            pos=batch.positions[rows],
            seq_lens_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy(),
        )
        states, biases = self.sampler.sampling_states, self.sampler.logits_processors[0]
        logits = biases.apply(logits, context)
        states.apply_temperature(logits, slots, batch.idx_mapping_np)
        states.apply_min_p(logits, slots, batch.idx_mapping_np)
        filtered: torch.Tensor = states.apply_top_k_top_p(logits, slots, batch.idx_mapping_np)
        return filtered.softmax(-1)

    def _rule(self, trees: DraftTree, requests: slice) -> AcceptanceRule | None:
        assert self._batch is not None
        slots = self._batch.idx_mapping_np[requests]
        if not self.sampler.sampling_states.temperature.np[slots].any():
            return None  # the most likely tokens follow, whatever was drafted
        if self._drawn is None:
            return self._drafter.undrafted_rule(
                self._roots_read[requests], self._seeds[requests], self._lengths[requests]
            )
        drawn, columns = self._drawn
        of_nodes = None if columns is None else columns[requests]
        return self._drafter.acceptance_rule(trees, drawn, requests, of_nodes)

    def _move_kv(self, step: Layout, verified: Verified) -> None:
        """Move the accepted path's KV; the draft model has that of chains where it drew them."""
        columns = None if self._drawn is None else self._drawn[1]
        if columns is None:
            super()._move_kv(step, verified)
            return
        nodes = columns.gather(1, verified.path.clamp(min=0).long())
        drawn = nodes.masked_fill(verified.path < 0, -1).int()
        for movers, path in zip(self._movers_apart, (verified.path, drawn), strict=True):
            self._compact(step, path, movers)


def _column_depths(columns: tuple[int, ...], most: int) -> torch.Tensor:
    """The depth of each column of trees whose columns have these parents, `int64 [most]`.

    The engine may schedule more columns than these, which hold no nodes.
    """
    parents = torch.tensor([columns], dtype=torch.int32)
    size = torch.tensor([len(columns)], dtype=torch.int32)
    return pad(depths(parents, size)[0].long(), (0, max(most - len(columns), 0)))
