"""Batches of samples of similar length, in an order that depends on a seed and the epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lyanna_plugin.training.features import Corpus

_JITTER = 24
"""Largest random addition to a length, in tokens, so that batches differ between epochs."""


@dataclass(frozen=True)
class Batch:
    """Samples padded with zeros to one length.

    Attributes:
        tokens: `int64 [B, T]`, the text.
        hidden: `float32 [B, T, d]`, the target's hidden states.
        top_tokens: `int64 [B, T, 8]`, the target's most likely next tokens.
        top_probs: `float32 [B, T, 8]`, the probabilities of these tokens.
        in_answer: `bool [B, T]`, whether the next token belongs to an answer.
    """

    tokens: Tensor
    hidden: Tensor
    top_tokens: Tensor
    top_probs: Tensor
    in_answer: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def order(corpus: Corpus, positions: int, seed: int, epoch: int) -> list[list[int]]:
    """The samples of each batch of one epoch.

    Args:
        corpus: The samples.
        positions: Maximum number of positions of a batch, including padding. A longer sample is a
            batch by itself.
        seed: Seed of the order.
        epoch: Index of the epoch.
    """
    rng = random.Random(f"{seed} {epoch}")
    lengths = [len(sample.tokens) for sample in corpus.samples]
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i] + _JITTER * rng.random()):
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > positions:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    rng.shuffle(batches)
    return batches


def collate(corpus: Corpus, chosen: Sequence[int]) -> Batch:
    """Make a batch of the samples with the given indices."""
    found = [corpus.features(index) for index in chosen]
    in_answer = []
    for index in chosen:
        answer = corpus.samples[index].answer
        # A position predicts the token after it; the last one has none.
        in_answer.append(torch.cat([answer[1:], torch.zeros(1, dtype=torch.bool)]))
    return Batch(
        tokens=pad_sequence([corpus.samples[index].tokens.long() for index in chosen], True),
        hidden=pad_sequence([hidden.float() for hidden, _, _ in found], True),
        top_tokens=pad_sequence([tokens.long() for _, tokens, _ in found], True),
        top_probs=pad_sequence([probs.float() for _, _, probs in found], True),
        in_answer=pad_sequence(in_answer, True),
    )
