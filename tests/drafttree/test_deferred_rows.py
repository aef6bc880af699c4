"""Tokens that a drafter's layer reads later."""

from __future__ import annotations

import torch

from drafttree.deferred_rows import DeferredRows


def add(deferred: DeferredRows[str], batch: str, step: int) -> bool:
    """Defer a step's tokens, of which each number says where it is from."""
    numbers = torch.tensor([100 * ord(each) + step for each in batch])
    due = deferred.add(batch, numbers[:, None].float(), numbers.int(), numbers)
    numbers.fill_(-1)  # the engine uses its buffers again
    return due


def test_each_request_takes_its_tokens_in_their_order() -> None:
    deferred: DeferredRows[str] = DeferredRows()
    for step, batch in enumerate(("ab", "cb", "abc", "b")):
        assert not add(deferred, batch, step)
    deferred.forget(["c"])
    taken = deferred.take("dba")
    assert taken is not None
    a, b = 100 * ord("a"), 100 * ord("b")
    assert taken.places.tolist() == [1, 2]
    assert taken.counts.tolist() == [4, 2]
    assert taken.last.tolist() == [3, 5]
    expected = [b, b + 1, b + 2, b + 3, a, a + 2]
    assert taken.tokens.tolist() == taken.positions.tolist() == expected
    assert taken.hidden[:, 0].tolist() == expected
    assert deferred.take("abcd") is None


def test_a_request_may_have_several_tokens_of_a_step() -> None:
    deferred: DeferredRows[str] = DeferredRows()
    add(deferred, "ab", 0)
    numbers = torch.tensor([1, 2, 3, 4])
    assert not deferred.add("abbb", numbers[:, None].float(), numbers.int(), numbers)
    taken = deferred.take("ab")
    assert taken is not None
    assert taken.counts.tolist() == [2, 4]
    a, b = 100 * ord("a"), 100 * ord("b")
    assert taken.tokens.tolist() == taken.positions.tolist() == [a, 1, b, 2, 3, 4]


def test_a_request_that_is_left_out_is_read_when_it_is_back() -> None:
    deferred: DeferredRows[str] = DeferredRows()
    add(deferred, "ab", 0)
    assert deferred.take("b") is not None
    add(deferred, "b", 1)
    assert deferred.take("b") is not None
    add(deferred, "ab", 2)
    taken = deferred.take("a")
    assert taken is not None
    assert taken.tokens.tolist() == [100 * ord("a"), 100 * ord("a") + 2]


def test_they_are_due_after_some_steps() -> None:
    deferred: DeferredRows[str] = DeferredRows()
    for _ in range(2):
        assert [add(deferred, "a", step) for step in range(32)] == [False] * 31 + [True]
        assert deferred.take("a") is not None


def test_many_tokens_are_due_after_fewer_steps() -> None:
    """Those of requests that are left out are not counted again."""
    batch = [str(number) for number in range(32)]
    numbers = torch.arange(32)
    for requests in (batch, batch[:8]):
        deferred: DeferredRows[str] = DeferredRows()
        for _ in range(2):
            due = [deferred.add(batch, numbers[:, None], numbers, numbers) for _ in range(16)]
            assert due == [False] * 15 + [True]
            assert deferred.take(requests) is not None
