"""Measures what the tables tell one user of another's text, in steps of an answer.

    python -m scripts.experiments.token_recycling.shared_secrets

A user's answer ends with a secret of random tokens. Another user then gets an answer after the same
text: with the same secret, with one that is the same in its first half, or with another one. Fewer
steps for it show that the first user had it. The target is a table of random logits that always
continues with the answer, so nothing but drafts differs; steps are counted, not timed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import typer

from drafttree.target import Target
from drafttree.verify import verify_target
from recycle_plugin import DynamicTreeDrafter, RecycleOptions, make_drafter
from scripts.experiments.common import heading, row

VOCAB = 4096
LENGTH = 32
"""Tokens of a secret."""

KNOWN = {"no": 0, "its first half": LENGTH // 2, "yes": LENGTH}
"""How much of the second user's secret the first one had, in tokens."""

SETTINGS: dict[str, dict[str, Any]] = {
    "engine": {},
    "engine, memory=0": {"memory": 0},
    "engine, hot_start=false": {"hot_start": False},
    "request": {"sharing": "request"},
}


@dataclass(frozen=True)
class Users:
    """What two users say: the text before both secrets, and the secrets."""

    text: list[int]
    first: list[int]
    second: list[int]

    @classmethod
    def of(cls, seed: int, known: int) -> Users:
        """Random users, of whose secrets the first `known` tokens are the same."""
        draw = random.Random(seed)
        text, first, second = (
            [draw.randrange(VOCAB) for _ in range(length)] for length in (40, LENGTH, LENGTH)
        )
        return cls(text, first, first[:known] + second[known:])


def make(**options: Any) -> DynamicTreeDrafter:
    """A drafter for two requests."""
    parsed = RecycleOptions.model_validate({"prime": False, "nodes": 80, **options})
    logger = logging.getLogger(__name__)
    target = Target("target", VOCAB, torch.device("cpu"), torch.float32, logger)
    drafter = make_drafter(parsed, target)
    assert isinstance(drafter, DynamicTreeDrafter)
    drafter.allocate(2, 256)
    return drafter


def steps_of(drafter: DynamicTreeDrafter, slot: int, prompt: list[int], answer: list[int]) -> int:
    """The number of steps in which an answer is decoded; the request ends with it."""
    slots = torch.tensor([slot])
    drafter.start(slot, prompt[:-1])
    drafter.extend(slots, torch.tensor([prompt[-1:]], dtype=torch.int32))
    done = steps = 0
    while done < len(answer):
        root = (prompt + answer)[len(prompt) + done - 1]
        trees = drafter.propose(slots, torch.tensor([root], dtype=torch.int32))
        nexts = [
            _next(answer[done:], trees.path(0, column), token)
            for column, token in enumerate(trees.tokens[0].tolist())
        ]
        tokens = trees.tokens.flatten()
        previous = trees.previous_tokens(drafter.previous_tokens(slots)).flatten()
        drafter.observe(slots.expand(len(tokens)), tokens, previous, _logits(nexts))
        target = torch.tensor([nexts], dtype=torch.int32)
        verified = verify_target(trees, target, drafter.max_depth)
        drafter.on_verified(slots, trees, verified)
        done += int(verified.num_emitted)
        steps += 1
    drafter.release([slot])
    return steps


def _next(rest: list[int], path: Sequence[int], token: int) -> int:
    """The target's token after a node: the answer's, or a fixed one for each token beside it."""
    if list(path) == rest[: len(path)] and len(path) < len(rest):
        return rest[len(path)]
    return (7919 * token + 13) % VOCAB


def _logits(nexts: list[int]) -> torch.Tensor:
    """Logits whose most likely token is known, and whose others are the same for all nodes."""
    others = torch.rand(VOCAB, generator=torch.Generator().manual_seed(1))
    logits = others.repeat(len(nexts), 1)
    logits[torch.arange(len(nexts)), torch.tensor(nexts)] = 2.0
    return logits


def second_users_steps(users: Users, options: dict[str, Any], first_is_there: bool = True) -> int:
    """The steps of the second user's secret, after the first user's request has ended."""
    drafter = make(**options)
    if first_is_there:
        steps_of(drafter, 0, users.text, users.first)
    return steps_of(drafter, 1, users.text, users.second)


def main(
    pairs: int = typer.Option(20, help="Pairs of users."),
) -> None:
    """Print the mean steps of a secret by setting, and by what another user had of it."""
    torch.manual_seed(0)
    typer.echo(
        f"Mean steps of {LENGTH} tokens, {pairs} pairs of users; plain decoding takes {LENGTH}."
    )
    heading("sharing", "nobody before", *(f"another had it: {name}" for name in KNOWN))
    for name, options in SETTINGS.items():
        means = [
            sum(second_users_steps(Users.of(seed, known), options, there) for seed in range(pairs))
            / pairs
            for known, there in ((0, False), *((known, True) for known in KNOWN.values()))
        ]
        row(name, *(f"{mean:.1f}" for mean in means))


if __name__ == "__main__":
    typer.run(main)
