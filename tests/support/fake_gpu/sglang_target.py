"""A target for SGLang's workers whose next token depends on KV, masks and positions.

It takes the place of the engine's `TpModelWorker`. What follows a token depends on it, and a little
on the sum of all tokens that it attends to, read from the KV cache, and on its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_schedule, get_spec
from transformers import PretrainedConfig

from fake_gpu.sglang_engine import new_cache
from fake_gpu.tensors import DeviceTensor, Gpu, held


@dataclass(frozen=True)
class Weights:
    """The target's logits.

    Attributes:
        after: `[V, V]`, by the last token.
        shifts: `[V, V]`, by the sum of all tokens and of the last one's position.
    """

    after: torch.Tensor
    shifts: torch.Tensor

    def logits(self, tokens: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]` after `tokens [R]`, given the sums `totals [R]`."""
        return self.after[tokens] + self.shifts[totals % len(self.shifts)]

    def plain_text(self, prompt: Sequence[int], length: int) -> list[int]:
        """The most likely tokens after a prompt, decoded one by one."""
        text = [*prompt]
        for _ in range(length):
            total = sum(text) + len(text) - 1
            row = self.logits(torch.tensor(text[-1:]), torch.tensor([total]))
            text.append(int(row.argmax()))
        return text[len(prompt) :]


