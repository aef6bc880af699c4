"""SGLang's workers whose drafter, or a part of it, observes the target's logits."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from drafttree.drafter import ModelFreeDrafter
from drafttree.sglang.model_inputs import text_without_placeholders, without_placeholders
from drafttree.sglang.patches import observe_prefill, use_idle_rounds
from drafttree.sglang.priming import MAX_TOKENS, child_logits, lent_slots
from drafttree.sglang.state import Step
from drafttree.sglang.worker import Publish, TreeWorker
from drafttree.tensor_parallel import prime_ranks


class ObservingWorker(TreeWorker):
    """Passes texts and logits to a `ModelFreeDrafter`, and lets it prime."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._primed = 0, 0
        if self._observing is not None:
            observe_prefill(self._runner, self._observe_prefill)
            use_idle_rounds()

    @property
    def _observing(self) -> ModelFreeDrafter | None:
        """The drafter that observes; None if there is none."""
        raise NotImplementedError

    def init_cuda_graphs(self) -> None:
        """SGLang's last call before it serves: let the drafter time forwards, and prime."""
        super().init_cuda_graphs()
        if self._observing is not None:
            self._prime(None, idle=False)

    def weights_changed(self) -> None:
        """Forget everything learned from the old weights, and look again for what to prime."""
        super().weights_changed()
        if self._observing is not None:
            self._primed = 0, 1

    def drafttree_prime(self, tree_cache: Any) -> tuple[int, int] | None:
        """While no request is running: let the drafter prime in one short forward.

        Args:
            tree_cache: SGLang's cache of prefixes.

        Returns:
            How much is computed, and how much there is in all; None while the KV pool has no room.
        """
        done, everything = self._primed
        if done < everything and not self._prime(tree_cache, idle=True):
            return None
        return self._primed

    def _prime(self, tree_cache: Any, *, idle: bool) -> bool:
        """Let the drafter prime, and return whether the KV pool has room for it."""
        drafter = self._observing
        assert drafter is not None
        tree_size = self._num_draft_tokens + 1
        on_cpu = self._device.type == "cpu"
        allocator = self.token_to_kv_pool_allocator
        # On a GPU, SGLang's backends are laid out for the largest trees.
        row = self.req_to_token_pool.req_to_token.shape[1]
        most = min(MAX_TOKENS + 1, allocator.size, row) if on_cpu else tree_size
        with lent_slots(allocator, tree_cache, most) as slots:
            if slots is None:
                return False

            def forward(root: int | None, tokens: torch.Tensor) -> torch.Tensor:
                width = len(tokens) + (root is not None) if on_cpu else tree_size
                return child_logits(self._runner, root, tokens, slots, width)

            self._primed = prime_ranks(
                drafter, forward, most - 1, self._group, self._device, idle=idle
            )
        return True

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        if self._observing is not None:
            # The forward may write other ids over those that stand for images.
            self._read = without_placeholders(self._runner.model_config, batch.input_ids)
        return super()._prefill(batch, on_publish)

    def _observe_prefill(self, batch: Any, logits: torch.Tensor) -> None:
        drafter, lengths = self._observing, batch.extend_seq_lens
        assert drafter is not None
        last = lengths.cumsum(0) - 1
        tokens = self._read
        previous = tokens[(last - 1).clamp(min=0)].masked_fill(lengths < 2, -1)
        drafter.observe(batch.req_pool_indices, tokens[last], previous, logits)

    def _start_request(self, request: Any, slot: int) -> None:
        if self._observing is not None:
            config = self._runner.model_config
            self._observing.start(slot, text_without_placeholders(config, request))

    def _observe_trees(self, step: Step, output: Any) -> torch.Tensor | None:
        """Show the logits of a step's trees; the argmax of each row, if it is known then."""
        drafter = self._observing
        if drafter is None:
            return None
        slots, tokens = step.batch.req_pool_indices, step.trees.tokens
        previous = step.trees.previous_tokens(drafter.previous_tokens(slots))
        return drafter.observe(
            slots.repeat_interleave(tokens.shape[1]),
            tokens.flatten(),
            previous.flatten(),
            output.next_token_logits,
        )
