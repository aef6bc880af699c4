"""vLLM's V2 model runner on a CPU, with its Triton kernels in Triton's interpreter.

vLLM's build for CPUs has no Triton backend, so it has no V2 model runner. Here it finds one, before
it is imported. Scheduling is asynchronous unless an engine asks for `async_scheduling=False`: the
order of steps is that of a GPU, though nothing overlaps.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import gumbel_on_cpu
import quick_interpreter

VARIABLE = "TESTS_V2_ON_CPU"

ENVIRONMENT = {VARIABLE: "1", "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 20,
}
"""Settings of an engine that soon chunks prompts, queues requests and preempts."""


def for_runner(runner: str) -> dict[str, str]:
    """The environment of an engine's process with a model runner, "v1" or "v2"."""
    return ENVIRONMENT if runner == "v2" else {}


def check_runner(runner: str, log: str) -> str:
    """The log of an engine that must have used a model runner."""
    assert ("Using V2 Model Runner" in log) == (runner == "v2")
    return log


class _Driver:
    """Where Triton looks for a device; the interpreter asks it for nothing."""

    @staticmethod
    def is_active() -> bool:
        return True


@functools.cache
def enable() -> None:
    """Let vLLM, which must not be imported yet, find a Triton for CPUs; once in a process."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)  # type: ignore[assignment]
    _accept_integer_masks()
    quick_interpreter.enable()
    _schedule_asynchronously()
    # The kernel of top-k and top-p is not for the interpreter. vLLM has a way without it.
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
    # On a CPU top-k alone waits for values of its input.
    topk_topp_sampler.apply_top_k_only = lambda logits, k: (
        topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, None)
    )
    from vllm.v1.worker.gpu.sample import sampler, states

    sampler.gumbel_sample = gumbel_on_cpu.gumbel_sample
    states.apply_temperature = gumbel_on_cpu.apply_temperature


def _accept_integer_masks() -> None:
    """Some masks, such as `a & b` of a block and a number, are integers in the interpreter, whose
    own loads and stores then refuse them."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        stock = getattr(InterpreterBuilder, name)

        def access(
            self: Any, *args: Any, stock: Any = stock, place: int = place, **kwargs: Any
        ) -> Any:
            mask = args[place]
            if mask.data.dtype != np.bool_:
                mask = TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return stock(self, *args[:place], mask, *args[place + 1 :], **kwargs)

        setattr(InterpreterBuilder, name, access)


def _schedule_asynchronously() -> None:
    """vLLM turns asynchronous scheduling off on CPUs, which gain nothing by it."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        stock(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(  # type: ignore[method-assign]
        check_and_update_config
    )
