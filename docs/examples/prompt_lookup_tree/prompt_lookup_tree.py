"""Prompt-lookup trees: draft what followed earlier occurrences of the last token in the same text.

Prompt lookup copies one continuation. This method copies several and merges them into a tree, in
which common beginnings occur once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from drafttree import (
    MODEL_FREE,
    DraftTree,
    Method,
    MethodOptions,
    ModelFreeDrafter,
    Target,
    Verified,
)


# --8<-- [start:options]
class PromptLookupOptions(MethodOptions):
    """The options of prompt-lookup trees."""

    width: int = Field(4, ge=1, le=8, description="Greatest number of copied continuations.")
    length: int = Field(8, ge=1, le=16, description="Greatest length of each continuation.")

    @property
    def num_draft_tokens(self) -> int:
        """Greatest number of draft tokens of a tree, the root not counted."""
        return self.width * self.length

    @property
    def depth(self) -> int:
        """Greatest depth of a draft token."""
        return self.length


# --8<-- [end:options]


# --8<-- [start:state]
class PromptLookupDrafter(ModelFreeDrafter):
    """Drafts from the requests' own texts."""

    def __init__(self, options: PromptLookupOptions) -> None:
        self.max_depth = options.depth
        self._options = options
        self._texts: dict[int, list[int]] = {}

    def start(self, slot: int, text: Sequence[int]) -> None:
        """A request starts with its prompt."""
        self._texts[slot] = list(text)

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append tokens to the texts; -1 is padding."""
        for slot, row in zip(slots.tolist(), tokens.tolist(), strict=True):
            self._texts[slot] += [token for token in row if token >= 0]

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Append what a verification emitted: the accepted tokens and the bonus token."""
        self.extend(slots, verified.emitted)

    def release(self, slots: Sequence[int]) -> None:
        """Drop the texts of finished requests."""
        for slot in slots:
            self._texts.pop(slot, None)

    # --8<-- [end:state]

    # --8<-- [start:propose]
    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Draft one tree under each root."""
        trees = [
            self._tree(self._texts[slot], root)
            for slot, root in zip(slots.tolist(), roots.tolist(), strict=True)
        ]
        columns = max(len(tokens) for tokens, _ in trees)
        tokens = torch.full((len(trees), columns), -1, dtype=torch.int32)
        parents = torch.full_like(tokens, -1)
        for row, tree in enumerate(trees):
            size = len(tree[0])
            tokens[row, :size], parents[row, :size] = torch.tensor(tree, dtype=torch.int32)
        tree_size = torch.tensor([len(tokens) for tokens, _ in trees], dtype=torch.int32)
        return DraftTree(*(each.to(roots.device) for each in (tokens, parents, tree_size)))

    def _tree(self, text: list[int], root: int) -> tuple[list[int], list[int]]:
        """The tokens and parents of one tree, the root first, in breadth-first order."""
        options = self._options
        found = [at for at, token in enumerate(text[:-1]) if token == root]
        copies = [text[at + 1 : at + 1 + options.length] for at in reversed(found)]
        copies = copies[: options.width]
        tokens, parents = [root], [-1]
        last = [0] * len(copies)  # the column of each copy's last node
        for depth in range(options.length):
            column_of: dict[tuple[int, int], int] = {}
            for number, copy in enumerate(copies):
                if depth < len(copy):
                    node = (last[number], copy[depth])
                    if node not in column_of:
                        column_of[node] = len(tokens)
                        tokens.append(copy[depth])
                        parents.append(last[number])
                    last[number] = column_of[node]
        return tokens, parents


# --8<-- [end:propose]


# --8<-- [start:method]
def make_drafter(options: PromptLookupOptions, target: Target) -> PromptLookupDrafter:
    """Make the drafter for a target."""
    return PromptLookupDrafter(options)


METHOD = Method(
    name="prompt_lookup_tree",
    title="Prompt-lookup trees",
    kind=MODEL_FREE,
    options=PromptLookupOptions,
    make_drafter=make_drafter,
)
# --8<-- [end:method]
