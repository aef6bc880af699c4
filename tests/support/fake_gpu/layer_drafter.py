"""A hidden-state drafter for the fake GPU whose layer has no weights."""

from __future__ import annotations

import torch

from drafttree.model_drafters import Attend
from drafttree.target import Target
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.drafter import LyannaTrees
from lyanna_plugin.tree import TokenTable


def pattern(states: torch.Tensor) -> torch.Tensor:
    """What is added to states `[N, V]`, as the same number for all tokens would change nothing."""
    return torch.arange(states.shape[-1], device=states.device).cos()


class LayerDrafter(LyannaTrees):
    """Lyanna's trees from the states of a layer whose width is V."""

    def __init__(self, options: LyannaOptions, target: Target) -> None:
        vocab = target.vocab_size
        generator = torch.Generator().manual_seed(3)
        hot = torch.randperm(vocab, generator=generator)[: vocab // 2].int()
        row_of = torch.full((vocab,), -1, dtype=torch.int32)
        row_of[hot.long()] = torch.arange(len(hot), dtype=torch.int32)
        table = torch.randn(len(hot), len(hot), generator=generator)
        info = TokenTable(*(each.to(target.device) for each in (table, row_of, hot)))
        super().__init__(options, info, torch.float32)
        self.heads = 1, 1, vocab
        self._embed = target.embed
        self.share_tables(target)

    def fuse(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What the target says after the tokens, and a little of what it said before."""
        assert self._embed is not None
        return self._embed(tokens) + 0.05 * hidden

    def between(self, states: torch.Tensor) -> torch.Tensor:
        """The same turned by one token, and sharper."""
        return 3 * states.roll(1, 1)

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add a little of the position and of what attention says."""
        given = (x + 0.05 * (positions % 7)[:, None] * pattern(x))[:, None]
        return attend(given if last is None else given[last], given, given)[:, 0]
