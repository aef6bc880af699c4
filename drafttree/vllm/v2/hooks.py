"""The functions of vLLM's V2 model runner that drafttree overrides or calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from drafttree.patches import check_first_parameters
from drafttree.vllm.versions import unknown


def check_hooks() -> None:
    """Check that the V2 model runner is the one that drafttree was written for.

    Raises:
        RuntimeError: A function is missing or takes other parameters.
    """
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    for owner, name, parameters in (
        (GPUModelRunner, "_remove_request", "self req_id"),
        (GPUModelRunner, "add_requests", "self scheduler_output"),
        (GPUModelRunner, "update_requests", "self scheduler_output"),
        (GPUModelRunner, "prepare_attn", "self input_batch"),
        (GPUModelRunner, "prepare_dummy_attn", "self input_batch"),
        (GPUModelRunner, "sample", "self hidden_states input_batch grammar_output"),
        (GPUModelRunner, "initialize_kv_cache", "self kv_cache_config"),
        (
            GPUModelRunner,
            "_set_active_loras",
            "self prompt_lora_mapping token_lora_mapping lora_requests",
        ),
        (
            BaseSpeculator,
            "propose",
            "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
            "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds",
        ),
        (
            Sampler,
            "sample",
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
            "expanded_local_pos seq_lens_upper_bound_np return_logprobs",
        ),
        (
            Sampler,
            "apply_sampling_params",
            "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
            "expanded_local_pos seq_lens_upper_bound_np",
        ),
        (Sampler, "get_logprobs_dims", "self idx_mapping_np"),
        (
            SamplingStates,
            "apply_temperature",
            "self logits expanded_idx_mapping idx_mapping_np",
        ),
        (SamplingStates, "apply_min_p", "self logits expanded_idx_mapping idx_mapping_np"),
        (SamplingStates, "any_greedy", "self idx_mapping_np"),
        (
            SamplingStates,
            "apply_top_k_top_p",
            "self logits expanded_idx_mapping idx_mapping_np",
        ),
        (LogitBiasState, "apply", "self logits ctx"),
        (
            StructuredOutputsWorker,
            "apply_grammar_bitmask",
            "self logits input_batch grammar_req_ids grammar_bitmask",
        ),
    ):
        function = getattr(owner, name, None)
        check_first_parameters(f"{owner.__name__}.{name}", function, parameters.split(), unknown)
    for function, parameters in (
        (
            get_num_sampled_and_rejected,
            "num_sampled seq_lens cu_num_logits idx_mapping prefill_len",
        ),
        (
            compute_topk_scores,
            "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state "
            "expanded_idx_mapping max_per_req_token_ids logits_mode",
        ),
    ):
        check_first_parameters(function.__name__, function, parameters.split(), unknown)


def check_next_tokens(states: Any, max_num_reqs: int) -> None:
    """Check that the engine keeps the prompts' next tokens, which a drafter's layer reads.

    Args:
        states: The model runner's states of requests.
        max_num_reqs: Number of their rows.

    Raises:
        RuntimeError: It does not, or not as `[lookahead, max_num_reqs]`.
    """
    shape = getattr(getattr(states, "next_prefill_tokens", None), "shape", None)
    if shape is None or len(shape) != 2 or shape[0] < 1 or shape[1] != max_num_reqs:
        raise unknown(f"its states have next_prefill_tokens of shape {shape}")


def check_sampler(sampler: Any, max_num_reqs: int) -> None:
    """Check that the engine's sampler tells which requests need more than their logits.

    Args:
        sampler: The model runner's sampler.
        max_num_reqs: Number of rows of the states of requests.

    Raises:
        RuntimeError: It does not, or not as an array of NumPy's, `bool [max_num_reqs]`.
    """
    flags = getattr(sampler, "needs_logits_processing", None)
    if not isinstance(flags, np.ndarray) or flags.dtype != np.bool_ or len(flags) != max_num_reqs:
        raise unknown(f"its sampler has needs_logits_processing={flags!r}")


def check_graphs(runner: Any) -> None:
    """Check that the engine's CUDA graphs call the target as a module.

    vLLM turns breakable graphs on itself for some models, so it is checked when that is known.

    Args:
        runner: The model runner, when its KV caches exist.

    Raises:
        ValueError: They do not.
    """
    # Without graphs there is no manager, and an older version may lack these graphs.
    manager = getattr(runner, "cudagraph_manager", None)
    if getattr(manager, "use_breakable_cg", False):
        raise ValueError(
            "breakable CUDA graphs run the target without the hook in which RSD and Lyanna draft "
            "on vLLM's V2 model runner: set VLLM_USE_BREAKABLE_CUDAGRAPH=0"
        )


def check_forward(seen: object, batch: object) -> None:
    """Check that a hook before the target's forward has seen the batch that is sampled.

    Args:
        seen: The last batch that the hook has seen.
        batch: The batch that is sampled. The engine's warm-up is the first to sample one.

    Raises:
        RuntimeError: The engine runs the target without calling it as a module.
    """
    if seen is not batch:
        raise unknown("it runs the target without calling it as a module")
