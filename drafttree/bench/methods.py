"""Turns a method's name and options on the command line into a speculative configuration.

Methods that draft trees are found through the entry-point group `drafttree.methods`; `ngram`,
`suffix` and `draft-model` are vLLM's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drafttree.bench.errors import InputError
from drafttree.method import find_method, installed_methods

_NGRAM: dict[str, Any] = {
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}

_NOT_IN_SGLANG = {
    "ngram": (
        "does not run in SGLang on a CPU, whose attention backend cannot verify drafts: use "
        "--method none or a tree method"
    ),
    "draft-model": (
        "is measured in vLLM alone: SGLang's draft models (STANDALONE) need a GPU or a CPU with "
        "AMX, as its attention backend for other CPUs, torch_native, is refused for drafting. Use "
        "--engine vllm, or chains of the same draft model: --method rsd --option tree=branch:1-1-1"
    ),
    "suffix": "is vLLM's own: use --engine vllm",
}
"""Why a method is not measured in SGLang."""

_BUILD_SUFFIX = (
    "--method suffix is vLLM's suffix decoding and needs arctic-inference, which has no wheels. To "
    "build it, with the engine's environment active, cmake and a C++ compiler: "
    "pip install nanobind==2.9.2 setuptools wheel && "
    "pip install --no-build-isolation --no-deps arctic-inference==0.3.0"
)


@dataclass(frozen=True)
class BenchMethod:
    """What is measured against plain decoding.

    Attributes:
        name: Name of the method, with hyphens.
        options: Options as given on the command line.
        speculative_config: The engine's speculative configuration; None for plain decoding.
        max_draft_tokens: Greatest number of draft tokens of a tree, the root not counted; None for
            a method that drafts no trees.
        draft_forwards: Forwards of the draft model for a tree; None if that is not known.
        draft_model: Folder of the draft model, for a method that has one.
        timed: Whether the engine reports the time spent drafting.
        primes: Whether its drafter computes something beforehand; see `Method.primes`.
    """

    name: str
    options: dict[str, Any]
    speculative_config: dict[str, Any] | None
    max_draft_tokens: int | None = None
    draft_forwards: int | None = None
    draft_model: str | None = None
    timed: bool = False
    primes: bool = False

    @property
    def drafts_trees(self) -> bool:
        """Whether the method drafts trees, unlike none and the engine's own methods."""
        return self.max_draft_tokens is not None

    @property
    def learns(self) -> bool:
        """Whether the method keeps something from request to request, which a reset drops."""
        return self.drafts_trees or self.name == "suffix"


def shipped_model(name: str, target: str) -> Path | None:
    """The model that comes with a method for the target of a recipe, if there is one."""
    method = installed_methods().get(name.replace("-", "_"))
    return None if method is None else method.models.get(target)


def resolve_method(name: str, options: dict[str, Any]) -> BenchMethod:
    """The method called `name`, with hyphens or underscores.

    Raises:
        InputError: There is no such method, or its options are wrong.
    """
    name = name.replace("_", "-")
    if name == "none":
        if options:
            raise InputError("method none takes no options")
        return BenchMethod(name, {}, None)
    if name == "ngram":
        return BenchMethod(name, options, {"method": "ngram", **_NGRAM, **options})
    if name == "suffix":
        return BenchMethod(name, options, {"method": "suffix", **options})
    if name == "draft-model":
        if "model" not in options:
            raise InputError("--method draft-model needs --option model=FOLDER, the draft model's")
        config = {"method": "draft_model", "num_speculative_tokens": 5, **options}
        return BenchMethod(name, options, config, draft_model=str(options["model"]))
    try:
        tree_method = find_method(name)
    except ValueError as error:
        raise InputError(
            f"{error}, besides none and vLLM's own ngram, suffix and draft-model"
        ) from error
    try:
        parsed = tree_method.parse(options)
    except ValueError as error:
        raise InputError(str(error)) from error
    return BenchMethod(
        name,
        options,
        {"method": tree_method.name, **options},
        parsed.num_draft_tokens,
        parsed.draft_forwards,
        str(options["model"]) if tree_method.kind.needs_vocabulary_of_target else None,
        tree_method.kind.needs_model,
        tree_method.primes,
    )


def resolve_variants(name: str, options: Iterable[str], varied: Iterable[str]) -> list[BenchMethod]:
    """The method called `name`, once for each of the `varied` pairs.

    Args:
        name: Name of the method.
        options: `KEY=VALUE` pairs that all variants have.
        varied: `KEY=VALUE` pairs, one for each variant; without any there is one variant.
    """
    given = parse_pairs(options)
    variants = []
    for pair in varied:
        more = parse_pairs([pair])
        if twice := given.keys() & more.keys():
            raise InputError(f"--vary {pair}: {twice.pop()} is also given with --option")
        variants.append(resolve_method(name, given | more))
    return variants or [resolve_method(name, given)]


def check_engine(engine: str, method: BenchMethod, temperature: float = 0.0) -> None:
    """Refuse a method that the engine cannot run.

    Args:
        engine: `vllm` or `sglang`.
        method: The method.
        temperature: Temperature of the requests; 0 for greedy decoding.

    Raises:
        InputError: The engine cannot run it; the message gives the reason.
    """
    if engine == "sglang" and method.name in _NOT_IN_SGLANG:
        raise InputError(f"--method {method.name} {_NOT_IN_SGLANG[method.name]}")
    if method.name == "suffix" and find_spec("arctic_inference") is None:
        raise InputError(_BUILD_SUFFIX)
    own = engine == "vllm" and not method.drafts_trees and method.speculative_config is not None
    if own and temperature > 0 and not _has_gpu():
        raise InputError(
            f"--method {method.name} is not measured at --temperature {temperature:g} on a CPU: "
            "there vLLM 0.32 divides logits by uninitialised memory when it verifies its own "
            "drafts, so its answers are not the model's. Use --temperature 0"
        )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs; values that are not valid JSON are strings."""
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
        # Besides what is no JSON: numbers that are too long, and deep nesting.
        except (ValueError, RecursionError):
            options[key] = value
    return options
