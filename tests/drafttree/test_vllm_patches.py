"""Only `patches` replaces or sets parts of vLLM, as the sources of the package show."""

from __future__ import annotations

import ast
from pathlib import Path

from assignments import assignments, assignments_in

import drafttree.vllm
from drafttree.vllm.patches import PATCHES

FOLDER = Path(drafttree.vllm.__file__).parent
SOURCES = [file.read_text() for file in (FOLDER / "patches").glob("*.py")]

SETTERS = (
    *("set_attributes", "setattr", "__setattr__"),
    *("register_backend", "clear_override", "cache_clear", "initialize_cudagraph_keys"),
)

STEP_STATE = {"step"}
"""Name of drafttree's own `StepState`."""

NO_PATCHES = {
    "acceptance_sampler.py: self.topk_topp_sampler.choose": "a module of drafttree's own sampler",
    "adapters.py: copied._modules": "a copy, for a drafter's embeddings and logits",
    "drafters/draft_model_loader.py: config.model_config": "a copy, for the draft model",
    "drafters/draft_model_loader.py: config.quant_config": "a copy, for the draft model",
    "drafters/model_free.py: self._drafter.shares_texts": "a drafter of this rank",
    "drafters/layer_graphs.py: self._forward.graph_pool": "a wrapper of drafttree's own graphs",
    "forward.py: builder.step_masks": "drafttree's own metadata builder",
    "runner.py: builder.step_masks": "drafttree's own metadata builder",
    "runner_choice.py: object.__setattr__(config, name, value)": "a configuration of its own",
    "row_settings.py: copied.min_p": "a copy, for the rows of several nodes of a request",
    "tracing.py: runner.__class__": "drafttree's own runner, while its steps are recorded",
    "v2/draft_model.py: self._clock.read_tokens": "drafttree's own clock",
    "v2/hidden_state.py: self._clock.read_tokens": "drafttree's own clock",
    "session_turns.py: request.num_computed_tokens": "as the scheduler, a subclass, sets it itself",
    "session_turns.py: request.spec_token_ids": "as the scheduler, a subclass, sets it itself",
    "v2/model_free.py: self._trees.drafter": "drafttree's own speculator",
    "v2/runner.py: builder.step_masks": "drafttree's own metadata builder",
    "v2/runner.py: self._reports.forward_seconds": "drafttree's own reports",
    "v2/runner.py: self._trees.looks_up": "drafttree's own speculator",
    "sampling.py: metadata.generators": "a copy, for one level of the trees",
    "sampling.py: plain.speculative_config": "a copy, from which logits processors are built",
}
"""Assignments outside of `patches`, and why they change no object of the engine."""

READ_AGAIN = "dispatcher.initialize_cudagraph_keys(dispatcher.cudagraph_mode, tree_size)"

APPLIED_BY = {
    "GPUModelRunner": "runner.__class__",
    "RopeState": "runner.__class__",
    "AttentionBackendEnum": "register_backend(backend, previous)",
    "cudagraph_keys": READ_AGAIN,
    "_bs_to_padded_graph_size": READ_AGAIN,
    "drafttree": "object.__setattr__(config, _REQUEST, request)",
    "drafttree_graphs": "object.__setattr__(settings, _GRAPHS, sizes)",
    "drafttree_looks_up": "setattr(output, _LOOKS_UP, looks_up)",
    "drafttree_update": "setattr(output, _UPDATE, update)",
    "drafttree_report": "setattr(output, _REPORT, report)",
    "drafttree_proposals": "setattr(drafts, _PROPOSALS, proposals)",
    "drafttree_bound": "setattr(output, _BOUND, shapes)",
    "drafttree_number": "setattr(output, _NUMBER, number)",
    "drafttree_drafted": "setattr(output, _DRAFTED, trees)",
}
"""Assignments and calls in `patches` that do not contain the name of what they replace."""


def test_a_replacement_is_found() -> None:
    source = """
self.own = step.masks = 1
engine.attention_backend, local = 2, 3
object.__setattr__(config, NAME, True)
dispatcher.initialize_cudagraph_keys(mode)
backend.clear_override()
set_attributes(batch, logitsprocs=4, holder=5)
"""
    assert sorted(assignments(source, SETTERS, STEP_STATE)) == [
        "backend.clear_override()",
        "batch.holder",
        "batch.logitsprocs",
        "dispatcher.initialize_cudagraph_keys(mode)",
        "engine.attention_backend",
        "object.__setattr__(config, NAME, True)",
    ]


def test_only_patches_replaces_anything() -> None:
    assert assignments_in(FOLDER, SETTERS, STEP_STATE) == set(NO_PATCHES)


def test_each_patch_is_applied_in_patches() -> None:
    found = {each for source in SOURCES for each in assignments(source, SETTERS)}
    overridden = {
        ast.literal_eval(node.args[1])
        for source in SOURCES
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_override_method"
    }
    applied = {each.rpartition(".")[2] for each in found} | overridden
    for patch in PATCHES:
        name = patch.target.replace(":", ".").rpartition(".")[2]
        assert name in applied or APPLIED_BY[name] in found
        assert patch.when
        assert patch.reason
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)


def test_each_replaced_attribute_is_listed() -> None:
    """All attributes that `patches` assigns are names in `PATCHES`."""
    listed = {patch.target.replace(":", ".").rpartition(".")[2] for patch in PATCHES}
    unlisted = {
        each
        for source in SOURCES
        for each in assignments(source, SETTERS)
        if "(" not in each and each.rpartition(".")[2] not in listed
    }
    assert unlisted == {"runner.__class__"}
