"""Fixtures that run Triton kernels in the interpreter, and CPU operations in C++ and in PyTorch.

Triton reads TRITON_INTERPRET when it decorates a function, including those of its own library. The
fixtures replace the decorated functions during a test, so that the environment stays unchanged and
earlier imports of Triton do not matter.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import tree_kernels
from tree_kernels._dispatch import Op

CPP, CPP_3_THREADS, REFERENCE = "C++", "C++, 3 threads", "reference"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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


@pytest.fixture(params=["in_order", "shuffled"])
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Interpret every kernel; programs run one after another, in order or in random order."""
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
    names = [module.name for module in pkgutil.iter_modules(tree_kernels.__path__)]
    kernels = [importlib.import_module(f"tree_kernels.{name}") for name in names]
    modules = (*kernels, language, language.standard)
    interpreted: dict[int, InterpretedFunction] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                # One object per function: the interpreter finds its fast reductions by identity.
                new = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                monkeypatch.setattr(module, name, new)

    multiply = InterpreterBuilder.create_dot

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any
    ) -> TensorHandle:
        # The interpreter stores bfloat16 as integers and would multiply these.
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
    # The interpreter does not restore Triton's language after a kernel that calls a function.
    with restored(language, core, language.math, core.tensor, core.tensor_descriptor_base):
        yield str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `cpu_path`, with several threads if the module's kernel has a parallel loop."""
    if "cpu_path" not in metafunc.fixturenames:
        return
    name = metafunc.definition.path.stem.removeprefix("test_")
    source = Path(tree_kernels.__path__[0]) / f"{name}.cpp"
    is_parallel = source.exists() and "#pragma omp parallel" in source.read_text()
    paths = [CPP, CPP_3_THREADS, REFERENCE] if is_parallel else [CPP, REFERENCE]
    metafunc.parametrize("cpu_path", paths, indirect=True)


@pytest.fixture
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with the C++ kernels, which must have compiled, and with the references."""

    def on_cpu(self: Op[..., Any]) -> Callable[..., Any]:
        if request.param == REFERENCE:
            return self.reference
        assert self.cpp is not None, f"{self.name} has no C++ implementation"
        assert self.is_cpp_available
        return self.cpp

    monkeypatch.setattr(Op, "on_cpu", property(on_cpu))
    threads = torch.get_num_threads()
    # The kernels take their number of threads from PyTorch.
    torch.set_num_threads(3 if request.param == CPP_3_THREADS else threads)
    yield str(request.param)
    torch.set_num_threads(threads)
