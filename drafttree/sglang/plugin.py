"""Registration with SGLang: makes a method's name valid for `--speculative-algorithm`.

SGLang calls `register` in every process, through the entry-point group `sglang.srt.plugins`. It
uses SGLang's own registries, and servers without a drafttree method run as they do without this
package.
"""

from __future__ import annotations

import functools
from typing import Any

from drafttree.method import Method, installed_methods, load
from drafttree.sglang.patches import route_attention
from drafttree.sglang.versions import TESTED


def register() -> None:
    """Make all installed methods valid for `--speculative-algorithm`.

    SGLang calls this in every process.
    """
    for method in installed_methods().values():
        register_method(method)


def register_method(method: Method[Any]) -> None:
    """Make `--speculative-algorithm NAME` valid, NAME with hyphens. May be called repeatedly.

    Raises:
        RuntimeError: This SGLang lacks what registration needs; SGLang logs it and goes on.
    """
    try:
        from sglang.srt import runtime_context
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from sglang.srt.speculative.spec_registry import get_spec

        from drafttree.sglang.algorithm import algorithm_for
        from drafttree.sglang.chains.choice import drafts_chains
        from drafttree.sglang.checks import check_server
    except ImportError as error:
        raise RuntimeError(
            f"{method.title} does not support this SGLang: install {TESTED}, or leave "
            "--speculative-algorithm out"
        ) from error

    name = method.name.replace("_", "-").upper()
    if get_spec(name) is not None:
        return
    route_attention()

    def worker_for(server_args: Any) -> Any:
        support = method.kind.sglang
        runs = support.runs_chains if drafts_chains(runtime_context.get_spec()) else None
        return load(runs or support.runs).of(method)

    SpeculativeAlgorithm.register(
        name,
        supports_overlap=True,
        validate_server_args=functools.partial(check_server, method),
        spec_class=algorithm_for(method),
    )(worker_for)
