"""Patches of vLLM's model runners and their input batch."""

from __future__ import annotations

from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch

from drafttree.patches import Patch
from drafttree.vllm.patches.settings import set_attributes
from drafttree.vllm.versions import unknown

ON_BATCH = "On the input batch of an adopted model runner."
R = TypeVar("R")

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        when="The class of a worker's model runner, before the model is loaded.",
        reason="vLLM offers no hook for a model runner. The runner keeps all that its class has "
        "set up, and gains the steps that verify trees.",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        when="The class of a worker's V2 model runner, before the model is loaded.",
        reason="The same for the V2 model runner.",
    ),
    Patch(
        target="vllm.v1.worker.gpu.mm.rope:RopeState",
        when="The class of the state of M-RoPE positions on an adopted V2 model runner, when a "
        "model that uses them is loaded.",
        reason="The V2 model runner lays out these positions along a chain between two of its own "
        "hooks. They are moved to those of the trees right after that.",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.speculator",
        when="On an adopted V2 model runner, before the model is loaded.",
        reason="The V2 model runner makes a speculator for each method that it knows. drafttree "
        "requests its GPU n-grams, which need no model, and drafts trees in their place.",
    ),
    Patch(
        target="vllm.v1.worker.gpu.states:RequestState.all_token_ids",
        when="On the request states of an adopted V2 model runner, before the model is loaded.",
        reason="vLLM keeps all texts on a GPU for the n-grams that are requested in drafttree's "
        "place, up to gigabytes. What reads them here, such as bad words and RSD's draft model, "
        "reads few, so they are kept as without speculation, on the host.",
    ),
    Patch(
        target="vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker.grammar_bitmask",
        when="On the worker for grammars of an adopted V2 model runner, when the model is loaded.",
        reason="vLLM keeps a mask for each node of the largest tree of as many requests as may "
        "run. More requests have smaller trees, so a step has fewer rows.",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.rejection_sampler",
        when="On an adopted model runner, before the model is loaded.",
        reason="No step with trees uses vLLM's rejection sampler. When vLLM measures the memory of "
        "a step, it would run it for seconds and reserve memory for it.",
    ),
    *(
        Patch(
            target=f"{kind}.model_memory_usage",
            when="On an adopted model runner on a GPU, when the drafter has been loaded.",
            reason="vLLM sizes its KV cache by the memory that the weights take, and counts "
            "nothing that is loaded after them. The memory of the drafter is added.",
        )
        for kind in (
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        )
    ),
    Patch(
        target="vllm.v1.worker.gpu_input_batch:InputBatch.logitsprocs",
        when=ON_BATCH,
        reason="With speculation vLLM builds only the logits processors that its own verification "
        "can serve.",
    ),
    Patch(
        target="vllm.v1.worker.gpu_input_batch:InputBatch.logitsprocs_need_output_token_ids",
        when=ON_BATCH,
        reason="Custom logits processors may read the requests' output tokens, which vLLM keeps up "
        "to date in the batch only if they are needed.",
    ),
    Patch(
        target="vllm.v1.worker.gpu_input_batch:InputBatch.thinking_budget_state_holder",
        when=ON_BATCH,
        reason="vLLM's own holder counts the logits rows of a chain. Trees are sampled level by "
        "level, one row for each request.",
    ),
    Patch(
        target="vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder._state",
        when="While a step with thinking budgets is sampled; restored afterwards.",
        reason="Trees are sampled level by level, and a request that has left its tree must not "
        "count a token twice.",
    ),
)


_on_host: WeakSet[Any] = WeakSet()


def adopt(runner: Any, stock: type, ours: type[R]) -> R:
    """Turn a stock model runner that has not loaded its model into one of class `ours`.

    The state of M-RoPE positions is adopted in the same way.

    Args:
        runner: The engine's runner.
        stock: The class that the runner must have.
        ours: A subclass of the base class that all runners of the engine share.

    Raises:
        RuntimeError: The runner is of another class.
    """
    if isinstance(runner, ours):
        return runner
    if type(runner) is not stock:
        raise RuntimeError(
            f"draft trees were configured for vLLM's {_path(stock)}, but vLLM has made "
            f"{_path(type(runner))}: leave the speculative method out"
        )
    runner.__class__ = type(ours.__name__, (ours, stock), {})
    return cast(R, runner)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def replace_speculator(runner: Any, speculator: Any) -> None:
    """Let a V2 model runner draft with `speculator`."""
    set_attributes(runner, speculator=speculator)


def keep_texts_on_host(runner: Any) -> None:
    """Let a V2 model runner without requests keep their texts as it does without speculation."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    states = runner.req_states
    if states.all_token_ids in _on_host:
        return
    texts = StagedWriteTensor(
        (runner.max_num_reqs, runner.max_model_len),
        dtype=torch.int32,
        device=runner.device,
        uva_instead_of_gpu=True,
    )
    set_attributes(states, all_token_ids=texts)
    _on_host.add(texts)


def limit_grammar_masks(worker: Any, rows: int) -> None:
    """Let a V2 model runner's worker for grammars keep masks for at most `rows` tokens."""
    masks = worker.grammar_bitmask
    if len(masks) > rows:
        set_attributes(worker, grammar_bitmask=masks.new_zeros(rows, *masks.shape[1:]))


def skip_rejection_sampling(runner: Any) -> None:
    """Let a model runner not run its rejection sampler, which verifies chains and no tree."""
    set_attributes(runner, rejection_sampler=_skip)


def _skip(*args: Any) -> None:
    """Stands in for the engine's rejection sampler."""


def replace_model_memory(runner: Any, size: int) -> None:
    """Let a model runner count `size` bytes as the memory of the weights."""
    set_attributes(runner, model_memory_usage=size)


def replace_logits_processors(batch: Any, processors: Any, custom: bool) -> None:
    """Let an input batch apply `processors`.

    Args:
        batch: The engine's input batch.
        processors: The engine's collection of logits processors.
        custom: Whether there are custom ones, which may read the requests' output tokens.
    """
    set_attributes(batch, logitsprocs=processors, logitsprocs_need_output_token_ids=custom)


def replace_thinking_budgets(batch: Any, holder: Any) -> None:
    """Let an input batch use `holder` for the state of thinking budgets."""
    if holder is not None and not hasattr(holder, "_state"):
        raise unknown(f"{type(holder).__name__} has no _state")
    set_attributes(batch, thinking_budget_state_holder=holder)


def replace_budget_states(holder: Any, states: dict[int, Any]) -> None:
    """Replace the states of the requests with thinking budgets, by row of the batch."""
    set_attributes(holder, _state=states)
