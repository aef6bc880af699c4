"""A target for SGLang's workers whose next token depends on KV, masks and positions.

It takes the place of the engine's `TpModelWorker`. What follows a token depends on it, and a little
on the sum of all tokens that it attends to, read from the KV cache, and on its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner

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

    def get_memory_pool(self) -> tuple[Any, Any]:
        """The engine's pools."""
        return self._pools

    def forward_batch_generation(
        self, batch: Any, is_verify: bool = False
    ) -> GenerationBatchResult:
        """A forward, after which tokens are sampled unless it verifies."""
        if batch.has_grammar:
            batch.sampling_info.grammars = [each.grammar for each in batch.reqs]
        tokens, totals = self._verified(batch) if is_verify else self._prompts(batch)
        logits = self._weights.logits(tokens, totals)
        if self._gpu is not None:
            logits = DeviceTensor(logits, self._gpu)
        output = LogitsProcessorOutput(next_token_logits=logits)
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

    def _prompts(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The last token of each prompt, and the sum for it."""
        self._write(batch)
        lengths = held(batch.seq_lens)
        ends = torch.tensor(batch.extend_lens).cumsum(0) - 1
        texts = [self._context(*each) for each in self._requests(batch)]
        return held(batch.input_ids)[ends], torch.stack(
            [each.sum() for each in texts]
        ) + lengths - 1

    def _verified(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of all nodes, and the sum for each, by the mask that the engine is given."""
        self._write(batch)
        spec, size = batch.spec_info, batch.spec_info.draft_token_num
        tokens, masks = held(batch.input_ids).view(-1, size), held(spec.custom_mask)
        totals, first = held(spec.positions).view(-1, size).clone(), 0
        for row, (slot, length) in enumerate(self._requests(batch)):
            visible = torch.cat((self._context(slot, length), tokens[row]))
            if masks.dim() == 3:
                mask = torch.cat((torch.ones(size, length, dtype=torch.bool), masks[row]), 1)
            else:
                mask = masks[first : first + size * len(visible)].view(size, -1)
                first += mask.numel()
            totals[row] += (mask * visible).sum(1)
        return tokens.flatten(), totals.flatten()

    def _requests(self, batch: Any) -> list[tuple[int, int]]:
        """The slot and the length of each request, as the device knows them."""
        lengths = held(batch.seq_lens).tolist()
        return list(zip(held(batch.req_pool_indices).tolist(), lengths, strict=True))

    def _write(self, batch: Any) -> None:
        cache = self._pools[1].get_kvcache()
        for layer in (*cache.k_buffer, *cache.v_buffer):
            held(layer).view(-1)[held(batch.out_cache_loc)] = held(batch.input_ids).float()

    def _context(self, slot: int, length: int) -> torch.Tensor:
        """The tokens whose KV a request's text has, `int64 [length]`."""
        cache = self._pools[1].get_kvcache()
        slots = held(self._pools[0].req_to_token)[slot, :length].long()
        keys, values = (held(each[0]).view(-1)[slots] for each in (cache.k_buffer, cache.v_buffer))
        assert torch.equal(keys, values)
        return keys.long()


class _Runner:
    """As much of the engine's model runner as a worker reads."""

    def __init__(
        self, weights: Weights, device: str, unwatched: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.device, self.dtype = device, torch.float32
        config = SimpleNamespace(bos_token_id=None)
        self.model_config = SimpleNamespace(
            vocab_size=len(weights.after),
            hf_text_config=config,
            is_encoder_decoder=False,
            self_opened_think_start_ids=None,
            think_end_ids=None,
        )
        self.server_args = SimpleNamespace(model_path="no model", revision=None, download_dir=None)
        self.sampler = Sampler()
        self.sampling_observer = self.watermark_state = None
        self.ngram_embedding_manager = SimpleNamespace(update_after_decode=lambda **given: None)
        self._unwatched = unwatched

    _preprocess_logits = ModelRunner._preprocess_logits

    def sample(self, logits_output: Any, forward_batch: Any) -> torch.Tensor:
        """What the engine samples after prompts."""
        with self._unwatched():
            return ModelRunner.sample(self, logits_output, forward_batch)
