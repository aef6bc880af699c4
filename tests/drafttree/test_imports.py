"""The import graph has no cycles, and no module imports from a layer above its own.

All imports count: those at the top of a module, those inside functions, and those for the type
checker alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = ("lyanna_plugin", "recycle_plugin", "rsd_plugin")
HOSTS = ("drafttree.vllm", "drafttree.sglang")
FOLDERS = {
    "tree_kernels": ROOT / "kernels" / "tree_kernels",
    **{name: ROOT / name for name in ("drafttree", *PLUGINS)},
}

BELOW_DRAFTTREE = ("tree_kernels",)
CORE = (*BELOW_DRAFTTREE, "core")
BUDGET = (*CORE, "drafttree.budget")
ALLOWED: dict[str, tuple[str, ...]] = {
    "tree_kernels": BELOW_DRAFTTREE,
    "core": CORE,
    "drafttree.budget": BUDGET,
    "drafttree.testing": (*CORE, "drafttree.testing"),
    **{host: (*BUDGET, host) for host in HOSTS},
    "drafttree.bench": (*BUDGET, *HOSTS, "drafttree.bench"),
    "drafttree.cli": (*BUDGET, *HOSTS, "drafttree.bench", "drafttree.cli"),
    **{plugin: (*BUDGET, plugin) for plugin in PLUGINS},
    # Token Recycling's candidates may share the trees of the others.
    **{plugin: (*BUDGET, "recycle_plugin", plugin) for plugin in ("lyanna_plugin", "rsd_plugin")},
}
"""The layers that each layer may import."""


@cache
def modules() -> dict[str, Path]:
    """All modules of the wheel by their names."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def layer_of(module: str) -> str:
    """The layer of a module: the longest name in `ALLOWED` that begins its name, or the core."""
    named = [layer for layer in ALLOWED if f"{module}.".startswith(f"{layer}.")]
    return max(named, key=len, default="core")


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of the wheel that a module imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively: name the module in full"
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                if inner in modules():
                    yield inner
                elif node.module in modules():
                    yield str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {
        name: set(imports(name, ast.parse(file.read_text()))) - {name}
        for name, file in modules().items()
    }


def cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The modules that reach each other, as sets of at least two."""

    def reached(first: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(edges[first])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += edges[name]
        return seen

    reach = {name: reached(name) for name in edges}
    sets = [{other for other in reach[name] if name in reach[other]} for name in edges]
    return [each for at, each in enumerate(sets) if each and each not in sets[:at]]


def test_the_graph_contains_every_kind_of_import() -> None:
    text = """
import drafttree.tree
from drafttree import method
if TYPE_CHECKING:
    from drafttree.verify import Draw
def late():
    from drafttree.metrics import Counters
"""
    found = set(imports("example", ast.parse(text)))
    names = {"tree", "method", "verify", "metrics"}
    assert found == {f"drafttree.{name}" for name in names}
    assert len(graph()) > 80
    assert sum(map(len, graph().values())) > 150


def test_a_cycle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert cycles(edges) == [{"b", "c"}]


def test_there_are_no_cycles() -> None:
    assert cycles(graph()) == []


@pytest.mark.parametrize("layer", ALLOWED)
def test_no_import_leads_upwards(layer: str) -> None:
    members = [module for module in graph() if layer_of(module) == layer]
    assert members
    upwards = [
        f"{module} -> {imported}"
        for module in members
        for imported in graph()[module]
        if layer_of(imported) not in ALLOWED[layer]
    ]
    assert upwards == []
