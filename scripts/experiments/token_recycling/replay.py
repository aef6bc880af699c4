"""Replays the decoding of requests with a drafter: drafting, verification and learning, no engine.

Up to a given number of requests decode side by side through one drafter, as in an engine: each has
a slot, and the requests of a slot follow one another. The target's outputs come from
`known_target.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttree.tree import DraftTree
from drafttree.verify import verify_target
from scripts.experiments.common import Replayed
from scripts.experiments.token_recycling.known_target import TOP, Known
from scripts.experiments.token_recycling.recycling_variants import (
    Setting,
    TableDrafter,
    move_bigrams,
)

_ROWS = 256


@dataclass(frozen=True, eq=False)
class Text:
    """A request: a prompt and the answer that is decoded.

    Attributes:
        chat: Index of the chat that the request is part of.
        prompt: The tokens of the prompt.
        answer: The tokens of the answer.
        given: Whether the answer was given, so that it need not be the target's own.
    """

    chat: int
    prompt: list[int]
    answer: list[int]
    given: bool


Wanted = list[tuple[Text, list[int]]]
"""Nodes of requests that must be evaluated."""

Decoding = Generator[Wanted, None, list[tuple[int, Replayed]]]
"""Yields the nodes of each step's trees, which must be evaluated before it resumes; returns the
counts of each request with the index of its chat."""


@dataclass
class _Running:
    """A request in a slot, and how much of its answer is decoded."""

    text: Text
    known: Known
    slot: int
    done: int = 0
    steps: int = 0
    drafts: int = 0


def decode(
    drafter: TableDrafter,
    setting: Setting,
    chats: Sequence[Sequence[Text]],
    known_of: Callable[[Text], Known],
    vocab: int,
    batch: int = 1,
) -> Decoding:
    """Replay the decoding of all requests of all chats.

    Args:
        drafter: The drafter, allocated for `batch` requests.
        setting: The setting that the drafter belongs to.
        chats: The requests of each chat; those of one chat follow one another.
        known_of: The target's outputs for a request.
        vocab: Number of tokens of the vocabulary.
        batch: Number of requests that decode side by side while there are enough.
    """
    chats_to_come = deque(chats)
    lanes: list[deque[Text]] = [deque() for _ in range(batch)]
    running: list[_Running] = []
    finished: list[tuple[int, Replayed]] = []
    while True:
        occupied = {request.slot for request in running}
        started: list[_Running] = []
        for slot, lane in enumerate(lanes):
            if slot in occupied:
                continue
            if not lane and chats_to_come:
                lane.extend(chats_to_come.popleft())
            if lane:
                text = lane.popleft()
                started.append(_Running(text, known_of(text), slot))
                _begin(drafter, setting, started[-1], vocab)
        groups: list[tuple[list[_Running], DraftTree]] = []
        if started:
            roots = [request.known.prompt[-1] for request in started]
            groups.append((started, DraftTree.of_roots(torch.tensor(roots, dtype=torch.int32))))
        if running:
            roots = [request.known.answer[request.done - 1] for request in running]
            trees = drafter.propose(_slots(running), torch.tensor(roots, dtype=torch.int32))
            groups.append((running, trees))
        if not groups:
            return finished
        nodes = [_nodes_of(group, trees) for group, trees in groups]
        yield [
            (request.text, [node for node in row if node >= 0])
            for (group, _), rows in zip(groups, nodes, strict=True)
            for request, row in zip(group, rows, strict=True)
        ]
        for (group, trees), rows in zip(groups, nodes, strict=True):
            _verify(drafter, group, trees, rows, vocab)
        ended = [each for each in (*started, *running) if each.done == len(each.known.answer)]
        if ended:
            drafter.release([request.slot for request in ended])
        for each in ended:
            # The first token comes from the prompt's forward, which is not a step.
            finished.append((each.text.chat, Replayed(each.steps, each.done - 1, each.drafts)))
        running = [each for each in (*running, *started) if each.done < len(each.known.answer)]


def _begin(drafter: TableDrafter, setting: Setting, request: _Running, vocab: int) -> None:
    """Start a request; the drafter may learn from its prompt."""
    known = request.known
    drafter.start(request.slot, known.prompt)
    if setting.prompt_logits:
        tokens = torch.tensor(known.prompt, dtype=torch.int32)
        previous = torch.cat((tokens.new_tensor([-1]), tokens))
        slots = _slots([request])
        for start in range(0, len(tokens) - 1, _ROWS):
            rows = slice(start, min(start + _ROWS, len(tokens) - 1))
            logits = as_logits(known.prompt_tops[rows], vocab)
            drafter.observe(slots.expand(len(logits)), tokens[rows], previous[rows], logits)
    if setting.prompt_bigrams:
        move_bigrams(drafter.tables, known.prompt)


def _verify(
    drafter: TableDrafter,
    group: list[_Running],
    trees: DraftTree,
    nodes: list[list[int]],
    vocab: int,
) -> None:
    """Let the drafter learn from the target's logits at all nodes, and verify the trees."""
    slots, width = _slots(group), trees.tokens.shape[1]
    tops = [
        request.known.tops[node] if node >= 0 else [-1] * TOP
        for request, row in zip(group, nodes, strict=True)
        for node in row
    ]
    previous = trees.previous_tokens(drafter.previous_tokens(slots))
    likely = drafter.observe(
        slots.repeat_interleave(width),
        trees.tokens.flatten(),
        previous.flatten(),
        as_logits(torch.tensor(tops), vocab),
    )
    target = likely.view(len(group), width).clone()
    for row, request in enumerate(group):
        if request.known.given:
            for column, node in enumerate(nodes[row]):
                if node >= 0 and request.known.on_answer(node):
                    target[row, column] = request.known.answer[node]
    verified = verify_target(trees, target, drafter.max_depth)
    drafter.on_verified(slots, trees, verified)
    for row, request in enumerate(group):
        emitted = verified.emitted[row, : verified.num_emitted[row]].tolist()
        expected = request.known.answer[request.done : request.done + len(emitted)]
        assert emitted[: len(expected)] == expected
        if request.done:
            request.steps += 1
            request.drafts += int((trees.tokens[row, 1:] >= 0).sum())
        request.done += len(expected)


def _slots(requests: Sequence[_Running]) -> Tensor:
    return torch.tensor([request.slot for request in requests])


def _nodes_of(group: list[_Running], trees: DraftTree) -> list[list[int]]:
    """The node of each column of each request's tree; -1 for padding."""
    found: list[list[int]] = []
    for request, tokens, parents in zip(
        group, trees.tokens.tolist(), trees.parents.tolist(), strict=True
    ):
        nodes = [request.done]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            nodes.append(request.known.child(nodes[parent], token) if token >= 0 else -1)
        found.append(nodes)
    return found


def as_logits(tops: Tensor, vocab: int) -> Tensor:
    """Logits `[N, V]` whose most likely tokens are `tops`, int `[N, 8]`; drafters use no others. A
    row of -1 gives logits of zero."""
    values = torch.arange(TOP, 0, -1.0).expand(tops.shape).masked_fill(tops < 0, 0)
    return torch.zeros(len(tops), vocab).scatter(1, tops.clamp(min=0).long(), values)
