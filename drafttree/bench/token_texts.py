"""Divides the text of an answer among its tokens.

A token has no text of its own: decoders take the blank off the first token of a text, and a
character may be spread over several tokens. Its text is what it adds to the text of the tokens
before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafttree.bench.chat import Chat
from drafttree.trace import TracedStep

_INCOMPLETE = "\ufffd"
"""What decoders put in place of bytes that form no character, or not yet."""


class AnswerTexts:
    """The texts of an answer's tokens, and of what was drafted between them.

    A character of several tokens belongs to the one that completes it. Special tokens are no part
    of an answer's text.

    Args:
        chat: The model's chat format.
        answer: The tokens of the answer.

    Attributes:
        texts: The text of each token of the answer. Joined they are the text of the answer.
    """

    def __init__(self, chat: Chat, answer: Sequence[int]) -> None:
        self.texts: list[str] = []
        self._chat = chat
        self._answer = answer
        # For each token, where decoding begins and up to where characters are complete. It begins
        # shortly before, which takes far less time than to decode all that comes before.
        self._parts: list[tuple[int, int]] = []
        whole = chat.decode(answer)
        # The tokens from `start` to `read` have the text `known`, which ends at `place` in `whole`.
        start = read = place = given = 0
        known = ""
        for end in range(1, len(answer) + 1):
            self._parts.append((start, read))
            decoded = chat.decode(answer[start:end])
            added = decoded[len(known) :] if decoded.startswith(known) else ""
            agreed = _common(added, whole[place : place + len(added)])
            reached = max(given, place + agreed) if end < len(answer) else len(whole)
            self.texts.append(whole[given:reached])
            given = reached
            if added and agreed == len(added) and not added.endswith(_INCOMPLETE):
                start, read, place = read, end, place + agreed
                known = chat.decode(answer[start:read])

    def set_step(self, step: TracedStep, place: int) -> None:
        """Set the texts of a step's nodes and bonus token.

        Special tokens have their names as texts, and what leaves a character incomplete has the
        replacement character.

        Args:
            step: The step.
            place: Place of the tree's root in the answer.
        """
        start, read = self._parts[place]
        before = list(self._answer[start:place])
        complete = self._chat.decode(self._answer[start:read], special=True)
        complete = _complete(self._chat.decode(before, special=True), complete)
        # Of each node, the tokens up to it and the complete characters of their text.
        seen: list[tuple[list[int], str]] = []
        last = 0
        for number, node in enumerate(step.nodes):
            path, above = seen[node.parent] if node.parent >= 0 else (before, complete)
            path = [*path, node.token]
            node.text, above = self._added(path, above)
            seen.append((path, above))
            if node.accepted:
                last = number
        path, above = seen[last]
        step.bonus.text, _ = self._added([*path, step.bonus.token], above)

    def _added(self, path: list[int], above: str) -> tuple[str, str]:
        """What the last token of a path adds to the text above, and the complete characters."""
        text = self._chat.decode(path, special=True)
        if not text.endswith(_INCOMPLETE):
            return text[_common(above, text) :], text
        complete = _complete(text, above)
        return complete[len(above) :] + _INCOMPLETE, complete


def _complete(text: str, above: str) -> str:
    """The complete characters of a text, which begins with those above.

    Some decoders decode no character of a run of bytes until the last one is complete.
    """
    kept = text.rstrip(_INCOMPLETE)
    return kept if kept.startswith(above) else above


def _common(one: str, other: str) -> int:
    """The number of characters at the beginning that two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
