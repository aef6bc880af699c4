"""A causal LM that answers prompts, and evaluates trees of tokens after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.experiments.rsd.rsd_expectation import NodePath

SETTINGS = {"T=0.3": (0.3, 1.0), "T=1": (1.0, 1.0), "T=1 top-p=0.95": (1.0, 0.95)}
"""Temperature and top-p by name."""


class Model:
    """A causal LM that evaluates one answer, and trees of tokens at positions in it."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._text: list[int] = []

    def answer(
        self, prompt: list[int], count: int, generator: torch.Generator
    ) -> dict[str, list[int]]:
        """One answer of at most `count` tokens in each setting, side by side."""
        from transformers import DynamicCache

        cache = DynamicCache()
        end = self._model.generation_config.eos_token_id
        ends = set(end) if isinstance(end, list) else {end}
        logits = self._forward(torch.tensor([prompt]), cache, logits_to_keep=1)[:, -1].float()
        cache.batch_repeat_interleave(len(SETTINGS))
        logits = logits.expand(len(SETTINGS), -1)
        answers: dict[str, list[int]] = {name: [] for name in SETTINGS}
        for _ in range(count):
            rows = zip(logits, SETTINGS.values(), strict=True)
            probs = torch.stack([distribution(row, *setting) for row, setting in rows])
            tokens = torch.multinomial(probs, 1, generator=generator)
            for answer, token in zip(answers.values(), tokens[:, 0].tolist(), strict=True):
                if not answer or answer[-1] not in ends:
                    answer.append(token)
            logits = self._forward(tokens, cache)[:, -1].float()
        return answers

    def read(self, text: list[int]) -> None:
        """Cache a text, so that trees after it can be evaluated; earlier trees are dropped."""
        from transformers import DynamicCache

        known = 0
        while known < min(len(self._text), len(text)) and self._text[known] == text[known]:
            known += 1
        if known == 0:
            self._cache = DynamicCache()
        elif surplus := self._cache.get_seq_length() - known:
            self._cache.crop(-surplus)
        if text[known:]:
            self._forward(torch.tensor([text[known:]]), self._cache, logits_to_keep=1)
        self._text = text
        self._columns: dict[NodePath, int] = {}

    def read_nodes(self, root: int, paths: list[NodePath]) -> dict[NodePath, Tensor]:
        """The logits after nodes; their parents must be read already or precede them in `paths`."""
        cached = len(self._text) + len(self._columns)
        seen = torch.zeros(1, 1, len(paths), cached + len(paths), dtype=torch.bool)
        seen[..., : len(self._text)] = True
        for row, path in enumerate(paths):
            self._columns[path] = len(self._columns)
            for length in range(len(path) + 1):
                seen[0, 0, row, len(self._text) + self._columns[path[:length]]] = True
        logits = self._forward(
            torch.tensor([[path[-1] if path else root for path in paths]]),
            self._cache,
            attention_mask=seen,
            position_ids=torch.tensor([[len(self._text) + len(path) for path in paths]]),
        )
        return dict(zip(paths, logits[0].float(), strict=True))

    def _forward(self, tokens: Tensor, cache: Any, **given: Any) -> Tensor:
        with torch.inference_mode():
            result = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, **given)
        return result.logits


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The distribution to sample from, `float32 [V]`."""
    probs = (logits / temperature).softmax(0)
    if top_p == 1.0:
        return probs
    ranked, order = probs.sort(descending=True)
    kept = ranked.cumsum(0) - ranked < top_p
    probs = torch.zeros_like(probs).scatter(0, order[kept], ranked[kept])
    return probs / probs.sum()
