"""vLLM's V2 model runner with a draft model beside the target.

The draft model's layers join the engine's KV cache groups, so they share the target's block tables:
both models read prompts, use cached prefixes, and have the KV of accepted paths moved. Each step
samples its tree level by level, right before the target verifies it. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from tree_kernels.kv_move import KvMover
from tree_kernels.mask import depths
from tree_kernels.scheduled_trees import Layout
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from drafttree.drafter import AcceptanceRule, DraftModelDrafter
from drafttree.method import Method
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.drafters.columns import without_nodes
from drafttree.vllm.drafters.draft_model_loader import PREFIX, load_draft_model
from drafttree.vllm.drafters.level_forwards import LevelForwards, StepRows
from drafttree.vllm.v2.in_step import InStepRunnerV2


class DraftModelRunnerV2(InStepRunnerV2):
    """Drafts with a `DraftModelDrafter`."""

    _drafter: DraftModelDrafter
    _drawn: Any = None
    _movers_apart: Sequence[list[list[KvMover]]] = ()

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and movers that compact those of one of the models alone."""
        self._movers_apart = ()
        super().initialize_kv_cache(*args, **kwargs)
        if self._movers:

            def is_draft(name: str) -> bool:
                return name.startswith(PREFIX)

            def is_target(name: str) -> bool:
                return not is_draft(name)

            self._movers_apart = [*map(self._make_movers, (is_target, is_draft))]

    def _make_drafter(self, method: Method[Any], options: Any) -> None:
        self._drafter = method.drafter(options, self._target())
        path = str(options.model)
        self._draft_model = load_draft_model(path, self.vllm_config, self.load_config)
        parents = torch.tensor([self._drafter.columns], dtype=torch.int32)
        size = torch.tensor([parents.shape[1]], dtype=torch.int32)
        self._column_depths = depths(parents, size)[0].to(self.device)

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
        levels = LevelForwards(self._draft_model, self._parts(batch, PREFIX), rows)
        if step.width == 1:
            levels.read_undrafted()
            return step
        columns = pad(self._column_depths, (0, max(step.width - len(self._column_depths), 0)))
        self._write_depths(batch, step, columns[None, : step.width].expand_as(step.parents))

        def forward(trees: DraftTree, first: int) -> torch.Tensor:
            return self._read(batch, step, levels, trees, first)

        sampled = states.temperature.gpu[slots] > 0
        trees, drawn = self._drafter.propose(
            slots, self._roots_read, self._seeds, lengths, sampled, forward
        )
        trees = self._scheduled(step, trees)
        trees = without_nodes(trees, self._undrafted(batch, step)[:, None].expand_as(trees.tokens))
        trees, columns_drawn = self._cut(batch, trees)
        self._drawn = drawn, columns_drawn
        if columns_drawn is not None:
            # A chain's node is in the column of its depth.
            depth = depths(trees.parents, step.sizes)
            self._write_depths(batch, step, depth - columns[None, : step.width])
        self._write_tokens(batch, step, trees)
        self._show_trees(step, trees.parents)
        return step._replace(parents=trees.parents)

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
        known = self._scheduled(step, trees)
        self._write_tokens(batch, step, known)
        if first == 0:
            hidden = levels.read_roots()[:, None]
        else:
            hidden = levels.read_level(first, known.parents[:, :last])
        if columns == len(self._drafter.columns):
            return hidden[:0]  # nothing is drafted below the leaves
        logits = self._draft_model.compute_logits(hidden.flatten(0, 1)).float()
        probs = self._distributions(batch, step, logits, slice(first, last))
        return pad(probs.view(requests, last - first, -1), (0, 0, 0, columns - last))

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
