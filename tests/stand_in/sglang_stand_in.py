"""Lets SGLang be imported where libraries are missing that a text model never calls.

Loaded when Python starts, through a `.pth` file, so that the engine's own processes have it too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

ABSENT = ("torchvision", "torchaudio", "decord", "soundfile")
# These ask whether a library is there and must hear that it is not.
PROBES = ("transformers/utils", "torch/_dynamo", "importlib/util.py", "<frozen importlib.util>")


class _Missing(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(name)


def _missing(name: str) -> type:
    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} belongs to a library that is not installed here")

    return _Missing(name, (), {"__init__": fail})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _missing(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that a library that is installed is found before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT or _is_probed():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_probed() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if any(probe in frame.f_code.co_filename for probe in PROBES):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


sys.meta_path.append(_Finder())
