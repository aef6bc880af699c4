"""Write the generated parts of the documentation, or check that they are up to date.

    .venv-vllm/bin/python -m scripts.docs.generate [--check]

A generated part is enclosed by `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from drafttree.budget.constants import BudgetConstants
from drafttree.compatibility import ENGINES, Cell, features
from drafttree.deprecation import Deprecation
from drafttree.method import DRAFT_MODEL, HIDDEN_STATE, MODEL_FREE
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.training.command import FORMER_START
from recycle_plugin.config import FORMER_DRAFTING, RecycleOptions
from rsd_plugin.config import RsdOptions
from scripts.benchmarks import record_plan
from scripts.benchmarks.bench_servers import tables as load_tables
from scripts.benchmarks.record_table import tables

if TYPE_CHECKING:
    from drafttree.patches import Patch

DOCS = Path(__file__).resolve().parents[2] / "docs"
DEPRECATED: tuple[Deprecation, ...] = (*FORMER_DRAFTING.values(), FORMER_START)
"""Every name that still works and is about to go."""
PART = re.compile(r"(<!-- generated: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.S)


def option_table(fields: Mapping[str, FieldInfo]) -> str:
    """A table of a method's options, from the descriptions of their fields."""
    rows = ["| option | default | values | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.is_required() else f"`{_written(field.default)}`"
        assert field.description is not None, f"the option {name} has no description"
        meaning = field.description.replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {_values(field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(field: FieldInfo) -> str:
    low = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    high = next((each.le for each in field.metadata if isinstance(each, Le)), None)
    if low is not None:
        return f"{low} to {high}" if high is not None else f"{low} or more"
    return ", ".join(_kinds(field.annotation))


def _kinds(annotation: Any) -> list[str]:
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    if get_origin(annotation) is Literal:
        return [f"`{value}`" for value in get_args(annotation)]
    named = {
        int: ["a number"],
        str: ["a string"],
        Path: ["a path"],
        bool: ["`true`", "`false`"],
        RecycleOptions: ["an object"],
    }
    return named[annotation]


def patch_table(host: str) -> str:
    """A table of the patches that a host, "vllm" or "sglang", makes in its engine."""
    patches: Iterable[Patch] = import_module(f"drafttree.{host}.patches").PATCHES
    rows = ["| replaced or set | when | why |", "|---|---|---|"]
    for patch in patches:
        target = re.sub(r"^[\w.:]+$", r"`\g<0>`", patch.target)
        when = patch.when[0].upper() + patch.when[1:].rstrip(".") + "."
        rows.append(f"| {target} | {when} | {patch.reason} |")
    return "\n".join(rows) + "\n"


def constant_table() -> str:
    """A table of the node budget's constants, from the descriptions of their fields."""
    rows = ["| constant | default | meaning |", "|---|---|---|"]
    for name, field in BudgetConstants.model_fields.items():
        rows.append(f"| `{name}` | {_short(field.default)} | {field.description} |")
    return "\n".join(rows) + "\n"


def compatibility_table() -> str:
    """A table of what works with what."""
    kinds = {"Token Recycling": MODEL_FREE, "RSD": DRAFT_MODEL, "Lyanna": HIDDEN_STATE}
    columns = [(engine, kind.name) for engine in ENGINES for kind in kinds.values()]
    heads = [f"{title}, {engine}" for engine in ENGINES.values() for title in kinds]
    rows = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for feature in features().values():
        cells = [_state(feature.cell(engine, kind)) for engine, kind in columns]
        rows.append("| " + " | ".join((feature.title, *cells)) + " |")
    return "\n".join(rows) + "\n"


def _state(cell: Cell) -> str:
    """A cell as a table shows it."""
    file = cell.test.partition("::")[0]
    return {
        "tested": f"tested (`{file}`)",
        "untested": "served, untested",
        "chains": f"chains, tested (`{file}`)" if file else "chains, untested",
        "plain": "served without drafts",
        "refused": "refused",
        "none": "",
    }[cell.state]


def deprecation_table() -> str:
    """A table of the deprecated names."""
    rows = ["| name | of | use instead | deprecated in | goes in |", "|---|---|---|---|---|"]
    for each in DEPRECATED:
        versions = f"{each.since} | {each.gone_in}"
        rows.append(f"| `{each.name}` | {each.of} | `{each.instead}` | {versions} |")
    return "\n".join(rows) + "\n"


def server_tables() -> str:
    """The tables of both engines' servers under load."""
    results = DOCS.parent / "results"
    return "\n".join(
        load_tables(json.loads(file.read_text()))
        for engine in record_plan.ENGINES
        for file in sorted(results.glob(f"{engine}_servers*.json"))
    )


def record_tables() -> str:
    """The tables of the figures of record."""
    everything = record_plan.ENGINES, record_plan.CONCURRENCIES, record_plan.METHODS
    folder = DOCS.parent / "results" / "record"
    reports = record_plan.reports(folder, record_plan.cells(*everything))
    return tables(reports).rstrip("\n") + "\n"


def _short(value: float) -> str:
    """A number in at most three decimals, or else as a fraction."""
    return str(value) if round(value, 3) == value else f"1/{round(1 / value)}"


PARTS: dict[str, Callable[[], str]] = {
    "options token_recycling": lambda: option_table(RecycleOptions.model_fields),
    "options rsd": lambda: option_table(RsdOptions.model_fields),
    "options lyanna": lambda: option_table(LyannaOptions.model_fields),
    "constants node_budget": constant_table,
    "compatibility": compatibility_table,
    "deprecated": deprecation_table,
    "record": record_tables,
    "servers": server_tables,
    "patches vllm": lambda: patch_table("vllm"),
    "patches sglang": lambda: patch_table("sglang"),
}


def generated(page: str) -> str:
    """A page with its generated parts brought up to date."""
    return PART.sub(lambda part: part[1] + "\n" + PARTS[part[2]]() + "\n" + part[4], page)


def main(arguments: list[str]) -> int:
    """Write all pages, or with `--check` name the stale ones; return the exit status."""
    stale = []
    for file in sorted(DOCS.glob("*.md")):
        page = file.read_text()
        if (new := generated(page)) != page:
            stale.append(file.name)
            if "--check" not in arguments:
                file.write_text(new)
    for name in stale:
        print(f"docs/{name} {'is out of date' if '--check' in arguments else 'was written'}")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
