"""The connection on which a worker shows the scheduler the trees that it drafts within a step."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from awaited import wait_until

pytest.importorskip("vllm", reason="needs vLLM")

from drafttree.vllm.drafting import DraftingRunner
from drafttree.vllm.patches import mark_requested
from drafttree.vllm.structured import shown_trees
from drafttree.vllm.structured.shapes import Drafted
from drafttree.vllm.structured.shown_trees import TreeReceiver, TreeSender, why_not_shown

CPU = torch.device("cpu")
TREES = {"a": Drafted([5, 6, 7], [-1, 0, 0])}


def engine(*, backend: str = "mp", shows_trees: bool = True, ranks: int = 1) -> Any:
    """The configuration of an engine."""
    speculative: Any = SimpleNamespace()
    mark_requested(speculative, "rsd", {}, shows_trees=shows_trees)
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(
            world_size=ranks, distributed_executor_backend=backend, data_parallel_index=0
        ),
    )


def step(receiver: TreeReceiver, *, structured: bool = True, drafts: bool = True) -> Any:
    """A step as it is scheduled."""
    output: Any = SimpleNamespace(
        has_structured_output_requests=structured,
        scheduled_spec_decode_tokens={"a": [0, 0]} if drafts else {},
    )
    receiver.number(output)
    return output


@contextmanager
def both(config: Any) -> Iterator[tuple[TreeSender, TreeReceiver]]:
    """Both ends of an engine's connection."""
    with (
        closing(TreeSender(config, CPU)) as sender,
        closing(TreeReceiver(config)) as receiver,
    ):
        yield sender, receiver


def test_each_step_has_its_own_trees() -> None:
    """One that could have shown some, and has not, has none."""
    with both(engine()) as (sender, receiver):
        for trees in (TREES, None, {}, TREES):
            current = step(receiver)
            if trees is not None:
                sender.show(current, lambda: trees)  # noqa: B023
            sender.end(current)
            assert receiver.trees(current) == (trees or {})


@pytest.mark.parametrize("has", [{"structured": False}, {"drafts": False}], ids=str)
def test_nothing_is_sent_for_steps_without_such_trees(has: dict[str, bool]) -> None:
    with both(engine()) as (sender, receiver):
        current, following = step(receiver, **has), step(receiver)
        sender.show(current, lambda: TREES)
        sender.end(current)
        assert receiver.trees(current) == {}
        sender.show(following, lambda: {"b": TREES["a"]})
        assert receiver.trees(following) == {"b": TREES["a"]}


def test_trees_that_nobody_waited_for_are_not_those_of_a_later_step() -> None:
    """An engine may give up a step after a fault, and go on."""
    with both(engine()) as (sender, receiver):
        for trees in (TREES, {"b": TREES["a"]}):
            current = step(receiver)
            sender.show(current, lambda: trees)  # noqa: B023
            sender.end(current)
        assert receiver.trees(current) == {"b": TREES["a"]}


def test_a_step_that_fails_is_not_waited_for() -> None:
    with both(engine()) as (sender, receiver):
        runner = DraftingRunner()
        runner._tree_sender = sender
        current = step(receiver)
        with pytest.raises(ZeroDivisionError), runner._shows_trees(current):
            raise ZeroDivisionError
        assert receiver.trees(current) == {}


def test_what_fails_while_trees_are_shown_is_named() -> None:
    with both(engine()) as (sender, receiver):
        current = step(receiver)
        sender.show(current, lambda: {"a": TREES["b"]})
        with pytest.raises(RuntimeError, match="cannot show its draft trees: KeyError"):
            receiver.trees(current)
        sender.end(current)
        following = step(receiver)
        sender.show(following, lambda: TREES)
        assert receiver.trees(following) == TREES


def test_replicas_have_connections_of_their_own() -> None:
    first = engine()
    second = SimpleNamespace(
        speculative_config=first.speculative_config,
        parallel_config=SimpleNamespace(**vars(first.parallel_config) | {"data_parallel_index": 1}),
    )
    with both(first) as (one, receiver), both(second) as (other, other_receiver):
        one.show(step(receiver), dict)
        current = step(other_receiver)
        other.show(current, lambda: TREES)
        assert other_receiver.trees(current) == TREES


def test_nobody_else_may_connect_and_no_file_is_left() -> None:
    config = engine()
    socket = shown_trees._socket(config)
    with closing(TreeSender(config, CPU)) as sender:
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        with pytest.raises(FileExistsError):
            TreeSender(config, CPU)
        with closing(TreeReceiver(config)) as receiver:
            current = step(receiver)
            sender.show(current, lambda: TREES)
            assert receiver.trees(current) == TREES
            assert not socket.parent.exists()


def test_an_engine_that_does_not_start_leaves_no_file() -> None:
    config = engine()
    sender = TreeSender(config, CPU)
    assert shown_trees._socket(config).exists()
    sender.close()
    folder = shown_trees._socket(config).parent
    wait_until(lambda: not folder.exists(), f"{folder} was not removed")


def test_a_scheduler_without_a_worker_that_shows_trees_does_not_start() -> None:
    with pytest.raises(RuntimeError, match="if scheduler_cls is given, leave it out"):
        TreeReceiver(engine())


def test_a_worker_that_has_ended_is_not_waited_for() -> None:
    with both(engine()) as (sender, receiver):
        sender.close()
        with pytest.raises(RuntimeError, match="the worker has ended"):
            receiver.trees(step(receiver))


def test_a_worker_that_drafts_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0")
    with both(engine()) as (_, receiver), pytest.raises(RuntimeError, match="within 0 s"):
        receiver.trees(step(receiver))


@pytest.mark.parametrize("config", [engine(backend="uni"), engine(shows_trees=False)])
def test_no_connection_where_none_is_needed(config: Any) -> None:
    """The trees are an attribute of the step, or drafted before it."""
    receiver = TreeReceiver(config)
    current = step(receiver)
    assert receiver.trees(current) == {}
    if config.parallel_config.distributed_executor_backend == "uni":
        TreeSender(config, CPU).show(current, lambda: TREES)
        assert receiver.trees(current) == TREES


def test_other_executors_show_no_trees() -> None:
    reason = why_not_shown(engine(backend="ray", ranks=2).parallel_config)
    assert reason is not None
    assert "distributed_executor_backend='ray'" in reason
    assert why_not_shown(engine(ranks=2).parallel_config) is None
