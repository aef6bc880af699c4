"""List what changed between two versions of an engine in the parts that drafttree uses.

    python -m scripts.hosts.diff vllm OLD NEW [--everything]

OLD and NEW are folders of the engine's package: of an environment, an unpacked wheel or a checkout.
Nothing of the engine is imported. The result is a Markdown table.
"""

from __future__ import annotations

import ast
import difflib
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from scripts.hosts.package import Definition, Package
from scripts.hosts.references import Reference, references

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("drafttree", "recycle_plugin", "rsd_plugin", "lyanna_plugin")


def change(reference: Reference, old: Package, new: Package) -> str | None:
    """What changed, in words; None if the old version does not have this part either."""
    if not reference.name:
        return "" if new.has_module(reference.module) else "the module is gone"
    before = old.find(reference.module, reference.name)
    if before is None:
        module = f"{reference.module}.{reference.name}"
        if old.has_module(module):
            return "" if new.has_module(module) else "the module is gone"
        return None
    after = new.find(reference.module, reference.name)
    if after is None:
        return "gone" if new.has_module(reference.module) else "its module is gone"
    return _compare(before, after)


def _compare(before: Definition, after: Definition) -> str:
    """What differs between two definitions; empty if they are the same but for docstrings."""
    old, new = _without_docstrings(before), _without_docstrings(after)
    if old == new:
        return ""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(before, functions) and isinstance(after, functions):
        arguments = [ast.unparse(each.args) for each in (before, after)]
        if arguments[0] != arguments[1]:
            return f"parameters: `{arguments[0]}` became `{arguments[1]}`".replace("|", "\\|")
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    marks = [line[0] for line in lines if line[:3] not in ("---", "+++")]
    return f"{marks.count('-')} lines removed, {marks.count('+')} added"


def _without_docstrings(definition: Definition) -> str:
    tree = ast.parse(ast.unparse(definition))
    for each in ast.walk(tree):
        body = getattr(each, "body", None)
        if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                del body[0]
    return ast.unparse(tree)


def table(used: list[Reference], old: Package, new: Package, *, everything: bool = False) -> str:
    """A Markdown table of what changed, and a sentence that says how much did not."""
    rows, same = [], 0
    for (module, name), uses in groupby(used, key=lambda each: (each.module, each.name)):
        each = [*uses]
        words = change(each[0], old, new)
        if words is None:
            if all(use.use == "overridden" for use in each):
                continue  # a method of drafttree's own
            words = "not found in the old version's source"
        same += not words
        if words or everything:
            kinds = ", ".join(use.use for use in each)
            shown = f"{module}:{name}".rstrip(":")
            rows.append(f"| `{shown}` | {kinds} | {words or 'the same'} |")
    head = ["| part of the engine | use | what changed |", "|---|---|---|"] if rows else []
    return "\n".join([f"{same} parts are the same.", "", *head, *rows]) + "\n"


def used_of(engine: str) -> list[Reference]:
    """All parts of an engine that drafttree uses."""
    sources = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    patches = import_module(f"drafttree.{engine}.patches").PATCHES
    targets = [patch.target for patch in patches]
    # Attributes of drafttree's own have its name.
    return references(sources, engine, [each for each in targets if ".drafttree" not in each])


def main(
    engine: Annotated[str, typer.Argument(help="vllm or sglang.")],
    old: Annotated[Path, typer.Argument(help="Folder of the old package.")],
    new: Annotated[Path, typer.Argument(help="Folder of the new package.")],
    everything: Annotated[bool, typer.Option(help="List what is the same too.")] = False,
) -> None:
    """Print the table."""
    if engine not in ("vllm", "sglang"):
        raise typer.BadParameter(f"{engine!r}: give vllm or sglang", param_hint="ENGINE")
    try:
        packages = Package(old), Package(new)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    print(table(used_of(engine), *packages, everything=everything), end="")


if __name__ == "__main__":
    typer.run(main)
