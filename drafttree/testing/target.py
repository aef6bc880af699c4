"""A random target, as the hosts describe theirs to a method."""

from __future__ import annotations

import logging

import torch

from drafttree.target import Target

VOCAB_SIZE = 64
"""Vocabulary size of the random target unless another is asked for."""

HIDDEN_SIZE = 32
"""Hidden size of the random target unless another is asked for."""


def random_target(
    vocab_size: int = VOCAB_SIZE, hidden_size: int = HIDDEN_SIZE, model: str = ""
) -> Target:
    """A target with random embeddings, in float32 on the CPU.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Size of the embeddings and of the hidden states.
        model: Folder of a real target, for drafters that read one; its weights are not used here,
            but its sizes must be those given.
    """
    generator = torch.Generator().manual_seed(vocab_size)
    embeddings = torch.randn(vocab_size, hidden_size, generator=generator)
    return Target(
        model=model,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
        dtype=torch.float32,
        logger=logging.getLogger(__name__),
        embed=lambda tokens: embeddings[tokens.long()],
    )
