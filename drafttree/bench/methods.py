"""From a method's name and options on the command line to the engine's speculative configuration.

Methods that draft trees are found through the entry-point group `drafttree.methods`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttree.bench.errors import InputError
from drafttree.method import find_method, installed_methods

_NGRAM: dict[str, Any] = {
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}


@dataclass(frozen=True)
class Method:
    """What is measured against plain decoding.

    Attributes:
        tree_nodes: the draft nodes of a whole tree, for a method that drafts trees.
        tree_depth: and their greatest depth.
        draft_model: the folder of the draft model, for a method that has one.
        timed: whether the engine tells the time spent drafting.
        prepare: `(target's folder)`, for a method that makes something at its first use of one.
    """

    name: str
    options: dict[str, Any]
    speculative_config: dict[str, Any] | None
    tree_nodes: int | None = None
    tree_depth: int | None = None
    draft_model: str | None = None
    timed: bool = False
    prepare: Callable[[Path], None] | None = None


def model_free_names() -> list[str]:
    """The installed tree methods that need no draft model, as typed on the command line."""
    methods = installed_methods().items()
    return sorted(name.replace("_", "-") for name, method in methods if not method.takes_model)


def shipped_model(name: str, target: str) -> Path | None:
    """The model that comes with a method for the target of this recipe, if one does."""
    method = installed_methods().get(name.replace("-", "_"))
    return None if method is None else method.models.get(target)


def resolve_method(name: str, options: dict[str, Any]) -> Method:
    """The method called `name`; hyphens and underscores are alike."""
    name = name.replace("_", "-")
    if name == "none":
        if options:
            raise InputError("method none takes no options")
        return Method(name, {}, None)
    if name == "ngram":
        return Method(name, options, {"method": "ngram", **_NGRAM, **options})
    try:
        tree_method = find_method(name)
    except ValueError as error:
        raise InputError(f"{error}, besides none and the engine's own ngram") from error
    try:
        parsed = tree_method.parse(options)
    except ValueError as error:
        raise InputError(str(error)) from error
    prepare = tree_method.prepare
    return Method(
        name,
        options,
        {"method": tree_method.name, **options},
        parsed.num_nodes,
        parsed.depth,
        str(options["model"]) if tree_method.draft_model else None,
        tree_method.takes_model,
        None if prepare is None else lambda folder: prepare(folder, parsed),
    )


def resolve_variants(name: str, options: Iterable[str], varied: Iterable[str]) -> list[Method]:
    """The method called `name` with `options`, `KEY=VALUE` pairs, and each of `varied` besides;
    once if there are none."""
    given = parse_options(options)
    variants = []
    for pair in varied:
        more = parse_options([pair])
        if twice := given.keys() & more.keys():
            raise InputError(f"--vary {pair}: {twice.pop()} is also given with --option")
        variants.append(resolve_method(name, given | more))
    return variants or [resolve_method(name, given)]


def check_engine(engine: str, method: Method) -> None:
    """Refuse a method that the engine cannot run here.

    Raises:
        InputError: with the reason.
    """
    if engine == "sglang" and method.name == "ngram":
        raise InputError(
            "--method ngram does not run in SGLang on a CPU: the attention backend that it has "
            "there cannot verify drafts; compare with none, or run a tree method"
        )


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` pairs; a value that is JSON is read as JSON, any other is a string."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        key = key.strip()
        if not separator or not key:
            raise InputError(f"--option {pair!r}: expected KEY=VALUE")
        if key == "method":
            raise InputError("--option method=...: name the method with --method")
        if key in options:
            raise InputError(f"--option {key} is given twice")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options
