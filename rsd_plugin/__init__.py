"""RSD: draft trees sampled from a draft model without replacement, verified by recursive rejection
sampling (arXiv 2402.14160) or by traversal verification (arXiv 2505.12398).
"""

from __future__ import annotations

import torch

from drafttree.frequent_tokens import frequent_tokens
from drafttree.method import DRAFT_MODEL, Method
from drafttree.model_files import local_folder
from drafttree.target import Target
from rsd_plugin.config import RsdOptions
from rsd_plugin.drafter import RsdDrafter


def make_drafter(options: RsdOptions, target: Target) -> RsdDrafter:
    """Build the drafter for a target.

    Raises:
        ValueError: The options need a CPU, and the target is on another device; or it is not known
            which tokens are the most frequent ones.
    """
    options.check_device(target.device)
    hot = _hot_tokens(options, target)
    drafter = RsdDrafter(options, target.vocab_size, hot, target.logger)
    drafter.share_tables(target)
    return drafter


def _hot_tokens(options: RsdOptions, target: Target) -> torch.Tensor | None:
    """The tokens that are drafted, `int64 [H]`; None for all."""
    count = options.head
    if count == "whole" or count >= target.vocab_size:
        return None
    # The models have the same vocabulary.
    for folder in (target.folder, local_folder(options.model)):
        tokens = None if folder is None else frequent_tokens(folder, count, target.vocab_size)
        if tokens is not None:
            return torch.tensor(tokens, device=target.device)
    raise ValueError(
        f"head={count} drafts the most frequent tokens, but neither {target.model} nor "
        f"{options.model} has a tokenizer.json with merges or scores: choose head=whole"
    )


METHOD = Method(
    name="rsd",
    title="RSD",
    kind=DRAFT_MODEL,
    options=RsdOptions,
    make_drafter=make_drafter,
)

__all__ = ["METHOD", "RsdDrafter", "RsdOptions", "make_drafter"]
