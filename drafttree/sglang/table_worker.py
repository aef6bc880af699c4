"""The worker of methods that draft without a model, from what the target said before."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from drafttree.calibration import calibrate, of_one_request
from drafttree.drafter import Drafter, DraftTree
from drafttree.method import Method
from drafttree.sglang.forward import forward_seconds
from drafttree.sglang.sampling import verify_trees
from drafttree.sglang.worker import TreeWorker
from drafttree.verify import Verified

# Below SGLang's own logger, or nothing would print it.
logger = logging.getLogger(f"sglang.{__name__}")


class TableWorker(TreeWorker):
    """Drafts with a `Drafter`, which sees all of the target's logits."""

    drafter: Drafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots: dict[str, int] = {}
        self._learn_from_prefill()

    def _make_drafter(self, method: Method) -> Drafter:
        drafter: Drafter = method.make_drafter(
            self._options,
            self._vocab_size,
            self._device,
            self._runner.server_args.model_path,
            logger,
        )
        return drafter

    @property
    def draft_worker(self) -> None:
        """There is no draft model."""
        return None

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's pools, and make room for as many requests' texts."""
        super().alloc_memory_pool(**pools)
        self.drafter.allot(*self.req_to_token_pool.req_to_token.shape)

    def init_cuda_graphs(self) -> None:
        """The host's last call before it serves: time forwards of the model as it will run."""
        super().init_cuda_graphs()
        if self._device.type != "cpu":
            return
        room = min(self.token_to_kv_pool_allocator.size, self._runner.model_config.context_len)

        calibrate(
            self.drafter,
            of_one_request(lambda *shape: forward_seconds(self._runner, *shape), room),
            min(room, self._options.num_nodes + 1),
            logger,
        )

    def explain(self) -> list[dict[str, Any]]:
        """How the drafter chose the sizes of its trees."""
        return self.drafter.explain()

    def acceptance(self) -> dict[str, Any]:
        """How often what the drafter drafted was accepted."""
        return self.drafter.acceptance()

    def _learn_from_prefill(self) -> None:
        """Sampling writes into the logits, so the drafter must look at them right before.

        The runner is this process's own instance and has no hook there.
        """
        sample = self._runner.sample

        @functools.wraps(sample)
        def sample_after_learning(logits_output: Any, forward_batch: Any) -> torch.Tensor:
            if forward_batch.forward_mode.is_extend_without_speculative():
                lengths = forward_batch.extend_seq_lens
                last = lengths.cumsum(0) - 1
                tokens = forward_batch.input_ids.int()
                before = tokens[(last - 1).clamp(min=0)].masked_fill(lengths < 2, -1)
                self.drafter.observe(
                    forward_batch.req_pool_indices,
                    tokens[last],
                    before,
                    logits_output.next_token_logits,
                )
            return sample(logits_output, forward_batch)

        self._runner.sample = sample_after_learning

    def _requests_ended(self, names: list[str]) -> None:
        self.drafter.release([self._slots.pop(name) for name in names if name in self._slots])

    def _forget(self) -> None:
        self.drafter.reset()

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        # Parts of a prompt, and requests that were retracted, begin anew: all that is known of
        # them is there each time.
        self._requests_ended([request.rid for request in batch.reqs])
        for request, slot in zip(batch.reqs, batch.req_pool_indices.tolist(), strict=True):
            for name in [name for name, held in self._slots.items() if held == slot]:
                del self._slots[name]  # it was retracted, and may never come back
            self._slots[request.rid] = slot
            self.drafter.start(slot, [*request.origin_input_ids, *request.output_ids])
        result = super()._forward_prompt(batch)
        self.drafter.extend(batch.req_pool_indices, result.next_token_ids[:, None].int())
        return result

    def _propose(self, batch: Any) -> DraftTree:
        slots = batch.req_pool_indices
        roots, drafting = self._states.roots[slots], self._states.drafting[slots]
        if self._device.type == "cpu" and not drafting.any():
            return DraftTree.of_roots(roots)
        trees = self.drafter.propose(slots, roots.masked_fill(~drafting, -1))
        trees.tokens[:, 0] = roots
        return trees

    def _verify(self, batch: Any, trees: DraftTree, output: Any) -> Verified:
        slots = batch.req_pool_indices
        before = trees.before(self.drafter.before(slots))
        of_rows = slots.repeat_interleave(trees.tokens.shape[1])
        best = self.drafter.observe(
            of_rows, trees.tokens.flatten(), before.flatten(), output.next_token_logits
        )
        verified = verify_trees(
            self._runner,
            batch,
            trees,
            self.drafter.max_depth,
            output,
            best.view_as(trees.tokens),
            self._penalties_of(batch),
        )
        self.drafter.accepted(slots, trees, verified)
        return verified
