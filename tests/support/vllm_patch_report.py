"""Applies the patches of `drafttree.vllm.patches` to a real engine, and reports the changes."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import drafttree

OURS = {"method": "token-recycling", "nodes": 8, "prime": False}


def make_report(model: str) -> dict[str, Any]:
    """Apply all patches to a real engine.

    Args:
        model: The target's folder.

    Returns:
        registered: Names that `register` replaces, when called twice.
        passed_on: Whether other methods reach vLLM's own code after that.
        served: Names that an engine with a drafttree method has replaced after it has run.
        received: Whether the engine core is patched, before and after it receives a configuration
            that requests a drafttree method.
        primed: What an engine core without work does, with such a configuration and without.
        runner: Names of the base classes of that engine's model runner.
        applied: Names of all attributes that the functions of `patches` change.
        twice: Names of attributes that change when the functions are called again.
        restored: Names of attributes that stay changed after a context manager is left.
        refused: By function, the error for an engine that it was not written for.
    """
    before = _members()
    report: dict[str, Any] = {"registered": _register(before), "passed_on": _passed_on(model)}
    llm = _serve(model)
    report["served"] = _changed(before)
    worker = llm.collective_rpc(lambda worker: worker)[0]
    report |= _idle(worker.vllm_config.speculative_config)
    report["runner"] = [each.__name__ for each in type(worker.model_runner).__bases__]
    report |= _apply_twice(worker, model)
    report["refused"] = _refused()
    return report


# What is changed on classes.


def _members() -> dict[str, Any]:
    """All functions of vLLM's modules, and all members of their classes."""
    found = {}
    for module in [name for name in sys.modules if name.startswith("vllm.")]:
        for name, value in list(vars(sys.modules[module]).items()):
            if inspect.isclass(value) and value.__module__ == module:
                members = vars(value).items()
                found |= {f"{module}:{name}.{inner}": member for inner, member in members}
            elif inspect.isfunction(value):
                found[f"{module}:{name}"] = value
    return found


def _changed(before: dict[str, Any]) -> list[str]:
    """What was replaced by functions of drafttree; vLLM on a CPU replaces Triton kernels itself."""
    now = _members()
    changed = [name for name, member in before.items() if now.get(name) is not member]
    code = {name: getattr(now.get(name), "__code__", None) for name in changed}
    package = str(Path(drafttree.__file__).parent)
    return sorted(name for name in changed if package in getattr(code[name], "co_filename", ""))


def _register(before: dict[str, Any]) -> list[str]:
    from vllm.plugins import load_general_plugins

    from drafttree.vllm.plugin import register

    load_general_plugins()
    once = _members()
    register()
    assert not _changed(once)
    return _changed(before)


