"""The shuffled interpreter reveals a race between programs that write to one cell."""

import torch
from tree_kernels._triton import tl


def race(cell, seen):
    program = tl.program_id(0)
    tl.store(cell, program)
    tl.store(seen + program, program)


def test_every_program_runs_once_and_shuffling_changes_who_is_last(interpreter):
    from triton.runtime.interpreter import InterpretedFunction

    kernel = InterpretedFunction(race)
    last = set()
    for _ in range(10):
        cell, seen = torch.full((1,), -1), torch.full((7,), -1)
        kernel[(7,)](cell, seen)
        assert seen.tolist() == list(range(7))
        last.add(cell.item())
    assert last == {6} if interpreter == "in_order" else len(last) > 1
