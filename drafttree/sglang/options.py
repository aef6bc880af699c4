"""A method's options in SGLang; needs no engine.

A plugin cannot extend SGLang's command line, so the options are passed in an environment variable,
which the engine's processes inherit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from drafttree.method import Method, MethodOptions

VARIABLE = "DRAFTTREE_OPTIONS"


def set_options(**options: Any) -> None:
    """Set the method's options for engines that are started later; without any, clear them.

    This sets `DRAFTTREE_OPTIONS`; each call replaces the options of earlier calls.
    """
    if options:
        os.environ[VARIABLE] = json.dumps(options)
    else:
        os.environ.pop(VARIABLE, None)


def given_options() -> dict[str, Any]:
    """The options in `DRAFTTREE_OPTIONS`, which is JSON or the path of a JSON file.

    Raises:
        ValueError: The variable is neither, or its JSON is not an object.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return {}
    text = value
    if not value.startswith("{"):
        try:
            text = Path(value).read_text()
        except OSError as error:
            raise ValueError(
                f"{VARIABLE}={value!r} is neither a JSON object nor a file that can be read "
                f"({error.strerror}): write it as in '{{\"nodes\": 15}}'"
            ) from error
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{VARIABLE}={value!r} is not valid JSON ({error}): correct it") from error
    if not isinstance(options, dict):
        raise ValueError(
            f"{VARIABLE}={value!r} is not a JSON object: write it as in '{{\"nodes\": 15}}'"
        )
    return options


def parse_options(
    method: Method[Any], num_draft_tokens: int | None, draft_model: str | None = None
) -> MethodOptions:
    """The method's options, combined with SGLang's own settings.

    Args:
        method: The method.
        num_draft_tokens: `--speculative-num-draft-tokens`, in which SGLang counts the root; None
            if not given.
        draft_model: `--speculative-draft-model-path`; None if not given.

    Raises:
        ValueError: The message names the option, its value and the fix.
    """
    given = {name.replace("-", "_"): value for name, value in given_options().items()}
    if num_draft_tokens is not None and num_draft_tokens < 2:
        raise ValueError(
            f"--speculative-num-draft-tokens={num_draft_tokens} leaves no draft token beside "
            "the root: set it to 2 or more"
        )
    if draft_model is not None:
        given["model"] = draft_model
    if num_draft_tokens is not None:
        given = method.options.apply_num_draft_tokens(given, num_draft_tokens - 1)
    options = method.parse(given)
    if num_draft_tokens not in (None, options.num_draft_tokens + 1):
        raise ValueError(
            f"--speculative-num-draft-tokens={num_draft_tokens} but the tree of {method.title} "
            f"has {options.num_draft_tokens + 1} with its root: leave one of the two out"
        )
    return options
