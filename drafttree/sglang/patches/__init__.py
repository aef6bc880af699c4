"""Everything that drafttree replaces in SGLang; `PATCHES` lists it. Importing this needs no engine.

Each file has the patches of one part of the engine.

Each function does nothing if it was called before, and otherwise checks that its patch fits the
engine. For servers without a drafttree method the replacements do what SGLang does, so several
engines may share one process.
"""

from __future__ import annotations

from drafttree.patches import Patch
from drafttree.sglang.patches import memory, runner, scheduler, server
from drafttree.sglang.patches.memory import (
    count_layer_memory,
    keep_computed_kv_of_sessions,
    match_prefixes_by_bigrams,
    widen_request_rows,
)
from drafttree.sglang.patches.runner import (
    exchange_graphs,
    install_acceptance_sampler,
    observe_prefill,
    publish_reads,
    replace_logits,
    verify_in_graphs,
)
from drafttree.sglang.patches.scheduler import (
    check_stops_in_order,
    refuse_recaptures,
    report_counters,
    report_new_weights,
    use_idle_rounds,
)
from drafttree.sglang.patches.server import accept_adapters, route_attention, take_corpora

__all__ = [
    "PATCHES",
    "accept_adapters",
    "check_stops_in_order",
    "count_layer_memory",
    "exchange_graphs",
    "install_acceptance_sampler",
    "keep_computed_kv_of_sessions",
    "match_prefixes_by_bigrams",
    "observe_prefill",
    "publish_reads",
    "refuse_recaptures",
    "replace_logits",
    "report_counters",
    "report_new_weights",
    "route_attention",
    "take_corpora",
    "use_idle_rounds",
    "verify_in_graphs",
    "widen_request_rows",
]

PATCHES: tuple[Patch, ...] = (
    *server.PATCHES,
    *scheduler.PATCHES,
    *memory.PATCHES,
    *runner.PATCHES,
)
