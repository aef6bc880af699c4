"""A trace in the terminal: a tree for each step."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from drafttree.bench.table import sources_table
from drafttree.bench.trace import Trace
from drafttree.trace import StepSeconds, TracedNode, TracedStep

_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}

# Control characters, those that change the direction of all that follows, and lone surrogates.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """A token's text in quotes, with signs for characters that would not be seen."""
    return "'" + printable("".join(_VISIBLE.get(each, each) for each in text)) + "'"


def printable(text: str) -> str:
    """Text without the characters that control a terminal, line ends and tabs excepted.

    Characters that are unknown or not seen stay, since many languages are written with them.
    """
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))


def renderables(trace: Trace, most_steps: int) -> Iterator[RenderableType]:
    """What the terminal shows of a trace, from top to bottom.

    Args:
        trace: The trace.
        most_steps: Greatest number of steps that are shown.
    """
    yield Text(
        f"{trace.method} in {trace.engine} {trace.engine_version}, {trace.model}, {trace.dtype}, "
        f"{trace.device} ({trace.cpu})"
    )
    yield Text(
        f"prompt: {trace.prompt_tokens} tokens read in {trace.prompt_seconds.total * 1000:.1f} ms; "
        f"first token {visible(trace.tokens[0].text) if trace.tokens else 'none'}"
    )
    for number, step in enumerate(trace.steps[:most_steps], 1):
        yield step_tree(number, step)
    if (hidden := len(trace.steps) - most_steps) > 0:
        yield Text(f"… {hidden} more steps: --steps {len(trace.steps)} shows them", "dim")
    yield summary(trace)
    if rows := trace.by_source():
        yield sources_table(rows)
    yield Text(f"answer: {printable(trace.answer)}")


def step_tree(number: int, step: TracedStep) -> Tree:
    """The tree of a step; of what lies below rejected nodes only the number is shown."""
    title = Text(f"step {number}: ", "bold")
    count = len(step.emitted)
    title.append(f"{count} token{'s' if count > 1 else ''}, ", "bold")
    title.append(f"{count - 1} of {len(step.nodes) - 1} draft tokens accepted, ")
    title.append(_spent(step.seconds), "dim")
    shown = Tree(title)
    below = _below(step.nodes)
    branches = {0: shown.add(Text(visible(step.nodes[0].text)))}
    last = 0
    for place, node in enumerate(step.nodes[1:], 1):
        if node.parent not in branches:
            continue
        label = Text()
        label.append(visible(node.text), "bold green" if node.accepted else "dim")
        label.append(f"  {node.source}", "cyan" if node.accepted else "dim")
        if not node.accepted and below[place]:
            label.append(f"  and {below[place]} below", "dim")
        branch = branches[node.parent].add(label)
        if node.accepted:
            branches[place], last = branch, place
    bonus = Text(visible(step.bonus.text), "bold yellow")
    branches[last].add(bonus.append("  bonus token", "yellow"))
    return shown


def _below(nodes: list[TracedNode]) -> list[int]:
    """The number of nodes below each node."""
    counts = [0] * len(nodes)
    for place in range(len(nodes) - 1, 0, -1):
        counts[nodes[place].parent] += 1 + counts[place]
    return counts


def _spent(seconds: StepSeconds) -> str:
    parts = ", ".join(f"{name} {spent * 1000:.1f}" for name, spent in seconds)
    return f"in {seconds.total * 1000:.1f} ms ({parts})"


def summary(trace: Trace) -> Text:
    """Steps, tokens and time of all steps."""
    steps = trace.steps
    if not steps:
        return Text("no decode steps: the answer ended with its first token")
    emitted, seconds = len(trace.tokens) - 1, mean_seconds(steps)
    drafted = sum(len(step.nodes) - 1 for step in steps)
    return Text(
        f"{len(steps)} steps, {emitted} tokens, {emitted / len(steps):.2f} tokens and "
        f"{drafted / len(steps):.1f} draft tokens per step; a step took {_spent(seconds)[3:]}"
    )


def mean_seconds(steps: list[TracedStep]) -> StepSeconds:
    """Where the time of a step went on average."""
    sums = {
        name: sum(getattr(step.seconds, name) for step in steps) / len(steps)
        for name in StepSeconds.model_fields
    }
    return StepSeconds(**sums)
