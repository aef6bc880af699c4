"""Patches of an engine: their description, and how a function is replaced once and with checks.

Each host's `patches` lists all of its patches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MARK = "_drafttree"
"""Attribute of every function that replaces one of an engine."""

Unknown = Callable[[str], Exception]
"""Makes the error for an engine that differs from what is expected in the way that is given."""


@dataclass(frozen=True)
class Patch:
    """A part of an engine that is replaced or set.

    Attributes:
        target: What is replaced or set: `module:name` or `module:Class.attribute`.
        when: When it is replaced, and for how long.
        reason: Why the engine cannot do without it.
    """

    target: str
    when: str
    reason: str


def is_replaced(function: Any) -> bool:
    """Whether a function is a replacement."""
    return hasattr(function, _MARK)


def mark_replaced(function: Any) -> None:
    """Mark a function as a replacement."""
    setattr(function, _MARK, True)


def check_parameters(name: str, function: Any, expected: list[str], unknown: Unknown) -> None:
    """Check that a function of an engine has the parameters that its replacement passes on.

    Raises:
        Exception: It has others; the error is the engine's `unknown`.
    """
    found = list(inspect.signature(function).parameters)
    if found != expected:
        raise unknown(f"{name} takes {found}, expected {expected}")


def check_first_parameters(
    name: str, function: Callable[..., Any] | None, expected: list[str], unknown: Unknown
) -> None:
    """Check that a function of an engine begins with some parameters, and needs no others.

    Raises:
        Exception: It is missing or takes others; the error is the engine's `unknown`.
    """
    if function is None:
        raise unknown(f"there is no {name}")
    found = inspect.signature(function).parameters
    further = [*found.values()][len(expected) :]
    if [*found][: len(expected)] != expected or any(
        parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for parameter in further
    ):
        raise unknown(f"{name} takes {[*found]}, expected {expected}")


def replace_function(
    owner: Any,
    name: str,
    wrap: Callable[[Any], Callable[..., Any]],
    *,
    expected: list[str] | None,
    unknown: Unknown,
) -> None:
    """Replace a function of an engine's module, class or object, unless it is replaced already.

    Args:
        owner: The module, the class or the object.
        name: The function's name.
        wrap: Makes the replacement from the engine's own function.
        expected: Parameters that the engine's function must have; None for any.
        unknown: Makes the error.

    Raises:
        Exception: The function is missing or has other parameters; the error is `unknown`.
    """
    where = getattr(owner, "__name__", type(owner).__name__)
    stock = getattr(owner, name, None)
    if is_replaced(stock):
        return
    if stock is None:
        raise unknown(f"{where} has no {name}")
    if expected is not None:
        check_parameters(f"{where}.{name}", stock, expected, unknown)
    replacement = functools.wraps(stock)(wrap(stock))
    mark_replaced(replacement)
    setattr(owner, name, replacement)