def _passed_on(model: str) -> list[bool]:
    """For no method and for vLLM's own, whether vLLM makes its configuration as ever."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    settings = {"model": model, "max_model_len": 512, "skip_tokenizer_init": True}
    check = SamplingParams._validate_spec_decode
    plain = EngineArgs(**settings).create_engine_config().speculative_config
    made = EngineArgs(**settings, speculative_config=ngram).create_engine_config()
    return [
        plain is None,
        made.speculative_config.method == "ngram",
        not hasattr(made.speculative_config, "drafttree"),
        made.parallel_config.worker_cls.startswith("vllm."),
        SamplingParams._validate_spec_decode is check,
    ]


def _serve(model: str) -> Any:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        skip_tokenizer_init=True,
        speculative_config=OURS,
    )
    limits = SamplingParams(max_tokens=4, detokenize=False, min_p=0.1)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], limits, use_tqdm=False)
    return llm


def _idle(config: Any) -> dict[str, Any]:
    from vllm.v1.engine.core import EngineCoreProc

    from drafttree.patches import is_replaced
    from drafttree.vllm import engine_priming

    name = "_notify_idle_state_callbacks"
    called: list[str] = []

    def stock(self: Any) -> None:
        called.append("stock")

    with mock.patch.object(EngineCoreProc, name, stock):
        received = [is_replaced(getattr(EngineCoreProc, name))]
        sent = pickle.loads(pickle.dumps(config))
        received.append(is_replaced(getattr(EngineCoreProc, name)))
        primed = {}
        for kind, speculative in (("plain", None), ("ours", sent)):
            core: Any = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative))
            prime = mock.Mock(side_effect=lambda core: called.append("primed"))
            with mock.patch.object(engine_priming, "prime_until_work", prime):
                getattr(EngineCoreProc, name)(core)
            primed[kind] = called.copy()
            called.clear()
    return {"received": received, "primed": primed}


# What is changed on objects.


@contextmanager
def _recorded(objects: list[Any], changes: set[str]) -> Iterator[None]:
    """Add the attributes with other values after the context, as `Class.attribute`."""
    before = [_values(each) for each in objects]
    yield
    for each, old in zip(objects, before, strict=True):
        new = _values(each)
        names = new.keys() | old.keys()
        changes |= {
            f"{type(each).__name__}.{name}" for name in names if new.get(name) != old.get(name)
        }


def _values(owner: Any) -> dict[str, str]:
    """The attributes of an object; for objects of vLLM their identities, for others contents."""
    return {
        name: str(id(value)) if type(value).__module__.startswith("vllm") else repr(value)
        for name, value in vars(owner).items()
    }


def _apply_twice(worker: Any, model: str) -> dict[str, Any]:
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backends import registry
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from drafttree.vllm import graphs, patches
    from drafttree.vllm.attention.cpu import CpuTreeBackend
    from drafttree.vllm.drafters.model_free import ModelFreeRunner

    config, runner = worker.vllm_config, worker.model_runner
    batch, compilation = runner.input_batch, config.compilation_config
    engine = EngineArgs(model=model, spec_method="rsd", spec_tokens=3, spec_model=model)
    speculative = copy.copy(config.speculative_config)
    for name in [each for each in vars(speculative) if each.startswith(("drafttree", "uses_"))]:
        object.__delattr__(speculative, name)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [9, 18], 18
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE, 9)
    model_config = copy.copy(config.model_config)
    model_config.logits_processors = ["custom"]
    holders = [ThinkingBudgetStateHolder(None, 2, 0, runner.device, False) for _ in range(2)]
    backend = registry.AttentionBackendEnum.CPU_ATTN
    overrides = SimpleNamespace(overrides=registry._ATTN_OVERRIDES)
    parallel = copy.copy(config.parallel_config)
    parallel.worker_cls = "auto"
    processors: Any = object()
    # The class of the V2 model runner needs Triton.
    states_v2 = type("RequestState", (SimpleNamespace,), {})(all_token_ids=SimpleNamespace())
    runner_v2 = type("GPUModelRunner", (SimpleNamespace,), {})(
        speculator=None,
        rejection_sampler=None,
        model_memory_usage=0,
        req_states=states_v2,
        max_num_reqs=2,
        max_model_len=8,
        device=runner.device,
    )
    grammars_v2 = type("StructuredOutputsWorker", (SimpleNamespace,), {})(
        grammar_bitmask=torch.zeros(4, 3)
    )
    speculator = SimpleNamespace()
    scheduler = type("Scheduler", (SimpleNamespace,), {})(dynamic_sd_lookup=[0])
    step, output = SchedulerOutput.make_empty(), ModelRunnerOutput([], {})
    drafts = DraftTokenIds([], [])
    states: dict[int, Any] = {0: {}}
    objects = [
        *(engine, speculative, model_config, parallel, compilation),
        *(dispatcher, batch, holders[0], overrides, runner_v2, states_v2, grammars_v2),
        *(scheduler, step, output, drafts),
    ]

    def apply() -> None:
        patches.mark_requested(speculative, "token_recycling", OURS, shows_trees=False)
        patches.drop_last_block(speculative)
        patches.hide_draft_schedule(speculative)
        patches.hash_request(speculative, "token_recycling", OURS)
        patches.use_worker(parallel, "some.Worker")
        patches.use_attention_backend(engine, "TRITON_ATTN")
        graphs.capture_whole_trees(engine, speculative, 8)
        graphs.capture_small_batches(speculative, compilation, dispatcher)
        assert patches.adopt(runner, CPUModelRunner, ModelFreeRunner) is runner
        patches.replace_speculator(runner_v2, speculator)
        patches.keep_texts_on_host(runner_v2)
        patches.skip_rejection_sampling(runner_v2)
        patches.replace_model_memory(runner_v2, 7)
        patches.limit_grammar_masks(grammars_v2, 2)
        patches.use_scheduler(engine)
        patches.replace_table(scheduler, (0, 3))
        patches.request_lookup(step, True)
        patches.attach_update(step, "update")
        patches.attach_report(output, "a report")
        patches.send_proposals(drafts, {"a": None})
        patches.send_bound(step, {})
        patches.number_step(step, 7)
        patches.show_drafted(step, dict)
        patches.replace_logits_processors(batch, processors, True)
        patches.replace_thinking_budgets(batch, holders[0])
        patches.replace_budget_states(holders[0], states)
        patches.allow_sampling_parameters()
        patches.prime_when_idle()

    def temporarily(stack: ExitStack) -> None:
        stack.enter_context(patches.replace_speculative_arguments(engine, OURS))
        stack.enter_context(patches.without_logits_processors(model_config))
        stack.enter_context(patches.override_backend(backend, CpuTreeBackend))

    applied, twice, restored = set[str](), set[str](), set[str]()
    with _recorded(objects, applied):
        apply()
    check, kind = SamplingParams._validate_spec_decode, type(runner)
    with _recorded(objects, twice):
        apply()
    assert SamplingParams._validate_spec_decode is check
    assert type(runner) is kind
    with _recorded(objects, restored), ExitStack() as stack:
        with _recorded(objects, applied):
            temporarily(stack)
        with _recorded(objects, twice):
            temporarily(stack)
    return {"applied": sorted(applied), "twice": sorted(twice), "restored": sorted(restored)}


# Engines that the patches were not written for.


def _refused() -> dict[str, str]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backends import registry
    from vllm.v1.engine.core import EngineCoreProc

    from drafttree.vllm import patches

    def other(name: str) -> Callable[[Any], None]:
        def function(only: Any) -> None:
            """A function with other parameters than the engine's."""

        function.__qualname__ = name
        return function

    unlike: Any = SimpleNamespace(initialize_cudagraph_keys=other("initialize_cudagraph_keys"))
    refused = {}

    def attempt(name: str, apply: Callable[[], Any]) -> None:
        try:
            apply()
            refused[name] = "applied"
        except RuntimeError as error:
            refused[name] = str(error)

    def enter(manager: Any) -> None:
        with manager:
            pass

    name = "create_speculative_config"
    with mock.patch.object(EngineArgs, name, other(name)):
        patches.wrap_create_speculative_config(lambda engine: "a method", lambda *given: None)
        attempt(name, lambda: EngineArgs.create_speculative_config(unlike, None, None))
    name = "_validate_spec_decode"
    with mock.patch.object(SamplingParams, name, other(name)):
        attempt(name, patches.allow_sampling_parameters)
    name = "_notify_idle_state_callbacks"
    with mock.patch.object(EngineCoreProc, name, other(name)):
        attempt(name, patches.prime_when_idle)
    name = "register_backend"
    with mock.patch.object(registry, name, other(name)):
        backend = registry.AttentionBackendEnum.CPU_ATTN
        attempt(name, lambda: enter(patches.override_backend(backend, object)))
    for name, manager in (
        ("speculative_config", patches.replace_speculative_arguments(unlike, {})),
        ("logits_processors", patches.without_logits_processors(unlike)),
    ):
        attempt(name, functools.partial(enter, manager))
    for name, apply in (
        ("use_eagle_block_drop", patches.drop_last_block),
        ("uses_dynamic_speculative_decoding", patches.hide_draft_schedule),
        ("compute_hash", lambda unlike: patches.hash_request(unlike, "token_recycling", OURS)),
        ("worker_cls", lambda unlike: patches.use_worker(unlike, "some.Worker")),
        ("attention_backend", lambda unlike: patches.use_attention_backend(unlike, "some")),
        (
            "cudagraph_capture_sizes",
            lambda unlike: patches.choose_capture_sizes(unlike, unlike, [9]),
        ),
        (
            "initialize_cudagraph_keys",
            lambda unlike: patches.replace_capture_sizes(unlike, unlike, [9], 9),
        ),
        ("logitsprocs", lambda unlike: patches.replace_logits_processors(unlike, None, False)),
        (
            "thinking_budget_state_holder",
            lambda unlike: patches.replace_thinking_budgets(unlike, None),
        ),
        ("rejection_sampler", patches.skip_rejection_sampling),
        ("model_memory_usage", lambda unlike: patches.replace_model_memory(unlike, 7)),
        ("speculator", lambda unlike: patches.replace_speculator(unlike, None)),
        ("scheduler_cls", patches.use_scheduler),
        ("dynamic_sd_lookup", lambda unlike: patches.replace_table(unlike, None)),
        ("_state", lambda unlike: patches.replace_budget_states(unlike, {})),
    ):
        attempt(name, functools.partial(apply, unlike))
    return refused
