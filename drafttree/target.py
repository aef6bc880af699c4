"""What a host tells a method of the target, before it makes a drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from drafttree.ranks import Group


@dataclass(frozen=True)
class Target:
    """A host's description of the target, from which a method makes its drafter.

    Attributes:
        model: Folder of the target in Hugging Face's layout, or the name under which the engine
            loaded it.
        vocab_size: Number of tokens of the target's logits.
        device: Device on which the target runs.
        dtype: Data type of the target's weights.
        logger: Logger below the engine's own, so that messages reach the engine's log.
        embed: `(int [N]) -> [N, d]`, the target's token embeddings; None unless the method's kind
            needs hidden states.
        bos: The token that texts begin with; None if there is none.
        folder: Folder of the target's files on this machine; None if it is not known.
        changed_by: The option with which the target may differ from the model in `folder`, by other
            weights or another configuration; None if it is the same.
        pads_trees: Whether a step verifies as many rows of each request as of the largest tree.
        late_steps: How many further steps the host proposes before it knows a step's outcome.
        sizes_trees: Whether the host chooses the number of draft tokens of each step, and announces
            it by `Drafter.limit_draft_tokens`. Trees should then hold their most probable nodes
            first.
        longest_chain: Greatest number of draft tokens where the host verifies chains alone: no
            node should have a second child, as only the path of first children is kept. None
            where it verifies trees.
        group: The ranks of tensor parallelism, each of which has a drafter of its own and verifies
            the first one's trees; None if there is one rank. Drafters with a model draft on all
            ranks at once: what may differ between them must come from the first one.
    """

    model: str
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    logger: logging.Logger
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    bos: int | None = None
    folder: Path | None = None
    changed_by: str | None = None
    pads_trees: bool = False
    late_steps: int = 0
    sizes_trees: bool = False
    longest_chain: int | None = None
    group: Group | None = None
