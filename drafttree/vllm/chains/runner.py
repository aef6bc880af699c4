"""vLLM's model runner for chains that a model-free drafter drafts.

A chain is a tree without branches, so a step is that of trees, down to the verification with the
engine's own sampler, whose answers are those of plain decoding even for seeded requests. The
engine's rejection sampler would draw other random numbers than plain decoding does. But there is no
mask, and no KV has to be moved: attention and its metadata, slots, positions and recurrent states
are the engine's own. It rolls the states back to the last token that was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tree_kernels.kv_move import KvMover
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec
from vllm.v1.worker import gpu_model_runner

from drafttree.arrays import IntArray
from drafttree.chains import as_chains
from drafttree.target import Target
from drafttree.tree import DraftTree, Verified
from drafttree.vllm.drafters.model_free import ModelFreeRunner
from drafttree.vllm.forward import step_seconds
from drafttree.vllm.priming import MAX_TOKENS, prime_without_trees
from drafttree.vllm.step import StepState, StepTrees
from drafttree.vllm.structured.shapes import Proposal

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

ROLLS_BACK = (
    "BailingLinearAttentionMetadataBuilder",
    "GDNAttentionMetadataBuilder",
    "Mamba2AttentionMetadataBuilder",
    "ShortConvAttentionMetadataBuilder",
)
"""The kinds of recurrent layers that the engine's runner tells how many tokens were accepted."""

ROLLS_BACK_ON_CPU = ("GDNAttentionMetadataBuilder",)
"""Those whose code for a CPU uses that number."""


class ChainRunner(ModelFreeRunner):
    """Drafts chains, which the engine verifies with its own attention and state handling."""

    def _target(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        sizes_trees: bool = False,
    ) -> Target:
        target = super()._target(embed, sizes_trees=sizes_trees)
        return replace(target, longest_chain=self.num_spec_tokens)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Update the batch; requests that were left out of a step keep their accepted counts.

        Recurrent layers find a request's state by how many of its tokens were accepted last, which
        the engine forgets of requests that leave its batch for a step.
        """
        batch, scheduled = self.input_batch, scheduler_output.num_scheduled_tokens
        # The host has waited for the last step's tokens, and so for these counts.
        accepted = batch.num_accepted_tokens_cpu
        for name, row in batch.req_id_to_index.items():
            if name not in scheduled:
                self._left_out[name] = int(accepted[row])
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        arrived = (each.req_id for each in scheduler_output.scheduled_new_reqs)
        preempted = scheduler_output.preempted_req_ids or ()
        # These end, or are computed from the beginning.
        for name in (*scheduler_output.finished_req_ids, *preempted, *resumed, *arrived):
            self._left_out.pop(name, None)
        deferred = super()._update_states(scheduler_output)
        for name in [each for each in self._left_out if each in scheduled]:
            accepted[batch.req_id_to_index[name]] = self._left_out.pop(name)
        return deferred

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and refuse recurrent layers whose state is not rolled back."""
        super().initialize_kv_cache(*args, **kwargs)
        # How many tokens the last step accepted of running requests that are not in the batch.
        self._left_out: dict[str, int] = {}
        known = tuple(
            getattr(gpu_model_runner, name)
            for name in (ROLLS_BACK_ON_CPU if self.device.type == "cpu" else ROLLS_BACK)
            if hasattr(gpu_model_runner, name)
        )
        for groups in self.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                if isinstance(group.kv_cache_spec, MambaSpec) and not isinstance(builder, known):
                    raise ValueError(
                        f"the recurrent layers of model={self.model_config.model!r} "
                        f"({type(builder).__name__}) cannot drop drafts on this device in this "
                        "vLLM: leave the speculative method out"
                    )

    def _make_movers(self, *args: Any) -> list[list[KvMover]]:
        return []

    def _move_kv(self, trees: StepTrees, verified: Verified) -> None:
        """The accepted tokens are in their places already."""

    def _show_masks(self, step: StepState | None) -> None:
        """There are none: a chain is causal."""
        if step is not None and step.trees.drafted:
            parents = step.trees.parents
            assert ((parents < 0) | (parents == np.arange(parents.shape[1]) - 1)).all()

    def _propose(self, roots: IntArray) -> DraftTree:
        return as_chains(super()._propose(roots))

    def _bound_proposal(self, *args: Any) -> Proposal | None:
        proposal = super()._bound_proposal(*args)
        return None if proposal is None else proposal._replace(chain=True)

    def _timed_forwards(self) -> tuple[Callable[[int], float], int]:
        # The engine's dummy run builds the metadata of any backend.
        return lambda tokens: step_seconds(self, tokens), self._max_step_rows

    def _can_prime(self) -> bool:
        """Whether forwards outside of steps leave everything but a few blocks as it was."""
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        # A KV connector saves what layers write. Recurrent layers keep states in these blocks too.
        return (
            not has_kv_transfer_group()
            and all(isinstance(spec, AttentionSpec) for spec in specs)
            and not self._blocks_are_split()
        )

    def _blocks_are_split(self) -> bool:
        """Whether the attention of some layers numbers blocks that are smaller than the cache's."""
        return any(
            group.get_metadata_builder(0).kv_cache_spec.block_size != cache.kv_cache_spec.block_size
            for groups, cache in zip(
                self.attn_groups, self.kv_cache_config.kv_cache_groups, strict=True
            )
            for group in groups
        )

    def priming_blocks(self) -> int:
        """Number of blocks of the KV cache that `prime` can use."""
        return MAX_TOKENS if self._can_prime() else 0

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """Let the drafter compute something beforehand, if it can."""
        if not blocks:
            return 0, 0
        return prime_without_trees(self, self._drafter, blocks, idle=idle)
