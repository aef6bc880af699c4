"""Everything that drafttree replaces or sets in vLLM: what, when, why, and the code that does it.

One method of the engine is wrapped at registration; the wrapper passes everything on unless a
drafttree method is requested. All other patches are applied only then. Each patch checks that it
fits the engine, and applying it twice is the same as applying it once. Importing this package
imports no part of vLLM. Each file has the patches of one part of the engine.

The contents of a step's tensors and lists, such as positions and output tokens, are not listed: the
model runner writes them as the engine's own runner does.
"""

from __future__ import annotations

from drafttree.patches import Patch
from drafttree.vllm.patches import (
    arguments,
    configuration,
    graphs,
    layers,
    request,
    runner,
    scheduling,
)
from drafttree.vllm.patches.arguments import (
    replace_speculative_arguments,
    use_attention_backend,
    wrap_create_speculative_config,
)
from drafttree.vllm.patches.configuration import (
    drop_last_block,
    hash_request,
    hide_draft_schedule,
    use_worker,
    without_logits_processors,
)
from drafttree.vllm.patches.graphs import (
    choose_capture_sizes,
    chosen_capture_sizes,
    replace_capture_sizes,
)
from drafttree.vllm.patches.layers import keep_convolutions, override_backend
from drafttree.vllm.patches.request import (
    Request,
    allow_sampling_parameters,
    key_of_trees,
    mark_requested,
    prime_when_idle,
    requested,
)
from drafttree.vllm.patches.runner import (
    adopt,
    keep_texts_on_host,
    limit_grammar_masks,
    replace_budget_states,
    replace_logits_processors,
    replace_model_memory,
    replace_speculator,
    replace_thinking_budgets,
    skip_rejection_sampling,
)
from drafttree.vllm.patches.scheduling import (
    attach_report,
    attach_update,
    binds_trees,
    bound_in,
    chooses_tiers,
    drafted_in,
    number_of,
    number_step,
    proposals_in,
    replace_table,
    report_of,
    request_lookup,
    send_bound,
    send_proposals,
    show_drafted,
    update_of,
    use_scheduler,
    wants_lookup,
)

PATCHES: tuple[Patch, ...] = (
    *arguments.PATCHES,
    *request.PATCHES,
    *configuration.PATCHES,
    *scheduling.PATCHES,
    *graphs.PATCHES,
    *runner.PATCHES,
    *layers.PATCHES,
)

__all__ = [
    "PATCHES",
    "Request",
    "adopt",
    "allow_sampling_parameters",
    "attach_report",
    "attach_update",
    "binds_trees",
    "bound_in",
    "choose_capture_sizes",
    "chooses_tiers",
    "chosen_capture_sizes",
    "drafted_in",
    "drop_last_block",
    "hash_request",
    "hide_draft_schedule",
    "keep_convolutions",
    "keep_texts_on_host",
    "key_of_trees",
    "limit_grammar_masks",
    "mark_requested",
    "number_of",
    "number_step",
    "override_backend",
    "prime_when_idle",
    "proposals_in",
    "replace_budget_states",
    "replace_capture_sizes",
    "replace_logits_processors",
    "replace_model_memory",
    "replace_speculative_arguments",
    "replace_speculator",
    "replace_table",
    "replace_thinking_budgets",
    "report_of",
    "request_lookup",
    "requested",
    "send_bound",
    "send_proposals",
    "show_drafted",
    "skip_rejection_sampling",
    "update_of",
    "use_attention_backend",
    "use_scheduler",
    "use_worker",
    "wants_lookup",
    "without_logits_processors",
    "wrap_create_speculative_config",
]
