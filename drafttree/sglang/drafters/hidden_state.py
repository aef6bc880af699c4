"""SGLang's worker for methods whose drafter continues the target's hidden states.

The KV of the drafter's layer uses the target's slots, so cached prefixes are valid for both. At the
end of a step the layer reads the accepted tokens, each with the target's hidden state before it; in
the next step it continues from its own output in the slots that are reserved for the tree. Where
trees are planned, it reads several tokens at a time while it does not draft.

With tensor parallelism each rank has the whole layer, and a part of the target's embeddings and
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_context

from drafttree.deferred_rows import DeferredRows
from drafttree.model_drafters import HiddenStateDrafter
from drafttree.sglang.drafters.draft_layer import DraftLayer
from drafttree.sglang.drafters.with_model import ModelDraftingWorker
from drafttree.sglang.graphs.requests import RequestGraphs, whole_steps_are_captured
from drafttree.sglang.layer_cache import LayerRows
from drafttree.sglang.patches import (
    count_layer_memory,
    match_prefixes_by_bigrams,
    publish_reads,
)
from drafttree.sglang.state import Proposal, Step, are_parts
from drafttree.tensor_parallel import drafts_alone
from drafttree.transfer import on_device
from drafttree.tree import NO_TOKEN, DraftTree, Verified


class HiddenStateWorker(ModelDraftingWorker):
    """Drafts with a `HiddenStateDrafter`."""

    drafter: HiddenStateDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count_layer_memory()
        match_prefixes_by_bigrams()

    @property
    def draft_worker(self) -> None:
        """None, because the layer is not a draft model to SGLang."""
        return None

    def init_attention_backends(self) -> None:
        """SGLang's last call before it captures CUDA graphs: let them return hidden states."""
        super().init_attention_backends()
        if self._device.type != "cpu":
            get_context().override(__name__, enable_return_hidden_states=True)
            self._keep_own_graphs()

    def init_cuda_graphs(self) -> None:
        """SGLang's last call before it serves: capture graphs of the layer beside the target's."""
        if self._device.type != "cpu":
            # Hidden states are for the layer, not for users.
            get_context().override(__name__, enable_return_hidden_states=False)
        super().init_cuda_graphs()
        if whole_steps_are_captured(self._device):
            self._capture(self._runner.decode_cuda_graph_runner.capture_bs)

    def _capture(self, requests: Sequence[int]) -> None:
        """Capture graphs for these numbers of requests, ascending."""
        most, columns = requests[-1], self.drafter.max_depth + 1
        longs = partial(torch.zeros, dtype=torch.int64, device=self._device)
        slots, lengths, counts = longs(most), longs(most), longs(most)
        width, dtype = self._runner.model_config.hidden_size, self._runner.dtype
        hidden = torch.zeros(most, columns, width, dtype=dtype, device=self._device)
        self._drafts.capture([slots, lengths], requests)
        self._paths.capture([slots, lengths, counts, hidden, longs(most, columns)], requests)

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Take the target's memory pools, and give the layer a KV cache in the same slots."""
        super().alloc_memory_pool(**pools)
        self.drafter.read_head(self._target_logits)
        self._layer = DraftLayer(
            self.drafter,
            self.req_to_token_pool.req_to_token,
            len(self.token_to_kv_pool_allocator.get_kvcache().k_buffer[0]),
            self._runner.model_config.hidden_size,
            self._runner.dtype,
        )
        self._drafts = RequestGraphs(
            self._trees_of_layer if self._captures_trees else self._layer.unroll,
            lambda slots, _: LayerRows.of([1] * len(slots), self._device),
        )
        self._paths = RequestGraphs(
            self._layer.read_paths,
            lambda *given: LayerRows.of([given[-1].shape[1]] * len(given[-1]), self._device),
        )
        self._deferred: DeferredRows[int] | None = DeferredRows() if self._plans else None
        # Whether the layer drafts in this step.
        self._layer_drafts = True

    @property
    def _captures_trees(self) -> bool:
        """Whether the graphs of the layer's drafts build the trees too."""
        return self.drafter.proposes_in_graphs and not self._plans

    def _forward_prompt(self, batch: Any) -> GenerationBatchResult:
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        rows = LayerRows.of([*batch.extend_lens], self._device)
        following = batch.input_ids.roll(-1)
        following[rows.ends] = _after_prompts(batch, result.next_token_ids).to(following.dtype)
        hidden = result.logits_output.hidden_states
        self._layer.read(rows, batch.req_pool_indices, batch.seq_lens, hidden, following)
        self._prompts_verified(batch, result.next_token_ids)
        return result

    def _release(self, slots: list[int]) -> None:
        super()._release(slots)
        if self._deferred is not None:
            self._deferred.forget(slots)

    def _propose(self, batch: Any) -> Proposal:
        started = perf_counter()
        indices = batch.req_pool_indices
        if self._deferred is not None:
            drafted = int(self._states.drafting[indices].sum())
            shape = self.drafter.plan(indices, drafted)
            self._layer_drafts = shape.depth > 0
            if not self._layer_drafts:
                trees = self._propose_without_model(indices)
                self.draft_seconds += perf_counter() - started
                return Proposal(trees)
            self.drafter.follow_plan(shape)
        self._read_deferred(indices)
        ready = perf_counter()
        drafts = self._drafts(indices, batch.seq_lens)
        if not self._captures_trees:
            drafts = self._trees(indices, *drafts)
        ended = perf_counter()
        self.draft_seconds += ended - started
        self.drafter.drafted(ended - ready, read_seconds=ready - started)
        return Proposal(DraftTree(*drafts))

    def _trees_of_layer(
        self, rows: LayerRows, slots: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of the trees of requests in `slots [B]`, with texts of `lengths [B]`."""
        return self._trees(slots, *self._layer.unroll(rows, slots, lengths))

    def _trees(self, slots: torch.Tensor, outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the trees from the layer's outputs `[B, L, d]`."""
        logits = self.drafter.logits(outputs.flatten(0, 1), self._target_logits)
        logits = logits.view(*outputs.shape[:2], -1)
        steps = self._states.drafting[slots].long() * outputs.shape[1]
        trees = self.drafter.propose(slots, self._states.roots[slots], logits, steps)
        return trees.tokens, trees.parents, trees.tree_size

    def _target_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's logits `[N, V]` of its last hidden states `[N, d]`."""
        # SGLang's own product, as it keeps the head packed on some CPUs. A head with LoRA adapters
        # would take these rows for those of the last batch.
        model = self._runner.model
        head = unwrap_lora_layer(model.lm_head)
        logits = model.logits_processor._compute_lm_head(states, head)
        if not drafts_alone(self._group):
            logits = tensor_model_parallel_all_gather(logits)
        return logits[:, : self._vocab_size]

    def _forward_verify(self, batch: Any) -> GenerationBatchResult:
        return self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )

    def _verify(self, step: Step, output: Any) -> Verified:
        hidden = output.hidden_states.view(*step.trees.tokens.shape, -1)
        verified = self._verify_trees(step, output, self._observe_trees(step, output))
        started = perf_counter()
        if self._deferred is not None and not self._layer_drafts:
            self._defer(self._deferred, step.batch, hidden, verified)
        else:
            self._read_accepted(step, hidden, verified)
            self.drafter.drafted(perf_counter() - started)
        if self._device.type != "cpu":
            publish_reads(self._runner)
        self.draft_seconds += perf_counter() - started
        return verified

    def _defer(
        self, deferred: DeferredRows[int], batch: Any, hidden: torch.Tensor, verified: Verified
    ) -> None:
        """Let the layer read later what was accepted in a step for which it did not draft."""
        slots, path = batch.req_pool_indices, verified.path
        accepted = path >= 0
        requests, columns = accepted.nonzero(as_tuple=True)
        if deferred.add(
            slots[requests].tolist(),
            hidden[requests, path[accepted].long()],
            verified.emitted[accepted],
            batch.seq_lens[requests] + columns,
        ):
            self._read_deferred(slots)

    def _read_deferred(self, slots: torch.Tensor) -> None:
        """Let the layer read what was accepted in the steps before.

        Args:
            slots: Slots of the batch's requests, `int64 [B]`.
        """
        text = None if self._deferred is None else self._deferred.take(slots.tolist())
        if text is None:
            return
        slots, lengths = slots[torch.from_numpy(text.places)], text.positions[text.last] + 1
        rows = LayerRows.of(text.counts.tolist(), self._device)
        self._layer.read(rows, slots, lengths, text.hidden, text.tokens)

    def _read_accepted(self, step: Step, hidden: torch.Tensor, verified: Verified) -> None:
        """Run the layer over accepted tokens, and keep its output at each request's last one.

        Args:
            step: The step.
            hidden: `[B, N, d]`, the target's hidden states of all nodes.
            verified: What was accepted.
        """
        batch, path, counts = step.batch, verified.path, verified.num_emitted
        slots, lengths = batch.req_pool_indices, batch.seq_lens
        requests = torch.arange(len(path), device=self._device)[:, None]
        states = hidden[requests, path.clamp(min=0).long()]
        following = verified.emitted.clamp(min=0).long()
        if self._device.type == "cpu":
            needed, rows = path >= 0, LayerRows.of(counts.tolist(), self._device)
            self._layer.read(rows, slots, lengths + counts, states[needed], following[needed])
        else:
            self._paths(slots, lengths, counts, states, following)


def _after_prompts(batch: Any, sampled: torch.Tensor) -> torch.Tensor:
    """The token after each prompt: the one that was sampled, or known after a part of a prompt."""
    known = [
        (request.origin_input_ids + request.output_ids)[length] if is_part else NO_TOKEN
        for request, length, is_part in zip(
            batch.reqs, batch.seq_lens_cpu.tolist(), are_parts(batch), strict=True
        )
    ]
    if known.count(NO_TOKEN) == len(known):
        return sampled
    given = on_device(np.array(known, np.int64), sampled.device)
    return torch.where(given >= 0, given, sampled)
