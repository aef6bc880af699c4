"""Stub modules for packages that are imported but never called.

A stub has every attribute: a class that can be subclassed, compared and used in annotations, but
that raises an error when it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

# Code in these files checks whether a package is installed, and must find that it is not.
PROBES = ("transformers/utils", "torch/_dynamo", "importlib/util.py", "<frozen importlib.util>")


def stub(*packages: str) -> None:
    """Make packages and all of their submodules importable.

    An installed package is not replaced. A package that calls this with its own name, from an
    otherwise empty `__init__.py`, becomes a stub.
    """
    for package in packages:
        if package in sys.modules:
            sys.modules[package].__class__ = _StubModule
    sys.meta_path.append(_StubFinder(packages))


class _StubClass(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub_class(name)


def _stub_class(name: str) -> type:
    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} belongs to a package that is not installed here")

    return _StubClass(name, (), {"__init__": fail})


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stub_class(name)
        setattr(self, name, value)
        return value


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last in `sys.meta_path`, so that installed packages are found first."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._packages or _is_probe():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_probe() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if any(probe in frame.f_code.co_filename for probe in PROBES):
            return True
        frame = frame.f_back
    return False
