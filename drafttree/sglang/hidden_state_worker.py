"""The worker of methods whose drafter continues the target's hidden states.

The drafter's layer has KV of its own in the target's slots, so cached prefixes hold for both. At
the end of a step it reads what the step accepted, each token with the target's hidden state before
it; in the next it goes on by itself in the slots that are reserved for the tree.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from torch.nn import functional as F

from drafttree.drafter import DraftTree, HiddenStateDrafter, TargetParts
from drafttree.method import Method
from drafttree.sglang.layer_cache import (
    LayerCache,
    count_layer_memory,
    match_prefixes_by_pairs,
)
from drafttree.sglang.sampling import verify_trees
from drafttree.sglang.worker import TreeWorker
from drafttree.verify import Verified


class HiddenStateWorker(TreeWorker):
    """Drafts with a `HiddenStateDrafter`.

    Attributes:
        draft_seconds: the host's time spent in decode steps, apart from the target's.
    """

    drafter: HiddenStateDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.draft_seconds = 0.0
        count_layer_memory()
        match_prefixes_by_pairs()

    @property
    def draft_worker(self) -> None:
        """The layer is no model of the host's."""
        return None

    def _make_drafter(self, method: Method) -> HiddenStateDrafter:
        # Before the pools are sized, so that what it takes is counted.
        embeddings, _ = self._runner.model.get_embed_and_head()

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            return F.embedding(tokens, embeddings)

        drafter: HiddenStateDrafter = method.make_drafter(
            self._options,
            TargetParts(
                folder=Path(self._runner.server_args.model_path),
                embed=embed,
                dtype=self._runner.dtype,
                device=self._device,
            ),
        )
        return drafter

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's pools, and give the layer a cache in the same slots."""
        super().alloc_memory_pool(**pools)
        keys = self.token_to_kv_pool_allocator.get_kvcache().k_buffer[0]
        _, heads, size = self.drafter.heads
        self._cache = LayerCache(len(keys), heads, size, self._runner.dtype)
        width = self._runner.model_config.hidden_size
        slots = self.req_to_token_pool.req_to_token.shape[0]
        self.drafter.allot(slots)
        self._first = torch.zeros(slots, width, dtype=self._runner.dtype)

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        hidden = result.logits_output.hidden_states
        counts = list(batch.extend_lens)
        lengths = batch.seq_lens.tolist()
        tokens = batch.input_ids.roll(-1)
        ends = torch.tensor(counts).cumsum(0) - 1
        for row, (request, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            known = request.origin_input_ids + request.output_ids
            # A prompt that is read in part goes on with its own next token.
            follows = known[length] if length < len(known) else result.next_token_ids[row]
            tokens[ends[row]] = int(follows)
        self._read(batch, hidden, tokens, counts, lengths)
        self.drafter.forget(batch.req_pool_indices)
        return result

    def _read(
        self,
        batch: Any,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        counts: list[int],
        lengths: list[int],
    ) -> None:
        """Have the layer read rows `[N, d]` and the tokens after them, and keep its last states.

        Args:
            counts: of each request's rows.
            lengths: of each request with them.
        """
        table = self.req_to_token_pool.req_to_token
        indices = batch.req_pool_indices.tolist()
        slots = [table[i, :length].long() for i, length in zip(indices, lengths, strict=True)]
        positions = torch.cat(
            [torch.arange(end - n, end) for end, n in zip(lengths, counts, strict=True)]
        )
        states = self.drafter.layer(
            self.drafter.fuse(hidden, tokens),
            positions,
            partial(self._cache.attend, counts=counts, slots=slots),
        )
        ends = torch.tensor(counts).cumsum(0) - 1
        self._first[batch.req_pool_indices] = states[ends]

    def _propose(self, batch: Any) -> DraftTree:
        started = perf_counter()
        indices = batch.req_pool_indices
        table = self.req_to_token_pool.req_to_token
        most, lengths = self.drafter.max_depth, batch.seq_lens.tolist()
        reserved = [
            table[i, : length + most - 1].long()
            for i, length in zip(indices.tolist(), lengths, strict=True)
        ]
        state = self._first[indices]
        states = [state]
        for ahead in range(1, most):
            slots = [found[: len(found) - most + 1 + ahead] for found in reserved]
            state = self.drafter.layer(
                self.drafter.between(state),
                batch.seq_lens + ahead - 1,
                partial(self._cache.attend, counts=[1] * len(slots), slots=slots),
            )
            states.append(state)
        # Through the host's own product: on some CPUs it keeps the head packed.
        model = self._runner.model
        rows = torch.stack(states, 1).flatten(0, 1)
        logits = model.logits_processor._compute_lm_head(rows, model.lm_head)
        logits = logits[:, : self._vocab_size].unflatten(0, (-1, most))
        steps = torch.full((len(lengths),), most)
        steps = steps.masked_fill(~self._states.drafting[indices], 0)
        trees = self.drafter.propose(indices, self._states.roots[indices], logits, steps)
        self.draft_seconds += perf_counter() - started
        return trees

    def _forward_verify(self, batch: Any) -> GenerationBatchResult:
        return self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )

    def _verify(self, batch: Any, trees: DraftTree, output: Any) -> Verified:
        hidden = output.hidden_states.view(*trees.tokens.shape, -1)
        verified = verify_trees(
            self._runner,
            batch,
            trees,
            self.drafter.max_depth,
            output,
            None,
            self._penalties_of(batch),
        )
        started = perf_counter()
        path, here = verified.path.long(), verified.path >= 0
        rows = torch.arange(len(path))[:, None].expand_as(path)
        counts = here.sum(1)
        self._read(
            batch,
            hidden[rows[here], path[here]],
            verified.emitted[here].long(),
            counts.tolist(),
            (batch.seq_lens + counts).tolist(),
        )
        self.drafter.accepted(batch.req_pool_indices, counts - 1)
        self.draft_seconds += perf_counter() - started
        return verified