class TargetWorker:
    """The target's worker and its model runner.

    Args:
        weights: The target's logits.
        pool: The engine's slot table.
        allocator: The engine's allocator of KV slots.
        gpu: The fake GPU; None for the CPU.
        unwatched: Lets what the engine does in a context wait, and counts nothing of it.

    Attributes:
        verified: The tree rows of the forwards so far, by forward.
    """

    tokenizer = None
    random_seed = 0

    def __init__(
        self,
        weights: Weights,
        pool: Any,
        allocator: Any,
        gpu: Gpu | None,
        unwatched: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._weights, self._gpu, self._unwatched = weights, gpu, unwatched
        self._pools = pool, allocator
        self.model_runner = _Runner(weights, "cpu" if gpu is None else "cuda", unwatched)

    def make_draft_worker(self) -> DraftWorker:
        """The worker of a draft model beside this target."""
        return DraftWorker(self)

    def get_memory_pool(self) -> tuple[Any, Any]:
        """The engine's pools."""
        return self._pools

    def forward_batch_generation(
        self, batch: Any, is_verify: bool = False, capture_hidden_mode: Any = None
    ) -> GenerationBatchResult:
        """A forward, after which tokens are sampled unless it verifies.

        The hidden state of a row is its logits.
        """
        if batch.has_grammar:
            batch.sampling_info.grammars = [each.grammar for each in batch.reqs]
        hidden = self._weights.logits(*(self._verified if is_verify else self._prompts)(batch))
        ends = slice(None) if is_verify else torch.tensor(batch.extend_lens).cumsum(0) - 1
        output = LogitsProcessorOutput(next_token_logits=self._given(hidden[ends]))
        if capture_hidden_mode is not None:
            output.hidden_states = self._given(hidden)
        result = GenerationBatchResult(logits_output=output)
        if not is_verify:
            with self._unwatched():
                lengths = torch.tensor(batch.extend_lens).to(batch.seq_lens.device)
            names = "forward_mode", "sampling_info", "return_logprob", "seq_lens", "input_ids"
            names += "top_logprobs_nums", "token_ids_logprobs", "req_pool_indices"
            given = {name: getattr(batch, name) for name in names}
            result.next_token_ids = self.model_runner.sample(
                output, SimpleNamespace(extend_seq_lens=lengths, **given)
            )
        return result

    def _given(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on the target's device."""
        return values if self._gpu is None else DeviceTensor(values, self._gpu)

    def _prompts(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of prompts, and the sum for each."""
        self._write(batch)
        totals = [
            (self._context(slot, length).cumsum(0) + torch.arange(length))[-count:]
            for (slot, length), count in zip(self._requests(batch), batch.extend_lens, strict=True)
        ]
        return held(batch.input_ids), torch.cat(totals)

    def _verified(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of all nodes, and the sum for each, by the mask that the engine is given."""
        self._write(batch)
        spec, size = batch.spec_info, batch.spec_info.draft_token_num
        tokens, masks = held(batch.input_ids).view(-1, size), held(spec.custom_mask)
        whole = get_spec().speculative_num_draft_tokens
        assert self._gpu is None or size == whole, "the engine's backends take trees of one size"
        totals, first = held(spec.positions).view(-1, size).clone(), 0
        for row, (slot, length) in enumerate(self._requests(batch)):
            # On a CPU the first nodes may be in the cache already.
            cached = masks.shape[2] - size if masks.dim() == 3 else 0
            visible = torch.cat((self._context(slot, length + cached), tokens[row]))
            if masks.dim() == 3:
                context = torch.ones(size, length, dtype=torch.bool)
                mask = torch.cat((context, masks[row, -size:]), 1)
            else:
                mask = masks[first : first + size * len(visible)].view(size, -1)
                first += mask.numel()
            totals[row] += (mask * visible).sum(1)
        return tokens.flatten(), totals.flatten()

    def _requests(self, batch: Any) -> list[tuple[int, int]]:
        """The slot and the length of each request, as the device knows them."""
        lengths = held(batch.seq_lens).tolist()
        return list(zip(held(batch.req_pool_indices).tolist(), lengths, strict=True))

    def _cache(self) -> Any:
        """The engine's KV cache."""
        return self._pools[1].get_kvcache()

    def _write(self, batch: Any) -> None:
        cache = self._cache()
        for layer in (*cache.k_buffer, *cache.v_buffer):
            held(layer).view(-1)[held(batch.out_cache_loc)] = held(batch.input_ids).float()

    def _context(self, slot: int, length: int) -> torch.Tensor:
        """The tokens whose KV a request's text has, `int64 [length]`."""
        cache = self._cache()
        slots = held(self._pools[0].req_to_token)[slot, :length].long()
        keys, values = (held(each[0]).view(-1)[slots] for each in (cache.k_buffer, cache.v_buffer))
        assert torch.equal(keys, values)
        return keys.long()


class DraftWorker(TargetWorker):
    """A draft model, whose logits resemble the target's, with a KV cache in the same slots.

    Args:
        target: The target.
    """

    def __init__(self, target: TargetWorker) -> None:
        after = target._weights.after
        noise = 0.5 * torch.randn(after.shape, generator=torch.Generator().manual_seed(4))
        weights = replace(target._weights, after=after + noise)
        super().__init__(weights, *target.get_memory_pool(), target._gpu, target._unwatched)
        self._target = target

    def alloc_memory_pool(self, **pools: Any) -> None:
        """Make the KV cache."""
        self.model_runner.token_to_kv_pool = new_cache(self.model_runner.device)

    def init_attention_backends(self) -> None:
        """There are none."""

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        """There are none."""

    def forward_batch_generation(
        self, batch: Any, is_verify: bool = False, capture_hidden_mode: Any = None
    ) -> GenerationBatchResult:
        """A forward that samples nothing."""
        assert is_verify, "a draft model must not sample"
        if batch.spec_info is None:
            self._prompts(batch)
            return GenerationBatchResult()
        result = super().forward_batch_generation(batch, is_verify)
        output, model = result.logits_output, self.model_runner.model
        output.next_token_logits = model.logits(output.next_token_logits)
        return result

    def _cache(self) -> Any:
        return self.model_runner.token_to_kv_pool

    def _requests(self, batch: Any) -> list[tuple[int, int]]:
        found = super()._requests(batch)
        for each in found:
            own, texts = self._context(*each), self._target._context(*each)
            assert torch.equal(own, texts), "the draft model has not read what the target has"
        return found


class _Logits(LogitsProcessor):
    """The logits are the hidden states."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def _compute_lm_head(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: Any,
        logits_metadata: Any,
        embedding_bias: torch.Tensor | None = None,
        use_logits_buffer: bool = True,
    ) -> torch.Tensor:
        return hidden_states


class Model(torch.nn.Module):
    """As much of the target's model as a worker reads; hidden states are logits."""

    lm_head = None

    def __init__(self, embeddings: torch.Tensor) -> None:
        super().__init__()
        self._embeddings = embeddings
        self.logits_processor = _Logits()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of rows, as a forward computes them."""
        logits: torch.Tensor = self.logits_processor._get_logits(hidden, self.lm_head, None)
        return logits

    def get_input_embeddings(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The embedding of a token is what the target says after it."""
        return lambda tokens: F.embedding(tokens, self._embeddings)


class _Runner:
    """As much of the engine's model runner as a worker reads."""

    def __init__(
        self, weights: Weights, device: str, unwatched: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.device, self.dtype = device, torch.float32
        config = PretrainedConfig(bos_token_id=None)
        self.model_config = SimpleNamespace(
            model_path="no model",
            revision=None,
            vocab_size=len(weights.after),
            hf_config=config,
            hf_text_config=config,
            linear_attn_registry_result=None,
            hidden_size=len(weights.after),
            context_len=1024,
            is_encoder_decoder=False,
            is_multimodal=False,
            model_is_mrope=False,
            self_opened_think_start_ids=None,
            think_end_ids=None,
        )
        self.server_args = SimpleNamespace(
            download_dir=None,
            load_format="auto",
            json_model_override_args="{}",
            disable_overlap_schedule=get_schedule().disable_overlap_schedule,
        )
        self.model = Model(weights.after.to(device))
        self.sampler = Sampler()
        self.sampling_observer = self.watermark_state = None
        self.shared_read_done_event: Any = None
        self.ngram_embedding_manager = SimpleNamespace(update_after_decode=lambda **given: None)
        self._unwatched = unwatched

    _preprocess_logits = ModelRunner._preprocess_logits

    def sample(self, logits_output: Any, forward_batch: Any) -> torch.Tensor:
        """What the engine samples after prompts."""
        with self._unwatched():
            return ModelRunner.sample(self, logits_output, forward_batch)
