"""An engine's package on disk: finds definitions in its source without importing it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Package:
    """The Python files of one version of an engine.

    Args:
        folder: The folder of the package itself, such as `site-packages/vllm`.

    Raises:
        FileNotFoundError: It is no package.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "__init__.py").exists():
            raise FileNotFoundError(f"{folder} is no Python package: it has no __init__.py")
        self._folder = folder
        self._statements = cache(self._read)
        self._names = cache(self._name)

    def has_module(self, module: str) -> bool:
        """Whether there is a module of this dotted name."""
        return self._file(module) is not None

    def find(self, module: str, name: str) -> Definition | None:
        """The definition of a name in a module, or of a member of a class there.

        Follows imports from module to module, and looks for members in the bases of a class too.
        """
        owner, _, member = name.partition(".")
        found = self._find_name(module, owner, frozenset())
        if found is None or not member:
            return found[1] if found else None
        return self._find_member(*found, member, frozenset())

    def _file(self, module: str) -> Path | None:
        path = self._folder.parent.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
        return None

    def _read(self, module: str) -> list[ast.stmt]:
        file = self._file(module)
        return [] if file is None else _statements(ast.parse(file.read_text(), str(file)))

    def _name(self, module: str) -> dict[str, Definition | ast.ImportFrom]:
        """The names that a module defines or imports by name; the first place of each."""
        names: dict[str, Definition | ast.ImportFrom] = {}
        for each in self._statements(module):
            for name in _defined(each):
                names.setdefault(name, each)  # type: ignore[arg-type]
        return names

    def _whole_modules(self, module: str) -> list[str]:
        """The modules all of whose names a module imports."""
        return [
            self._absolute(module, each)
            for each in self._statements(module)
            if isinstance(each, ast.ImportFrom) and each.names[0].name == "*"
        ]

    def _find_name(
        self, module: str, name: str, seen: frozenset[tuple[str, str]]
    ) -> tuple[str, Definition] | None:
        """The module that defines a name, and the definition."""
        if (module, name) in seen:
            return None
        seen |= {(module, name)}
        found = self._names(module).get(name)
        if found is None:
            places = (self._find_name(each, name, seen) for each in self._whole_modules(module))
            return next(filter(None, places), None)
        if not isinstance(found, ast.ImportFrom):
            return module, found
        alias = next(each for each in found.names if name == (each.asname or each.name))
        return self._find_name(self._absolute(module, found), alias.name, seen)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self._file(module)
        parts = module.split(".")
        if file is None or file.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _find_member(
        self, module: str, owner: Definition, member: str, seen: frozenset[str]
    ) -> Definition | None:
        if not isinstance(owner, ast.ClassDef) or owner.name in seen:
            return None
        for each in [*owner.body, *_set_on_self(owner)]:
            if member in _defined(each):
                return each  # type: ignore[return-value]
        for base in owner.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                found = self._find_name(module, base.id, frozenset())
                if found and (inherited := self._find_member(*found, member, seen | {owner.name})):
                    return inherited
        return None


def _defined(statement: ast.AST) -> list[str]:
    """The names that a statement defines or imports; of `self.x = ...` it is x."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [
            each.id if isinstance(each, ast.Name) else each.attr
            for each in targets
            if isinstance(each, (ast.Name, ast.Attribute))
        ]
    return []


def _set_on_self(owner: ast.ClassDef) -> list[ast.stmt]:
    """The statements in a class's methods that set an attribute of the object."""
    found: list[ast.stmt] = []
    for each in ast.walk(owner):
        if isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if any(
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
                for target in targets
            ):
                found.append(each)
    return found


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a module, those in `if` and `try` blocks included."""
    found: list[ast.stmt] = []
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        for each in blocks.pop():
            found.append(each)
            if isinstance(each, ast.If):
                blocks += [each.body, each.orelse]
            elif isinstance(each, ast.Try):
                blocks += [each.body, each.orelse, *(handler.body for handler in each.handlers)]
    return found
