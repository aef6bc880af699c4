"""Fixtures that run Triton kernels in the interpreter, and CPU operations in C++ and in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tree_kernels
from interpreted import interpreted
from tree_kernels._dispatch import Op

CPP, CPP_3_THREADS, REFERENCE = "C++", "C++, 3 threads", "reference"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["in_order", "shuffled"])
def interpreter(request: pytest.FixtureRequest) -> Iterator[str]:
    """Interpret every kernel; programs run one after another, in order or in random order."""
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreted(shuffled=request.param == "shuffled"):
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
