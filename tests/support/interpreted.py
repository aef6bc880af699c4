"""Runs Triton kernels in its interpreter for the time of a context.

Triton reads TRITON_INTERPRET when it decorates a function, including those of its own library. Here
the decorated functions are replaced, so that the environment stays unchanged afterwards and earlier
imports of Triton do not matter.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import quick_interpreter
import tree_kernels


@contextmanager
def restored(*holders: Any) -> Iterator[None]:
    """Restore the attributes of modules and classes on exit."""
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


@contextmanager
def interpreted(*, shuffled: bool = False) -> Iterator[None]:
    """Interpret the kernels of `tree_kernels`, in whatever order they are imported.

    Args:
        shuffled: Whether the programs of a launch run in random order.
    """
    from triton import language
    from triton.runtime import interpreter

    core, builder = language.core, interpreter.InterpreterBuilder
    kernels = [
        importlib.import_module(f"tree_kernels.{module.name}")
        for module in pkgutil.iter_modules(tree_kernels.__path__)
    ]
    # The interpreter does not restore Triton's language after a kernel that calls a function.
    patched = (language, core, language.math, core.tensor, core.tensor_descriptor_base, builder)
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        restored(*patched, interpreter, interpreter.InterpretedFunction),
        mock.patch.object(made := interpreter.interpreter_builder, "options", made.options),
        _functions_replaced((*kernels, language, language.standard)),
        _order(shuffled),
    ):
        _multiply_bfloat16(builder)
        quick_interpreter.enable()
        yield


@contextmanager
def _functions_replaced(modules: tuple[Any, ...]) -> Iterator[None]:
    """Put interpreted functions in the place of compiled ones."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]
    # One object per function: the interpreter finds its fast reductions by identity.
    functions = {id(value): InterpretedFunction(value.fn) for _, _, value in found}
    for module, name, value in found:
        setattr(module, name, functions[id(value)])
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def _multiply_bfloat16(builder: Any) -> None:
    """The interpreter stores bfloat16 as integers, and would multiply these."""
    from triton import language

    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            self.create_fp_ext(each, language.float32) if each.dtype.is_bf16() else each
            for each in (a, b)
        )
        return multiply(self, a, b, *rest)

    builder.create_dot = create_dot


@contextmanager
def _order(shuffled: bool) -> Iterator[None]:
    """Let the programs of each launch run in random order, or in order."""
    from triton.runtime.interpreter import interpreter_builder

    if not shuffled:
        yield
        return
    order = random.Random(0)
    set_dim, set_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    programs: list[tuple[int, int, int]] = []

    def set_grid_dim(nx: int, ny: int, nz: int) -> None:
        set_dim(nx, ny, nz)
        programs[:] = [(x, y, z) for x in range(nx) for y in range(ny) for z in range(nz)]
        order.shuffle(programs)

    def set_grid_idx(x: int, y: int, z: int) -> None:
        set_idx(*programs.pop())

    with (
        mock.patch.object(interpreter_builder, "set_grid_dim", set_grid_dim),
        mock.patch.object(interpreter_builder, "set_grid_idx", set_grid_idx),
    ):
        yield
