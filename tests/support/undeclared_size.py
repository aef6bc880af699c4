"""A method outside of drafttree whose trees are larger than its options declare."""

from __future__ import annotations

from prompt_lookup_tree import PromptLookupDrafter, PromptLookupOptions

from drafttree import MODEL_FREE, Method, MethodOptions, Target

LEVELS = 5
WIDTH = 4


class UndeclaredSizeOptions(MethodOptions):
    """Options that declare the first two levels of the trees."""

    @property
    def num_draft_tokens(self) -> int:
        """Fewer draft tokens than the drafter proposes."""
        return 2 * WIDTH

    @property
    def depth(self) -> int:
        """Greatest depth of a draft token."""
        return LEVELS


class UndeclaredSizeDrafter(PromptLookupDrafter):
    """Proposes 20 draft tokens: a copied continuation, and three siblings of each of its tokens."""

    def _tree(self, text: list[int], root: int) -> tuple[list[int], list[int]]:
        found = [at for at, token in enumerate(text[:-1]) if token == root]
        start = found[-1] + 1 if found else 0
        copy = (text[start : start + LEVELS] + [0] * LEVELS)[:LEVELS]
        tokens, parents = [root], [-1]
        for token in copy:
            parents += [max(len(tokens) - WIDTH, 0)] * WIDTH
            tokens += [token, *(other for other in range(WIDTH) if other != token)][:WIDTH]
        return tokens, parents


def make_drafter(options: UndeclaredSizeOptions, target: Target) -> UndeclaredSizeDrafter:
    """Make the drafter for a target."""
    return UndeclaredSizeDrafter(PromptLookupOptions(width=1, length=LEVELS))


METHOD = Method(
    name="undeclared_size",
    title="Trees of undeclared size",
    kind=MODEL_FREE,
    options=UndeclaredSizeOptions,
    make_drafter=make_drafter,
)
