"""Acceptance of greedy draft chains on known text, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from lyanna_plugin.training.batches import collate, order
from lyanna_plugin.training.features import Corpus
from lyanna_plugin.training.loss import DrafterLoss


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of greedy chains.

    Attributes:
        conditional: Acceptance rate of each step, given that the steps before were accepted.
        mean_accepted_tokens: Mean number of tokens that a chain yields, the bonus token included.
        positions: Number of chains.
    """

    conditional: tuple[float, ...]
    mean_accepted_tokens: float
    positions: int


def measure(model: DrafterLoss, corpus: Corpus, device: torch.device) -> Acceptance:
    """Measure a chain from every position of the answers from which they continue greedily.

    Args:
        model: The draft model with the target's embeddings and head.
        corpus: The text.
        device: Device of the model.
    """
    drafter, steps = model.drafter, model.drafter.config.steps
    reached = torch.zeros(steps + 1, dtype=torch.int64, device=device)
    for chosen in order(corpus, positions=4096, seed=0, epoch=0):
        batch = collate(corpus, chosen).to(device)
        length = batch.tokens.shape[1]
        if length < steps + 2:  # too short for a chain
            continue
        with torch.inference_mode():
            embedded = model.embeddings[torch.nn.functional.pad(batch.tokens, (0, steps))[:, 1:]]
            states = drafter.unroll(batch.hidden, embedded, steps)
            greedy = batch.top_tokens[..., 0]
            # Row p drafts the tokens from p + 2 on; the root is token p + 1.
            alive = batch.in_answer[:, : length - steps - 1].clone()
            for step in range(1, steps + 1):
                last = length - steps - 1 + step
                text = batch.tokens[:, step + 1 : last + 1]
                alive &= (greedy[:, step:last] == text) & batch.in_answer[:, step:last]
            reached[0] += alive.sum()
            for step, state in enumerate(states, start=1):
                rows, at = alive.nonzero(as_tuple=True)
                logits = state[rows, at] @ model.head.T
                parents = batch.tokens[rows, at + step]
                codes = drafter.token_info.codes(parents, model.embeddings[parents])
                logits = drafter.token_info.add_to(logits, codes @ drafter.token_info.columns())
                alive[rows, at] = logits.argmax(-1) == batch.tokens[rows, at + step + 1]
                reached[step] += alive.sum()
    counts = reached.tolist()
    return Acceptance(
        conditional=tuple(after / max(before, 1) for before, after in pairwise(counts)),
        mean_accepted_tokens=1 + sum(counts[1:]) / max(counts[0], 1),
        positions=counts[0],
    )
