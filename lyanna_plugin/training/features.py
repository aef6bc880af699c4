"""What the target says of a text: hidden states and its most likely next tokens.

Computed once and kept on disk in shards, which are read as they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lyanna_plugin.training.dataset import Sample

LIKELIEST = 8
"""Tokens kept of each of the target's distributions."""

_SHARD = 256


class Features:
    """The features of samples, by their place among them.

    Args:
        folder: the cache's; made if need be.
        samples: whose features these are.
        fingerprint: of the target.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample], fingerprint: str) -> None:
        digest = hashlib.sha256(f"{fingerprint} {LIKELIEST}".encode())
        for sample in samples:
            digest.update(sample.tokens.numpy().tobytes())
        self._folder = folder / digest.hexdigest()[:16]
        self._samples = samples
        self._open: dict[int, Any] = {}

    def missing(self) -> list[int]:
        """The shards that are still to be computed."""
        shards = range((len(self._samples) + _SHARD - 1) // _SHARD)
        return [shard for shard in shards if not self._file(shard).exists()]

    def compute(
        self, target: Any, device: torch.device, advance: Callable[[int, int], None]
    ) -> None:
        """Compute what is missing, with a causal LM of transformers.

        Args:
            advance: told of each shard: which, of how many.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        missing = self.missing()
        for number, shard in enumerate(missing):
            advance(number, len(missing))
            tensors: dict[str, Tensor] = {}
            first = shard * _SHARD
            for index in range(first, min(first + _SHARD, len(self._samples))):
                hidden, tokens, probs = _of(target, self._samples[index], device)
                tensors |= {f"{index}.hidden": hidden, f"{index}.tokens": tokens}
                tensors[f"{index}.probs"] = probs
            partial = self._file(shard).with_suffix(".partial")
            save_file(tensors, partial)
            partial.replace(self._file(shard))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """`bfloat16 [T, d]` hidden states, `int32 [T, 8]` tokens and their probabilities."""
        shard = index // _SHARD
        if shard not in self._open:
            self._open[shard] = safe_open(self._file(shard), "pt")
        hidden, tokens, probs = (
            self._open[shard].get_tensor(f"{index}.{name}")
            for name in ("hidden", "tokens", "probs")
        )
        return hidden, tokens, probs

    def _file(self, shard: int) -> Path:
        return self._folder / f"{shard:05}.safetensors"


@dataclass(frozen=True)
class Corpus:
    """Samples and what the target says of them, or a part of those.

    Attributes:
        samples: those of this part.
        places: where each stands in the cache.
    """

    samples: list[Sample]
    places: list[int]
    cache: Features

    @classmethod
    def whole(cls, samples: list[Sample], cache: Features) -> Corpus:
        """All that the cache holds."""
        return cls(samples, list(range(len(samples))), cache)

    def part(self, chosen: Iterable[int]) -> Corpus:
        """Some of the samples."""
        kept = list(chosen)
        return Corpus([self.samples[i] for i in kept], [self.places[i] for i in kept], self.cache)

    def features(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The features of a sample."""
        return self.cache[self.places[index]]


def _of(target: Any, sample: Sample, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode():
        tokens = sample.tokens.long()[None].to(device)
        hidden = target.get_decoder()(input_ids=tokens).last_hidden_state[0]
        probs = target.get_output_embeddings()(hidden).float().softmax(-1)
        best = probs.topk(LIKELIEST)
    return hidden.bfloat16().cpu(), best.indices.int().cpu(), best.values.bfloat16().cpu()
