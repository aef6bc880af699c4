"""Only `patches.py` replaces parts of SGLang, as the sources of the package show."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import drafttree.sglang
from drafttree.sglang.patches import PATCHES

FOLDER = Path(drafttree.sglang.__file__).parent

OF_ONE_CALL = {"batch", "result", "server_args", "info", "output"}
"""Names of SGLang's objects that a call fills in, and that do not outlive the call."""

REPLACING = ("setattr", "register_attention_backend")


def replacements(tree: ast.AST) -> Iterator[str]:
    """Assignments in a source to attributes of objects other than `self`, and its `setattr`s."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in REPLACING:
            if ast.unparse(node.args[0]) not in OF_ONE_CALL:
                yield ast.unparse(node)
            continue
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute):
                    owner = ast.unparse(each.value)
                    if owner != "self" and owner not in OF_ONE_CALL:
                        yield ast.unparse(each)


def test_a_replacement_is_found() -> None:
    text = """
self.own = batch.input_ids = 1
Scheduler.run = 2
self._runner.sampler = 3
setattr(penalizer, name, value)
"""
    assert sorted(replacements(ast.parse(text))) == [
        "Scheduler.run",
        "self._runner.sampler",
        "setattr(penalizer, name, value)",
    ]


def test_only_patches_replaces_anything() -> None:
    found = {
        f"{file.relative_to(FOLDER)}: {each}"
        for file in FOLDER.rglob("*.py")
        if file.name != "patches.py"
        for each in replacements(ast.parse(file.read_text()))
    }
    # `RequestPenalties` restores the state of its own penalizers.
    assert found == {"penalties.py: setattr(penalizer, name, value)"}


def test_each_patch_is_applied_in_patches() -> None:
    source = (FOLDER / "patches.py").read_text()
    applied = {each.rpartition(".")[2] for each in replacements(ast.parse(source))}
    for patch in PATCHES:
        name = patch.target.replace(":", ".").rpartition(".")[2]
        assert name in applied or name == "ATTENTION_BACKENDS"
        assert patch.when
        assert patch.reason
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
