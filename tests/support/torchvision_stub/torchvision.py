"""Stands in for torchvision, which environments for CPUs lack: all names are there, and do nothing.

vLLM imports it with the processors of some models. The models themselves do not use it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

__version__ = "0"
__path__: list[str] = []


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


for inner in (
    *("io", "ops", "transforms", "transforms.functional", "transforms.v2"),
    "transforms.v2.functional",
):
    parent, _, last = f"{__name__}.{inner}".rpartition(".")
    sys.modules[f"{__name__}.{inner}"] = module = _Module(f"{__name__}.{inner}")
    setattr(sys.modules[parent], last, module)
