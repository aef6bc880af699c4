"""The connection on which a worker shows the scheduler the trees that it drafts within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from drafttree.vllm.patches import mark_requested
from drafttree.vllm.structured import shown_trees
from drafttree.vllm.structured.shapes import Drafted
from drafttree.vllm.structured.shown_trees import TreeReceiver, TreeSender, why_not_shown

TREES = {"a": Drafted([5, 6, 7], [-1, 0, 0])}


def engine(*, backend: str = "mp", in_step: bool = True, ranks: int = 1) -> Any:
    """The configuration of an engine."""
    speculative: Any = SimpleNamespace()
    mark_requested(speculative, "rsd", {}, in_step=in_step)
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(
            world_size=ranks, distributed_executor_backend=backend, data_parallel_index=0
        ),
    )


def step(*, structured: bool = True, drafts: bool = True) -> Any:
    """A step as it is scheduled."""
    return SimpleNamespace(
        has_structured_output_requests=structured,
        scheduled_spec_decode_tokens={"a": [0, 0]} if drafts else {},
    )


@contextmanager
def both(config: Any) -> Iterator[tuple[TreeSender, TreeReceiver]]:
    """Both ends of an engine's connection."""
    with (
        closing(TreeSender(config, is_first=True)) as sender,
        closing(TreeReceiver(config)) as receiver,
    ):
        yield sender, receiver


def test_each_step_has_its_own_trees() -> None:
    """One that could have shown some, and has not, has none."""
    with both(engine()) as (sender, receiver):
        for trees in (TREES, None, {}, TREES):
            current = step()
            if trees is not None:
                sender.show(current, lambda: trees)  # noqa: B023
            sender.end(current)
            assert receiver.trees(current) == (trees or {})


@pytest.mark.parametrize("current", [step(structured=False), step(drafts=False)])
def test_nothing_is_sent_for_steps_without_such_trees(current: Any) -> None:
    with both(engine()) as (sender, receiver):
        sender.show(current, lambda: TREES)
        sender.end(current)
        assert receiver.trees(current) == {}
        sender.show(step(), lambda: TREES)
        assert receiver.trees(step()) == TREES


def test_the_first_rank_alone_shows_its_trees() -> None:
    config = engine(ranks=2)
    with both(config) as (sender, receiver):
        other = TreeSender(config, is_first=False)
        other.show(step(), lambda: {})
        other.end(step())
        sender.show(step(), lambda: TREES)
        assert receiver.trees(step()) == TREES


def test_replicas_have_connections_of_their_own() -> None:
    first = engine()
    second = SimpleNamespace(
        speculative_config=first.speculative_config,
        parallel_config=SimpleNamespace(**vars(first.parallel_config) | {"data_parallel_index": 1}),
    )
    with both(first) as (one, _), both(second) as (other, receiver):
        one.show(step(), dict)
        other.show(step(), lambda: TREES)
        assert receiver.trees(step()) == TREES


def test_only_who_knows_the_key_is_let_in() -> None:
    config = engine()
    with closing(TreeSender(config, is_first=True)) as sender:
        address, _ = shown_trees._address(config)
        with pytest.raises(AuthenticationError):
            Client(address, "AF_UNIX", authkey=b"another")
        with closing(TreeReceiver(config)) as receiver:
            sender.show(step(), lambda: TREES)
            assert receiver.trees(step()) == TREES


def test_a_worker_that_has_ended_is_not_waited_for() -> None:
    with both(engine()) as (sender, receiver):
        sender.close()
        with pytest.raises(RuntimeError, match="the worker has ended"):
            receiver.trees(step())


def test_a_worker_that_drafts_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0")
    with both(engine()) as (_, receiver), pytest.raises(RuntimeError, match="within 0 s"):
        receiver.trees(step())


@pytest.mark.parametrize("config", [engine(backend="uni"), engine(in_step=False)])
def test_no_connection_where_none_is_needed(config: Any) -> None:
    """The trees are an attribute of the step, or drafted before it."""
    receiver, current = TreeReceiver(config), step()
    assert receiver.trees(current) == {}
    if config.parallel_config.distributed_executor_backend == "uni":
        TreeSender(config, is_first=True).show(current, lambda: TREES)
        assert receiver.trees(current) == TREES


def test_other_executors_show_no_trees() -> None:
    reason = why_not_shown(engine(backend="ray", ranks=2).parallel_config)
    assert reason is not None
    assert "distributed_executor_backend='ray'" in reason
    assert why_not_shown(engine(ranks=2).parallel_config) is None
