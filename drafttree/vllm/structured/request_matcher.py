"""One request's grammar in vLLM, as a `drafttree.grammar.Matcher`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttree.grammar.jump_forward import (
    NO_JUMP_FORWARD,
    JumpForward,
    JumpForwardTokenizer,
    found_text,
)
from drafttree.grammar.masks import ALL


@dataclass(frozen=True)
class _State:
    """The state after a token.

    Attributes:
        is_bound: Whether the grammar restricts the next token.
        fed: Number of tokens with which the grammar was advanced for this one.
    """

    is_bound: bool
    fed: int


class _Text(list[int]):
    """A text whose `copy` returns the text itself, without what was appended to it.

    To see whether a token ends the reasoning, the engine copies the text, appends the token's path
    and drops the copy. A step would copy a long text once for each node of its tree.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self._length = len(self)

    def copy(self) -> _Text:
        del self[self._length :]
        return self


class _Thinking:
    """A request that is still reasoning, with a text that takes no time to copy."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.all_token_ids = _Text(request.all_token_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class RequestMatcher:
    """Follows a request's grammar, which a reasoning model's thoughts do not follow.

    Args:
        manager: The engine's `StructuredOutputManager`.
        request: The engine's request, whose grammar is ready.
        tokenizer: Tokenizes jump-forward strings; None if they are not asked for.
    """

    def __init__(
        self, manager: Any, request: Any, tokenizer: JumpForwardTokenizer | None = None
    ) -> None:
        self._manager = manager
        self._request = request
        self._tokenizer = tokenizer
        self._grammar = request.structured_output_request.grammar
        self._path: list[int] = []
        begins = manager._get_constraint_bounds(request, []).constraint_start == 0
        self._states = [_State(begins, 0)]
        self._thinking = None if begins else _Thinking(request)

    def accept(self, token: int) -> bool:
        """Go on to the state after one more token; False if the grammar does not allow it."""
        tokens, is_bound = [token], True
        if not self._states[-1].is_bound:
            path = [*self._path, token]
            # Where the thoughts end, and whether the token that ends them is of the answer.
            bounds = self._manager._get_constraint_bounds(self._thinking, path)
            is_bound = bounds.constraint_start <= len(path)
            tokens = path[bounds.grammar_start :]
        fed = 0
        if tokens and not self._grammar.is_terminated():
            if not self._states[-1].is_bound and self._grammar.validate_tokens(tokens) != tokens:
                # While a model reasons, no mask has checked its tokens. The token that ends the
                # thoughts may be the first one of the answer, and guidance's grammars are broken
                # for good by a token that they do not allow.
                return False
            if not self._grammar.accept_tokens(self._request.request_id, tokens):
                return False
            fed = len(tokens)
        self._path.append(token)
        self._states.append(_State(is_bound, fed))
        return True

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens that were accepted."""
        fed = sum(state.fed for state in self._states[-count:])
        del self._states[-count:], self._path[-count:]
        if fed:
            self._grammar.rollback(fed)

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Write the tokens that may follow into a row of `masks`, `int32 [rows, W]`."""
        if self._states[-1].is_bound and not self._grammar.is_terminated():
            self._grammar.fill_bitmask(masks, row)
        else:
            masks[row] = ALL

    def jump_forward(self) -> JumpForward:
        """The tokens of the text that must come next; empty if none is known."""
        if (
            self._tokenizer is None
            or not self._states[-1].is_bound
            or self._grammar.is_terminated()
        ):
            return NO_JUMP_FORWARD
        if type(self._grammar).__name__ != "XgrammarGrammar":
            return NO_JUMP_FORWARD
        find = self._grammar.matcher.find_jump_forward_string
        return self._tokenizer.encode(found_text(find))
