"""The target's features of a text: hidden states and most likely next tokens.

They are computed once and stored on disk in shards, which are read on demand. T is the length of a
text, d the hidden size.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tree_kernels.adjacency import top_candidates

from lyanna_plugin.training.dataset import Sample

logger = logging.getLogger(__name__)

TOP = 8
"""Number of most likely next tokens that are stored for each position."""

_SHARD = 256
_BATCH = 8
_NAMES = ("hidden", "tokens", "probs")


class Features:
    """A cache of the features of samples, by the index of the sample.

    The name of a shard is a hash of its content, so appending text does not invalidate full shards.

    Args:
        folder: Folder of the cache, which is created if it does not exist.
        samples: The samples.
        fingerprint: Hash of the target's weights.
        dtype: Data type in which the target computes the features.
    """

    def __init__(
        self, folder: Path, samples: Sequence[Sample], fingerprint: str, dtype: torch.dtype
    ) -> None:
        self._folder = folder
        self._samples = samples
        self._files: list[Path] = []
        for first in range(0, len(samples), _SHARD):
            digest = hashlib.sha256(f"{fingerprint} {dtype} {TOP}".encode())
            for sample in samples[first : first + _SHARD]:
                digest.update(f" {len(sample.tokens)} ".encode() + sample.tokens.numpy().tobytes())
            self._files.append(folder / f"{digest.hexdigest()[:16]}.safetensors")
        self._open: dict[int, Any] = {}

    def missing(self) -> list[int]:
        """Indices of the shards that are not computed yet, or whose files are damaged."""
        return [shard for shard, file in enumerate(self._files) if not _is_stored(file)]

    def compute(
        self,
        target: Any,
        device: torch.device,
        advance: Callable[[int, int], None],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Compute the missing shards.

        Args:
            target: The target, a causal LM of transformers, in the cache's `dtype`.
            device: Device of the target.
            advance: `(done, total)`, called before each shard.
            part: `(index, count)`: this process computes every `count`-th shard, from `index` on.

        Raises:
            OSError: A shard cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        own, parts = part
        missing = [shard for shard in self.missing() if shard % parts == own]
        for number, shard in enumerate(missing):
            advance(number, len(missing))
            first = shard * _SHARD
            indices = range(first, min(first + _SHARD, len(self._samples)))
            order = sorted(indices, key=lambda index: len(self._samples[index].tokens))
            tensors: dict[str, Tensor] = {}
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                tokens = [self._samples[index].tokens for index in chosen]
                for index, found in zip(chosen, _features(target, tokens, device), strict=True):
                    for name, tensor in zip(_NAMES, found, strict=True):
                        tensors[f"{index - first}.{name}"] = tensor
            file = self._files[shard]
            # Another run may compute the same shard.
            partial = file.with_suffix(f".{secrets.token_hex(4)}.partial")
            try:
                save_file(tensors, partial)
                partial.replace(file)
            except SafetensorError as error:
                raise OSError(
                    f"{file} cannot be written ({error}): free space, or choose another --cache"
                ) from error
            finally:
                partial.unlink(missing_ok=True)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """`bfloat16 [T, d]` hidden states, `int32 [T, 8]` tokens and their probabilities."""
        shard, row = divmod(index, _SHARD)
        if shard not in self._open:
            self._open[shard] = safe_open(self._files[shard], "pt")
        hidden, tokens, probs = (self._open[shard].get_tensor(f"{row}.{name}") for name in _NAMES)
        return hidden, tokens, probs


@dataclass(frozen=True)
class Corpus:
    """Samples with their features.

    Attributes:
        samples: The samples.
        indices: Index of each sample in `cache`.
        cache: The features.
    """

    samples: list[Sample]
    indices: list[int]
    cache: Features

    @classmethod
    def whole(cls, samples: list[Sample], cache: Features) -> Corpus:
        """All samples of a cache."""
        return cls(samples, list(range(len(samples))), cache)

    def part(self, chosen: Iterable[int]) -> Corpus:
        """The corpus of the samples with the given indices."""
        kept = list(chosen)
        samples = [self.samples[index] for index in kept]
        return Corpus(samples, [self.indices[index] for index in kept], self.cache)

    def features(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The features of a sample, as `Features` returns them."""
        return self.cache[self.indices[index]]


def _is_stored(file: Path) -> bool:
    """Whether a shard is stored whole; logs a warning if it is damaged."""
    if not file.exists():
        return False
    try:
        # Compares the size of the file with its header.
        with safe_open(file, "pt"):
            return True
    except SafetensorError as error:
        logger.warning("%s is damaged, and is computed again (%s)", file, error)
        return False


def _features(
    target: Any, texts: Sequence[Tensor], device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each text's hidden states, most likely next tokens and their probabilities."""
    # Attention is causal, so the padding after a text does not change its features.
    batch = pad_sequence([text.long() for text in texts], True).to(device)
    with torch.inference_mode():
        states = target.get_decoder()(input_ids=batch).last_hidden_state
        for text, padded in zip(texts, states, strict=True):
            hidden = padded[: len(text)]
            logits = target.get_output_embeddings()(hidden)
            best = top_candidates(logits, TOP)
            chosen = logits.gather(1, best.long()).float()
            probs = (chosen - logits.float().logsumexp(-1, keepdim=True)).exp()
            yield hidden.bfloat16().cpu(), best.cpu(), probs.bfloat16().cpu()
