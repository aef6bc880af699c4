"""Lyanna's drafter between the steps: from the logits of all steps to the tree to verify.

A host runs the layer and keeps its KV; this keeps what a rejected draft leaves, by the host's slot
of each request.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from drafttree.drafter import Attend, DraftTree, TargetParts
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.tree import TokenTable, left_of, merge, sample_tree


class LyannaTrees:
    """Builds the trees.

    Args:
        dtype: of the logits that are kept.
    """

    def __init__(self, options: LyannaOptions, info: TokenTable, dtype: torch.dtype) -> None:
        self._options = options
        self._info = info
        self._dtype = dtype
        seconds = [options.second_nodes(steps) for steps in range(options.steps)]
        first = options.first_nodes
        self._resamples = options.second_nodes(options.steps - 1) > 0
        self._most_nodes = torch.tensor(
            [first + n if options.fusion else n or first for n in seconds],
            device=info.row_of.device,
        )

    def allot(self, slots: int) -> None:
        """Make room for the state of requests in so many slots; once, before all else."""
        device = self._info.row_of.device
        shape = slots, self._options.steps, len(self._info.row_of)
        self._logits = torch.zeros(
            shape if self._resamples else (slots, 0, 0), dtype=self._dtype, device=device
        )
        # Of these steps, and so many of them used up; none of a request that has just begun.
        self._steps = torch.zeros(slots, dtype=torch.int64, device=device)
        self._used = torch.zeros_like(self._steps)

    def _left(self, slots: Tensor) -> Tensor:
        return (self._steps[slots] - 1 - self._used[slots]).clamp(min=0)

    def most_nodes(self, slots: Tensor) -> Tensor:
        """How many nodes the next trees can have, int64 `[B]`, the root not counted."""
        return self._most_nodes[self._left(slots)]

    def forget(self, slots: Tensor) -> None:
        """Requests begin in `slots`, int64 `[B]`."""
        self._steps[slots] = 0

    def propose(self, slots: Tensor, roots: Tensor, logits: Tensor, steps: Tensor) -> DraftTree:
        """The trees to verify.

        Args:
            slots: int64 `[B]`, the requests'.
            roots: int32 `[B]`, their last accepted tokens.
            logits: `[B, L, V]`, of all steps.
            steps: int64 `[B]`, how many of them there are.
        """
        options = self._options
        regular = sample_tree(logits, steps, roots, self._info, options.width, options.nodes)
        if not self._resamples:
            return regular
        left, more = left_of(self._logits[slots], self._steps[slots], self._used[slots])
        # Who has no draft now has no use for what is left either.
        more = more.masked_fill((more <= options.resample_min_steps) | (steps == 0), 0)
        second = sample_tree(left, more, roots, self._info, options.width, options.resample_nodes)
        # A second tree that goes alone uses up what was left, and the regular one is drafted anew
        # from the tokens that it wins.
        alone = (more > 0) & (not options.fusion)
        self._steps[slots] = torch.where(alone, 0, steps)
        self._logits[slots] = torch.where(alone[:, None, None], self._logits[slots], logits)
        if options.fusion:
            return merge(regular, second, options.steps)
        return _either(alone, second, regular)

    def accepted(self, slots: Tensor, drafts: Tensor) -> None:
        """What verification made of the last trees: int `[B]`, the drafts that were accepted."""
        self._used[slots] = drafts.long()


class LyannaDrafter(LyannaTrees):
    """Lyanna for a host: the trained layer, and the trees from its logits.

    Raises:
        ValueError: the folder holds no drafter of this target.
    """

    def __init__(self, options: LyannaOptions, target: TargetParts) -> None:
        from lyanna_plugin.checkpoint import load

        module = load(Path(options.model), target.folder).to(target.device).requires_grad_(False)
        assert module.token_info is not None
        self._embed = target.embed
        hot = target.embed(module.token_info.hot_tokens.long()).float()
        kept = torch.float8_e4m3fn if options.table == "float8" else target.dtype
        table = TokenTable.of(module.token_info, hot, kept)
        super().__init__(options, table, target.dtype)
        self._module = module.to(target.dtype)
        layer = module.layer_config
        self.heads = (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim)
        self.max_depth = options.steps

    def fuse(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What the layer reads at known tokens."""
        return self._module.fuse(hidden, self._embed(tokens))

    def between(self, states: Tensor) -> Tensor:
        """What it reads in its own steps."""
        result: Tensor = self._module.between(states)
        return result

    def layer(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step of the layer."""

        def of_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q[0], k[0], v[0])[None]

        result: Tensor = self._module(x[None], positions[None], of_one)[0]
        return result


def _either(choice: Tensor, one: DraftTree, other: DraftTree) -> DraftTree:
    """The trees of `one` where `choice [B]` is true, else those of `other`."""
    width = max(one.tokens.shape[1], other.tokens.shape[1])
    pad = torch.nn.functional.pad
    tokens, parents = (
        torch.where(
            choice[:, None],
            pad(mine, (0, width - mine.shape[1]), value=-1),
            pad(theirs, (0, width - theirs.shape[1]), value=-1),
        )
        for mine, theirs in ((one.tokens, other.tokens), (one.parents, other.parents))
    )
    return DraftTree(tokens, parents, torch.where(choice, one.num_nodes, other.num_nodes))
