"""Batches of samples of similar length, in an order that a seed and the epoch decide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lyanna_plugin.training.features import Corpus

_JITTER = 24  # in tokens: other neighbours in each epoch


@dataclass(frozen=True)
class Batch:
    """Samples side by side, zeros behind the shorter ones.

    Attributes:
        tokens: int64 `[B, T]`.
        hidden: float32 `[B, T, d]`, the target's.
        likeliest: int64 `[B, T, 8]`, the target's most likely next tokens.
        probs: float32 `[B, T, 8]`, their probabilities.
        wanted: bool `[B, T]`: where the next token is part of an answer.
    """

    tokens: Tensor
    hidden: Tensor
    likeliest: Tensor
    probs: Tensor
    wanted: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def order(corpus: Corpus, positions: int, seed: int, epoch: int) -> list[list[int]]:
    """The samples of each batch of an epoch: at most `positions` of them, padding included."""
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
    """Put samples side by side."""
    found = [corpus.features(index) for index in chosen]
    wanted = []
    for index in chosen:
        answer = corpus.samples[index].answer
        # A position is wanted for the token after it; the last one has none.
        wanted.append(torch.cat([answer[1:], torch.zeros(1, dtype=torch.bool)]))
    return Batch(
        tokens=pad_sequence([corpus.samples[index].tokens.long() for index in chosen], True),
        hidden=pad_sequence([hidden.float() for hidden, _, _ in found], True),
        likeliest=pad_sequence([tokens.long() for _, tokens, _ in found], True),
        probs=pad_sequence([probs.float() for _, _, probs in found], True),
        wanted=pad_sequence(wanted, True),
    )
