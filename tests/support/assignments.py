"""Finds in a source what it assigns to objects other than `self`, for tests of patches."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path


def assignments(
    source: str, setters: Collection[str] = ("setattr",), own: Collection[str] = ()
) -> Iterator[str]:
    """Yield assigned attributes, such as `runner.sampler`, replaced functions and calls of setters.

    Args:
        source: The source to search.
        setters: Names of functions and methods that set something. A keyword argument of a call is
            yielded as an attribute of its first argument.
        own: Objects whose attributes are not reported, beside `self`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from _set_by_call(node, setters, own)
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute):
                    owner = ast.unparse(each.value)
                    if owner != "self" and owner not in own:
                        yield ast.unparse(each)


def _set_by_call(call: ast.Call, setters: Collection[str], own: Collection[str]) -> Iterator[str]:
    function = ast.unparse(call.func)
    owner = ast.unparse(call.args[0]) if call.args else function.rpartition(".")[0]
    if function == "replace_function":
        yield f"{owner}.{ast.literal_eval(call.args[1])}"
    if function.rpartition(".")[2] not in setters or owner in own:
        return
    named = [each.arg for each in call.keywords if each.arg is not None]
    yield from (f"{owner}.{name}" for name in named)
    if not named:
        yield ast.unparse(call)


def assignments_in(
    folder: Path, setters: Collection[str] = ("setattr",), own: Collection[str] = ()
) -> set[str]:
    """`file: assignment` for each assignment in the files of a folder but those of patches."""
    return {
        f"{file.relative_to(folder)}: {each}"
        for file in folder.rglob("*.py")
        if "patches" not in (file.stem, file.parent.name)
        for each in assignments(file.read_text(), setters, own)
    }
