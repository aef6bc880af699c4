"""SGLang's worker for methods whose drafter continues the target's hidden states.

The KV of the drafter's layer uses the target's slots, so cached prefixes are valid for both. At the
end of a step the layer reads the accepted tokens, each with the target's hidden state before it; in
the next step it continues from its own output in the slots that are reserved for the tree.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from drafttree.drafter import HiddenStateDrafter
from drafttree.sglang.kv_cache import LayerCache
from drafttree.sglang.patches import count_layer_memory, match_prefixes_by_bigrams
from drafttree.sglang.state import Proposal, Step
from drafttree.sglang.worker import TreeWorker
from drafttree.tree import Verified


class HiddenStateWorker(TreeWorker):
    """Drafts with a `HiddenStateDrafter`.

    Attributes:
        draft_seconds: Host time spent in decode steps, apart from the target's forwards.
    """

    drafter: HiddenStateDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draft_seconds = 0.0
        count_layer_memory()
        match_prefixes_by_bigrams()

    @property
    def draft_worker(self) -> None:
        """None, because the layer is not a draft model to SGLang."""
        return None

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's memory pools, and give the layer a KV cache in the same slots."""
        super().alloc_memory_pool(**pools)
        keys = self.token_to_kv_pool_allocator.get_kvcache().k_buffer[0]
        _, heads, size = self.drafter.heads
        self._cache = LayerCache(len(keys), heads, size, self._runner.dtype)
        width = self._runner.model_config.hidden_size
        slots = self.req_to_token_pool.req_to_token.shape[0]
        # The layer's output at each request's last known token.
        self._outputs = torch.zeros(slots, width, dtype=self._runner.dtype)

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        counts, lengths = list(batch.extend_lens), batch.seq_lens.tolist()
        ends = torch.tensor(counts).cumsum(0) - 1
        following = batch.input_ids.roll(-1)
        for row, (request, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            known = request.origin_input_ids + request.output_ids
            # After a partial prefill the next token is known.
            sampled = int(result.next_token_ids[row])
            following[ends[row]] = known[length] if length < len(known) else sampled
        self._read(batch, result.logits_output.hidden_states, following, counts, lengths)
        self._prompts_verified(batch, result.next_token_ids)
        return result

    def _read(
        self,
        batch: Any,
        hidden: torch.Tensor,
        following: torch.Tensor,
        counts: list[int],
        lengths: list[int],
    ) -> None:
        """Run the layer over known tokens, and keep its output at each request's last one.

        Args:
            batch: SGLang's batch.
            hidden: `[N, d]`, the target's hidden states, request by request.
            following: `int [N]`, the token after each of them.
            counts: Number of rows of each request.
            lengths: Length of each request, these rows included.
        """
        table = self.req_to_token_pool.req_to_token
        indices = batch.req_pool_indices.tolist()
        slots = [table[i, :length].long() for i, length in zip(indices, lengths, strict=True)]
        positions = torch.cat(
            [torch.arange(end - n, end) for end, n in zip(lengths, counts, strict=True)]
        )
        outputs = self.drafter.layer(
            self.drafter.fuse(hidden, following),
            positions,
            partial(self._cache.attend, counts=counts, slots=slots),
        )
        ends = torch.tensor(counts).cumsum(0) - 1
        self._outputs[batch.req_pool_indices] = outputs[ends]

    def _propose(self, batch: Any) -> Proposal:
        started = perf_counter()
        indices = batch.req_pool_indices
        outputs = self._continue(batch)
        # SGLang's own product, as it keeps the head packed on some CPUs.
        model = self._runner.model
        rows = torch.stack(outputs, 1).flatten(0, 1)
        logits = model.logits_processor._compute_lm_head(rows, model.lm_head)
        logits = logits[:, : self._vocab_size].unflatten(0, (-1, len(outputs)))
        steps = torch.full((len(indices),), len(outputs))
        steps = steps.masked_fill(~self._states.drafting[indices], 0)
        trees = self.drafter.propose(indices, self._states.roots[indices], logits, steps)
        self.draft_seconds += perf_counter() - started
        return Proposal(trees)

    def _continue(self, batch: Any) -> list[torch.Tensor]:
        """The layer's outputs `[B, d]` of each step of the draft."""
        indices = batch.req_pool_indices
        table = self.req_to_token_pool.req_to_token
        steps, lengths = self.drafter.max_depth, batch.seq_lens.tolist()
        reserved = [
            table[i, : length + steps - 1].long()
            for i, length in zip(indices.tolist(), lengths, strict=True)
        ]
        output = self._outputs[indices]
        outputs = [output]
        for ahead in range(1, steps):
            slots = [found[: len(found) - steps + 1 + ahead] for found in reserved]
            output = self.drafter.layer(
                self.drafter.between(output),
                batch.seq_lens + ahead - 1,
                partial(self._cache.attend, counts=[1] * len(slots), slots=slots),
            )
            outputs.append(output)
        return outputs

    def _forward_verify(self, batch: Any) -> GenerationBatchResult:
        return self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )

    def _verify(self, step: Step, output: Any) -> Verified:
        hidden = output.hidden_states.view(*step.trees.tokens.shape, -1)
        verified = self._verify_trees(step, output)
        started = perf_counter()
        path, accepted = verified.path.long(), verified.path >= 0
        rows = torch.arange(len(path))[:, None].expand_as(path)
        counts = accepted.sum(1)
        self._read(
            step.batch,
            hidden[rows[accepted], path[accepted]],
            verified.emitted[accepted].long(),
            counts.tolist(),
            (step.batch.seq_lens + counts).tolist(),
        )
        self.draft_seconds += perf_counter() - started
        return verified
