"""Fixtures that run the Triton kernels under Triton's interpreter, in and out of order.

Triton reads TRITON_INTERPRET when it decorates a function, its own library's included. So the
fixtures swap the decorated functions for a test's length: the environment stays as it is, and it
does not matter who imported Triton before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tree_kernels import (
    _kv_shares,
    _ranking,
    _running_top,
    accept,
    adjacency,
    context,
    draw,
    full_mask,
    gather,
    growth,
    kv_move,
    mask,
    mask_rows,
    merge,
    offers,
    pairs,
    rejection,
    selection,
    step_counts,
    tally,
    token_info,
    tree_attention,
)
from tree_kernels._native import NativeFunction


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@contextmanager
def left_alone(*holders: Any) -> Iterator[None]:
    """Puts the attributes of modules and classes back."""
    before = [dict(vars(holder)) for holder in holders]
    try:
        yield
    finally:
        for holder, values in zip(holders, before, strict=True):
            for name in vars(holder).keys() - values.keys():
                delattr(holder, name)
            for name, value in values.items():
                if vars(holder)[name] is not value:
                    setattr(holder, name, value)


@pytest.fixture(params=["in_order", "shuffled"])
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Interprets every kernel; programs run one after another, in order or in a random order."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton import language
    from triton.runtime.interpreter import (
        InterpretedFunction,
        InterpreterBuilder,
        TensorHandle,
        interpreter_builder,
    )
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    modules = (
        _kv_shares,
        _ranking,
        _running_top,
        accept,
        adjacency,
        context,
        draw,
        full_mask,
        gather,
        growth,
        kv_move,
        mask,
        mask_rows,
        merge,
        offers,
        rejection,
        selection,
        step_counts,
        pairs,
        tally,
        token_info,
        tree_attention,
        language,
        language.standard,
    )
    interpreted: dict[int, InterpretedFunction] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                # One object a function: the interpreter knows its fast reductions by identity.
                new = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                monkeypatch.setattr(module, name, new)

    multiply = InterpreterBuilder.create_dot

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any
    ) -> TensorHandle:
        # The interpreter holds bfloat16 as its bits and would multiply these.
        a, b = (
            self.create_fp_ext(each, language.float32) if each.dtype.is_bf16() else each
            for each in (a, b)
        )
        return multiply(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

    if request.param == "shuffled":
        order = random.Random(0)
        set_dim, set_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
        programs: list[tuple[int, int, int]] = []

        def set_grid_dim(nx: int, ny: int, nz: int) -> None:
            set_dim(nx, ny, nz)
            programs[:] = [(x, y, z) for x in range(nx) for y in range(ny) for z in range(nz)]
            order.shuffle(programs)

        def set_grid_idx(x: int, y: int, z: int) -> None:
            set_idx(*programs.pop())

        monkeypatch.setattr(interpreter_builder, "set_grid_dim", set_grid_dim)
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)
    core = language.core
    # Where a kernel calls another function the interpreter leaves Triton's language to itself.
    with left_alone(language, core, language.math, core.tensor, core.tensor_descriptor_base):
        yield str(request.param)


@pytest.fixture(params=["native", "reference"])
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the kernels in C++, which must be there, and with the references."""
    find = NativeFunction.on

    def on(self: NativeFunction, tensor: torch.Tensor) -> Callable[..., None] | None:
        if request.param == "reference":
            return None
        function = find(self, tensor)
        assert function is not None
        return function

    monkeypatch.setattr(NativeFunction, "on", on)
    return str(request.param)
