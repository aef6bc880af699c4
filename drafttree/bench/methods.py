"""From a method's name and options on the command line to the engine's speculative configuration.

Methods that draft trees are found through the entry-point group `drafttree.methods`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drafttree.bench.errors import InputError
from drafttree.method import installed_methods

_NGRAM: dict[str, Any] = {
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}

# Options of the engine's own speculative configuration, which it checks itself.
_HOST_OPTIONS = {"num_speculative_tokens"}


@dataclass(frozen=True)
class Method:
    """What is measured against plain decoding."""

    name: str
    options: dict[str, Any]
    speculative_config: dict[str, Any] | None
    drafts_trees: bool


def installed_names() -> list[str]:
    """The names of the installed tree methods, as typed on the command line."""
    return sorted(name.replace("_", "-") for name in installed_methods())


def resolve_method(name: str, options: dict[str, Any]) -> Method:
    """The method called `name`; hyphens and underscores are alike."""
    name = name.replace("_", "-")
    if name == "none":
        if options:
            raise InputError("method none takes no options")
        return Method(name, {}, None, False)
    if name == "ngram":
        config = {"method": "ngram", **_NGRAM, **options}
        return Method(name, options, config, False)
    tree_method = installed_methods().get(name.replace("-", "_"))
    if tree_method is None:
        known = ", ".join(["none", "ngram", *installed_names()])
        raise InputError(f"unknown method {name!r}; known here: {known}")
    own = {key: value for key, value in options.items() if key not in _HOST_OPTIONS}
    try:
        tree_method.parse(own)
    except ValueError as error:
        raise InputError(str(error)) from error
    return Method(name, options, {"method": tree_method.name, **options}, True)


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
