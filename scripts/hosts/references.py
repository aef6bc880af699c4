"""What drafttree uses of an engine, read from its source: imports, subclasses and patches."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Reference:
    """A part of an engine that drafttree uses.

    Attributes:
        module: Dotted name of the engine's module.
        name: A name in the module; several, with dots, for a member of a class. Empty for the
            module itself.
        use: "imported", "subclassed", "overridden" or "patched".
    """

    module: str
    name: str
    use: str


@dataclass(frozen=True)
class _Class:
    """A class of drafttree: the engine's and drafttree's classes it derives from."""

    name: str
    theirs: tuple[tuple[str, str], ...]
    ours: tuple[str, ...]
    methods: tuple[str, ...]


def references(
    sources: Iterable[Path], engine: str, patched: Iterable[str] = ()
) -> list[Reference]:
    """All parts of an engine that some files use.

    Whether a method overrides one of the engine's is not known here: all methods of a class that
    derives from the engine's are listed as overriding.

    Args:
        sources: Python files.
        engine: Name of the engine's package.
        patched: Targets of patches, as in `drafttree.patches.Patch.target`.
    """
    found: set[Reference] = set()
    classes: dict[str, _Class] = {}
    for source in sources:
        tree = ast.parse(source.read_text(), str(source))
        imported = dict(_imports(tree, engine))
        found |= {Reference(module, name, "imported") for module, name in imported.values()}
        for each in ast.walk(tree):
            if isinstance(each, ast.ClassDef):
                classes[each.name] = _class(each, imported)
    for ours in classes.values():
        found |= {Reference(module, name, "subclassed") for module, name in ours.theirs}
        for module, name in _engine_bases(ours, classes):
            found |= {
                Reference(module, f"{name}.{method}", "overridden") for method in ours.methods
            }
    for target in patched:
        module, _, name = target.partition(":")
        found.add(Reference(module, name, "patched"))
    return sorted(found)


def _imports(tree: ast.AST, engine: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Local names of what is imported from the engine: `(local, (module, name))`."""
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and each.module and not each.level:
            if each.module.split(".")[0] == engine:
                for alias in each.names:
                    yield alias.asname or alias.name, (each.module, alias.name)
        elif isinstance(each, ast.Import):
            for alias in each.names:
                if alias.name.split(".")[0] == engine:
                    yield alias.asname or alias.name, (alias.name, "")


def _class(node: ast.ClassDef, imported: dict[str, tuple[str, str]]) -> _Class:
    bases = [
        base.value if isinstance(base, ast.Subscript) else base  # of a generic base, the class
        for base in node.bases
    ]
    names = [base.id for base in bases if isinstance(base, ast.Name)]
    return _Class(
        name=node.name,
        theirs=tuple(imported[name] for name in names if name in imported),
        ours=tuple(name for name in names if name not in imported),
        methods=tuple(
            each.name
            for each in node.body
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
        ),
    )


def _engine_bases(each: _Class, classes: dict[str, _Class]) -> set[tuple[str, str]]:
    """The engine's classes that a class derives from, also through drafttree's own."""
    bases = set(each.theirs)
    for name in each.ours:
        if name in classes and name != each.name:
            bases |= _engine_bases(classes[name], classes)
    return bases
