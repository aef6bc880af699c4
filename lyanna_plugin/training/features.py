"""What the target says of a text: hidden states and its most likely next tokens.

Computed once and kept on disk in shards, which are read as they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tree_kernels.adjacency import top_candidates

from lyanna_plugin.training.dataset import Sample

LIKELIEST = 8
"""Tokens kept of each of the target's distributions."""

_SHARD = 256
_TOGETHER = 8
_NAMES = ("hidden", "tokens", "probs")


class Features:
    """The features of samples, by their place among them.

    Each shard is named after what it holds: text that is added later leaves the whole ones as they
    are.

    Args:
        folder: the cache's; made if need be.
        samples: whose features these are.
        fingerprint: of the target.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample], fingerprint: str) -> None:
        self._folder = folder
        self._samples = samples
        self._files: list[Path] = []
        for first in range(0, len(samples), _SHARD):
            digest = hashlib.sha256(f"{fingerprint} {LIKELIEST}".encode())
            for sample in samples[first : first + _SHARD]:
                digest.update(sample.tokens.numpy().tobytes())
            self._files.append(folder / f"{digest.hexdigest()[:16]}.safetensors")
        self._open: dict[int, Any] = {}

    def missing(self) -> list[int]:
        """The shards that are still to be computed."""
        return [shard for shard, file in enumerate(self._files) if not file.exists()]

    def compute(
        self,
        target: Any,
        device: torch.device,
        advance: Callable[[int, int], None],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Compute what is missing, with a causal LM of transformers.

        Args:
            advance: told of each shard: which, of how many.
            part: of the shards, which of how many equal parts; each process has its own.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        own, parts = part
        missing = [shard for shard in self.missing() if shard % parts == own]
        for number, shard in enumerate(missing):
            advance(number, len(missing))
            first = shard * _SHARD
            places = range(first, min(first + _SHARD, len(self._samples)))
            order = sorted(places, key=lambda place: len(self._samples[place].tokens))
            tensors: dict[str, Tensor] = {}
            for start in range(0, len(order), _TOGETHER):
                chosen = order[start : start + _TOGETHER]
                tokens = [self._samples[place].tokens for place in chosen]
                for place, found in zip(chosen, _of(target, tokens, device), strict=True):
                    for name, tensor in zip(_NAMES, found, strict=True):
                        tensors[f"{place - first}.{name}"] = tensor
            file = self._files[shard]
            save_file(tensors, file.with_suffix(".partial"))
            file.with_suffix(".partial").replace(file)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """`bfloat16 [T, d]` hidden states, `int32 [T, 8]` tokens and their probabilities."""
        shard, place = divmod(index, _SHARD)
        if shard not in self._open:
            self._open[shard] = safe_open(self._files[shard], "pt")
        hidden, tokens, probs = (self._open[shard].get_tensor(f"{place}.{name}") for name in _NAMES)
        return hidden, tokens, probs


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


def _of(
    target: Any, texts: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each text's hidden states, likeliest next tokens and their probabilities."""
    # Attention is causal, so what is padded behind a text changes nothing in it.
    batch = pad_sequence([text.long() for text in texts], True).to(device)
    with torch.inference_mode():
        states = target.get_decoder()(input_ids=batch).last_hidden_state
        for text, padded in zip(texts, states, strict=True):
            hidden = padded[: len(text)]
            logits = target.get_output_embeddings()(hidden)
            best = top_candidates(logits, LIKELIEST)
            chosen = logits.gather(1, best.long()).float()
            probs = (chosen - logits.float().logsumexp(-1, keepdim=True)).exp()
            yield hidden.bfloat16().cpu(), best.cpu(), probs.bfloat16().cpu()
