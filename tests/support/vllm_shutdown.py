"""An engine of vLLM in the user's process that is shut down while it is still referenced."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch
from engine_host.jobs import run_job
from v2_on_cpu import check_runner, for_runner
from vllm_runs import ENVIRONMENT, TIMEOUTS, engine_arguments, sampling_parameters, with_defaults


def left_after_shutdown(model: Path, speculative: dict[str, Any], runner: str) -> list[str]:
    """Serve a request, shut the engine down, and look for what should be gone.

    Args:
        model: Folder of the target.
        speculative: The engine's `speculative_config`.
        runner: vLLM's model runner, "v1" or "v2".

    Returns:
        What still exists: `kv cache`, and attributes of the model runner.
    """
    arguments = engine_arguments(model, max_num_seqs=2)
    arguments["speculative_config"] = with_defaults(speculative)
    variables, seconds = ENVIRONMENT | for_runner(runner), TIMEOUTS[runner == "v2"]
    left: list[str]
    left, log = run_job("vllm", _left, (arguments,), variables, seconds)
    check_runner(runner, log)
    return left


def _left(arguments: dict[str, Any]) -> list[str]:
    from vllm import LLM

    llm = LLM(**arguments)
    sampling = sampling_parameters({"temperature": 0.0, "max_tokens": 8})
    llm.generate([{"prompt_token_ids": [5, 6, 7] * 8}], sampling, use_tqdm=False)
    core = llm.llm_engine.engine_core
    runner: Any = llm.collective_rpc(lambda worker: worker)[0].model_runner
    caches = {each.untyped_storage().data_ptr() for each in runner.kv_caches}
    models = ("_drafter", "_draft_model", "_layer")
    held = {each: weakref.ref(getattr(runner, each)) for each in models if hasattr(runner, each)}
    assert caches
    assert held
    core.shutdown()
    gc.collect()
    left = [name for name, reference in held.items() if reference() is not None]
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    if any(each.untyped_storage().data_ptr() in caches for each in tensors):
        left.append("kv cache")
    return left
