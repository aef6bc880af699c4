"""Stands in for `datasets`, which SGLang's client imports for data sets that no test asks for."""

from __future__ import annotations

from typing import Any


def load_dataset(*arguments: Any, **settings: Any) -> Any:
    """Refuse to load a data set."""
    raise NotImplementedError("the package `datasets` is not installed in this environment")
