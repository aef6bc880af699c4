"""Everything that drafttree replaces or sets in vLLM: what, when, why, and the code that does it.

One method of the engine is wrapped at registration; the wrapper passes everything on unless a
drafttree method is requested. All other patches are applied only then. Each patch checks that it
fits the engine, and applying it twice is the same as applying it once. Importing this module
imports no part of vLLM.

The contents of a step's tensors and lists, such as positions and output tokens, are not listed: the
model runner writes them as the engine's own runner does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from drafttree.patches import Patch, check_parameters, replace_function
from drafttree.vllm.versions import unknown

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    from drafttree.vllm.structured.shapes import BoundShapes, DraftedTrees, Proposals

ON_CONFIGURATION = "On the configuration of an engine with a drafttree method."
UNLESS_SET = "On CUDA, unless the user has set sizes."
BEFORE_CAPTURE = "On CUDA, before graphs are captured, unless the user has set sizes."
ON_BATCH = "On the input batch of an adopted model runner."

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        when="At registration, in every process. Other methods are passed on unchanged.",
        reason="vLLM checks the method's name against a fixed list, so the names of installed "
        "methods are translated before that.",
    ),
    *(
        Patch(
            target=f"vllm.engine.arg_utils:EngineArgs.{name}",
            when="While vLLM makes the speculative configuration; restored afterwards.",
            reason="vLLM knows no tree methods. It makes the configuration of a custom proposer "
            "instead, or of GPU n-grams for its V2 model runner, with which it reserves KV slots "
            "and schedules draft tokens.",
        )
        for name in ("speculative_config", "spec_method", "spec_tokens", "spec_model")
    ),
    Patch(
        target="vllm.config:SpeculativeConfig.drafttree",
        when=ON_CONFIGURATION,
        reason="An additional attribute: the method's name and options, which reach the engine's "
        "other processes with the configuration.",
    ),
    Patch(
        target="vllm.config:ParallelConfig.worker_cls",
        when=ON_CONFIGURATION,
        reason="vLLM's setting for a worker class. The tree worker is a subclass of the stock "
        "worker, whose model runner it turns into one that verifies trees.",
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCoreProc._notify_idle_state_callbacks",
        when="When a drafttree method is first requested, and in other processes when they receive "
        "the configuration. Engines with other methods do as before.",
        reason="An engine core without work waits for messages, and nothing can be run meanwhile. "
        "It calls this method before each wait, and then lets a drafttree method prime until a "
        "message arrives.",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        when="When a drafttree method is first requested. Other methods are checked as before.",
        reason="vLLM refuses min_p and logit_bias with speculation, because its own verification "
        "cannot serve them. Draft trees are verified with vLLM's sampler, which can.",
    ),
    Patch(
        target="vllm.config:SpeculativeConfig.use_eagle_block_drop",
        when="On the configuration of an engine whose method reads the target's hidden states.",
        reason="The KV of the drafter's layer at each token also depends on the next token. The "
        "last block of a prefix hit may belong to a text with another next token, so it is "
        "computed again.",
    ),
    Patch(
        target="vllm.config:SpeculativeConfig.uses_dynamic_speculative_decoding",
        when="On the configuration of an engine with a drafttree method on the V1 model runner.",
        reason="Where the number of draft tokens may change with the batch size, vLLM gives up "
        "CUDA graphs of whole trees, and with data parallelism it drops the schedule. The schedule "
        "given to it never changes the number.",
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.attention_backend",
        when="On CUDA, unless the user has set attention_config.backend.",
        reason="vLLM's setting for the attention backend. The tree backend replaces the Triton "
        "backend, which vLLM does not choose by itself on every GPU.",
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.scheduler_cls",
        when="When a drafttree method is requested, unless the user has set scheduler_cls.",
        reason="vLLM's setting for a scheduler class. The scheduler is a subclass of vLLM's own: "
        "its grammars follow draft trees, and with nodes=auto on the V2 model runner it chooses "
        "the number of draft tokens by what it measures.",
    ),
    Patch(
        target="vllm.v1.outputs:DraftTokenIds.drafttree_proposals",
        when="On the drafts of requests with structured output.",
        reason="An additional attribute: the shapes of the trees, which reach the scheduler with "
        "the draft tokens.",
    ),
    Patch(
        target="vllm.v1.core.sched.output:SchedulerOutput.drafttree_bound",
        when="On each step in which draft tokens of requests with structured output are verified.",
        reason="An additional attribute: the shapes of their trees without the nodes that the "
        "grammars forbid, which reach the model runner with the step.",
    ),
    Patch(
        target="vllm.v1.core.sched.output:SchedulerOutput.drafttree_drafted",
        when="On each step with trees of requests with structured output that the scheduler does "
        "not know when it schedules the step.",
        reason="An additional attribute: these trees, whose masks the scheduler is asked for when "
        "the step has begun.",
    ),
    Patch(
        target="vllm.v1.core.sched.scheduler:Scheduler.dynamic_sd_lookup",
        when="On a scheduler made for nodes=auto on the V2 model runner.",
        reason="vLLM's scheduler reads the number of draft tokens from a table by batch size, "
        "which is replaced by what chooses it.",
    ),
    Patch(
        target="vllm.v1.core.sched.output:SchedulerOutput.drafttree_looks_up",
        when="On each step that such a scheduler schedules.",
        reason="An additional attribute: whether drafts are looked up even if none is verified.",
    ),
    Patch(
        target="vllm.v1.outputs:ModelRunnerOutput.drafttree_report",
        when="On the output of each step that such a scheduler has scheduled.",
        reason="An additional attribute: what the drafts were worth at each number of draft "
        "tokens, which reaches the scheduler with the output.",
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.cudagraph_capture_sizes",
        when=UNLESS_SET,
        reason="vLLM's setting for the sizes of CUDA graphs. By default the largest has 512 tokens "
        "on most GPUs, which is only a few whole trees.",
    ),
    *(
        Patch(
            target=f"{owner}.drafttree_graphs",
            when=UNLESS_SET,
            reason="An additional attribute: the sizes that drafttree has chosen, as opposed to "
            "sizes that the user has set.",
        )
        for owner in ("vllm.engine.arg_utils:EngineArgs", "vllm.config:SpeculativeConfig")
    ),
    Patch(
        target="vllm.config:CompilationConfig.cudagraph_capture_sizes",
        when=BEFORE_CAPTURE,
        reason="vLLM rounds all sizes up to whole trees, so a step with a single token would be "
        "padded to a whole tree. Sizes smaller than a tree are added.",
    ),
    *(
        Patch(
            target=f"vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.{name}",
            when=BEFORE_CAPTURE,
            reason="The dispatcher has read the sizes before the smaller ones were added, so it is "
            "initialised again.",
        )
        for name in ("cudagraph_keys", "_bs_to_padded_graph_size")
    ),
    Patch(
        target="vllm.config:ModelConfig.logits_processors",
        when="On one engine's configuration, while its stock model runner is built.",
        reason="vLLM refuses custom logits processors with speculation. The tree runner builds "
        "them itself and applies them along each path.",
    ),
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
    Patch(
        target="vllm.v1.attention.backends.registry:AttentionBackendEnum",
        when="While the attention layers of a model with draft trees are built. The caches of "
        "vLLM's backend selection are cleared before and after.",
        reason="Layers look up their backend by name. The tree backend is registered under the "
        "name of the stock backend, for which the rest of the engine is configured.",
    ),
    Patch(
        target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",
        when="On a CPU, before a model with Gated DeltaNet layers is loaded that is served with "
        "chains of draft tokens.",
        reason="vLLM's function loses a layer's last inputs if a request has fewer drafts in a "
        "step than there may be.",
    ),
)

_REQUEST = "drafttree"  # attribute of a SpeculativeConfig that names a drafttree method
_ENGINE_CORE = "vllm.v1.engine.core"
_SCHEDULER = "drafttree.vllm.structured.scheduler.make_scheduler"
_TIER_SCHEDULER = "drafttree.vllm.v2.scheduler.make_scheduler"
_PROPOSALS = "drafttree_proposals"  # attribute of drafts on their way to the scheduler
_BOUND = "drafttree_bound"  # attribute of a scheduled step
_DRAFTED = "drafttree_drafted"  # attribute of a step that has begun
_LOOKS_UP = "drafttree_looks_up"  # attribute of a scheduled step
_REPORT = "drafttree_report"  # attribute of a step's output
_GRAPHS = "drafttree_graphs"  # attribute of settings whose capture sizes drafttree has chosen

R = TypeVar("R")


class Request(tuple[str, dict[str, Any]]):
    """Name and options of the requested method.

    It is pickled with the configuration to the engine's other processes. The engine core's patch is
    applied when it arrives there, because no other code of drafttree runs in that process.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Request], tuple[str, dict[str, Any]]]:
        return _arrived, (self[0], self[1])


def _arrived(name: str, options: dict[str, Any]) -> Request:
    # Only the process of the engine core needs this module, and has imported it.
    if _ENGINE_CORE in sys.modules:
        prime_when_idle()
    return Request((name, options))


def requested(config: SpeculativeConfig | None) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the method, if `config` requests a drafttree method."""
    return getattr(config, _REQUEST, None)


def mark_requested(config: SpeculativeConfig, name: str, options: dict[str, Any]) -> None:
    """Mark the configuration as a request for a drafttree method."""
    # A plain attribute is pickled with the configuration to the engine's other processes.
    object.__setattr__(config, _REQUEST, Request((name, options)))


def prime_when_idle() -> None:
    """Let engine cores with a drafttree method prime while they have no work."""
    from vllm.v1.engine.core import EngineCoreProc

    def wrap(stock: Callable[[EngineCoreProc], None]) -> Callable[[EngineCoreProc], None]:
        def _notify_idle_state_callbacks(self: EngineCoreProc) -> None:
            stock(self)
            if requested(self.vllm_config.speculative_config) is not None:
                from drafttree.vllm.priming import prime_until_work

                prime_until_work(self)

        return _notify_idle_state_callbacks

    # An older engine core has no such method, and primes at its start only.
    if hasattr(EngineCoreProc, "_notify_idle_state_callbacks"):
        replace_function(
            EngineCoreProc,
            "_notify_idle_state_callbacks",
            wrap,
            expected=["self"],
            unknown=unknown,
        )


def wrap_create_speculative_config(
    find: Callable[[EngineArgs], Any | None], create: Callable[..., SpeculativeConfig]
) -> None:
    """Let engine arguments request drafttree methods.

    Args:
        find: Returns the drafttree method that engine arguments request, or None.
        create: `(method, original, engine, target_model_config, target_parallel_config)`; makes
            the configuration for that method. `original` is the engine's own bound method.
    """
    from vllm.engine.arg_utils import EngineArgs

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def create_speculative_config(
            self: EngineArgs, *args: Any, **kwargs: Any
        ) -> SpeculativeConfig | None:
            method = find(self)
            if method is None:
                return cast("SpeculativeConfig | None", stock(self, *args, **kwargs))
            expected = ["self", "target_model_config", "target_parallel_config"]
            name = "EngineArgs.create_speculative_config"
            check_parameters(name, stock, expected, unknown)
            return create(method, functools.partial(stock, self), self, *args, **kwargs)

        return create_speculative_config

    # Whether the parameters are known matters only once a drafttree method is requested.
    replace_function(EngineArgs, "create_speculative_config", wrap, expected=None, unknown=unknown)


@contextmanager
def replace_speculative_arguments(engine: EngineArgs, config: dict[str, Any]) -> Iterator[None]:
    """Let engine arguments request the speculation `config` and no other, inside the context."""
    given = _set(
        engine, speculative_config=config, spec_method=None, spec_tokens=None, spec_model=None
    )
    try:
        yield
    finally:
        _set(engine, **given)


def use_worker(config: ParallelConfig, worker: str) -> None:
    """Let an engine's workers be of another class.

    Args:
        config: The engine's parallelism.
        worker: The path of the class.
    """
    _set(config, worker_cls=worker)


def use_attention_backend(engine: EngineArgs, backend: str) -> None:
    """Let engine arguments request an attention backend, by its name."""
    # The engine reads this later, also for further configurations of these arguments.
    _set(engine, attention_backend=backend)


def use_scheduler(engine: EngineArgs, *, tiers: bool = False) -> None:
    """Let engine arguments request drafttree's scheduler, unless the user has one.

    Args:
        engine: The engine's arguments.
        tiers: Whether the scheduler chooses tiers.
    """
    if getattr(engine, "scheduler_cls", None) is None:
        # The engine reads this later, also for further configurations of these arguments.
        _set(engine, scheduler_cls=_TIER_SCHEDULER if tiers else _SCHEDULER)


def chooses_tiers(runner: Any) -> bool:
    """Whether the scheduler of a model runner's engine chooses tiers."""
    return bool(runner.scheduler_config.scheduler_cls == _TIER_SCHEDULER)


def binds_trees(runner: Any) -> bool:
    """Whether the scheduler of a model runner's engine binds trees to grammars."""
    return runner.scheduler_config.scheduler_cls in (_SCHEDULER, _TIER_SCHEDULER)


def send_proposals(drafts: DraftTokenIds, proposals: Proposals) -> None:
    """Let the shapes of trees travel to the scheduler with the draft tokens."""
    setattr(drafts, _PROPOSALS, proposals)


def proposals_in(drafts: DraftTokenIds) -> Proposals:
    """The shapes that came with draft tokens."""
    return getattr(drafts, _PROPOSALS, {})


def send_bound(output: SchedulerOutput, shapes: BoundShapes) -> None:
    """Let the shapes of trees that are bound to a grammar travel with a scheduled step."""
    setattr(output, _BOUND, shapes)


def bound_in(output: SchedulerOutput) -> BoundShapes:
    """The shapes that came with a scheduled step."""
    return getattr(output, _BOUND, {})


def show_drafted(output: SchedulerOutput, trees: Callable[[], DraftedTrees]) -> None:
    """Show the trees of a step to the scheduler of the same process, which may wait for them."""
    setattr(output, _DRAFTED, trees)


def drafted_in(output: SchedulerOutput) -> DraftedTrees:
    """The trees of a step that has begun; may wait for the device."""
    trees: Callable[[], DraftedTrees] = getattr(output, _DRAFTED, dict)
    return trees()


def replace_table(scheduler: Any, choice: object) -> None:
    """Let a scheduler ask `choice` for the number of draft tokens, by the number of requests."""
    _set(scheduler, dynamic_sd_lookup=choice)


def request_lookup(output: SchedulerOutput, looks_up: bool) -> None:
    """Let a scheduled step say whether drafts are looked up after it, even if none is verified."""
    setattr(output, _LOOKS_UP, looks_up)


def wants_lookup(output: SchedulerOutput) -> bool:
    """Whether a scheduled step says so."""
    return getattr(output, _LOOKS_UP, False)


def attach_report(output: ModelRunnerOutput, report: object) -> None:
    """Let a report for the scheduler travel with a step's output."""
    setattr(output, _REPORT, report)


def report_of(output: ModelRunnerOutput) -> Any:
    """The report that came with a step's output; None without one."""
    return getattr(output, _REPORT, None)


def choose_capture_sizes(engine: EngineArgs, config: SpeculativeConfig, sizes: list[int]) -> None:
    """Let an engine whose user has set no sizes capture steps of these numbers of tokens."""
    # The engine reads this later, also for further configurations of these arguments.
    _set(engine, cudagraph_capture_sizes=sizes)
    for settings in (engine, config):
        object.__setattr__(settings, _GRAPHS, sizes)


def chosen_capture_sizes(settings: EngineArgs | SpeculativeConfig) -> list[int] | None:
    """The sizes of CUDA graphs that drafttree has chosen for an engine, if it has."""
    return getattr(settings, _GRAPHS, None)


def replace_capture_sizes(
    config: CompilationConfig, dispatcher: CudagraphDispatcher, sizes: list[int], tree_size: int
) -> None:
    """Capture other steps than the engine has planned.

    Args:
        config: The engine's compilation settings.
        dispatcher: The model runner's dispatcher of graphs.
        sizes: Numbers of tokens of the steps to capture.
        tree_size: Number of nodes of a whole tree.
    """
    parameters = ["cudagraph_mode", "uniform_decode_query_len"]
    name = "CudagraphDispatcher.initialize_cudagraph_keys"
    check_parameters(name, dispatcher.initialize_cudagraph_keys, parameters, unknown)
    _set(config, cudagraph_capture_sizes=sizes)
    dispatcher.initialize_cudagraph_keys(dispatcher.cudagraph_mode, tree_size)


def allow_sampling_parameters() -> None:
    """Let requests use min_p and logit_bias with drafttree methods."""
    from vllm.sampling_params import SamplingParams

    def wrap(stock: Callable[..., None]) -> Callable[..., None]:
        def _validate_spec_decode(
            self: SamplingParams, speculative_config: SpeculativeConfig | None
        ) -> None:
            if requested(speculative_config) is None:
                stock(self, speculative_config)

        return _validate_spec_decode

    expected = ["self", "speculative_config"]
    replace_function(
        SamplingParams, "_validate_spec_decode", wrap, expected=expected, unknown=unknown
    )


def drop_last_block(config: SpeculativeConfig) -> None:
    """Let the scheduler drop the last block of each prefix hit, as for vLLM's EAGLE.

    Where two blocks contain the same text, the scheduler may still find the one that another text
    follows. Drafts are then slightly worse for a while, as with EAGLE.
    """
    _override_method(config, "use_eagle_block_drop", True)


def hide_draft_schedule(config: SpeculativeConfig) -> None:
    """Let vLLM keep the schedule of draft tokens by batch size, and capture whole trees with it."""
    _override_method(config, "uses_dynamic_speculative_decoding", False)


def _override_method(config: SpeculativeConfig, name: str, result: bool) -> None:
    """Let a method without arguments return `result`, on one configuration."""
    if not callable(getattr(type(config), name, None)):
        raise unknown(f"SpeculativeConfig has no method {name}")
    # `bool` and `partial` can be pickled to the engine's other processes, unlike a closure.
    object.__setattr__(config, name, functools.partial(bool, result))


@contextmanager
def without_logits_processors(config: ModelConfig) -> Iterator[Sequence[Any] | None]:
    """Hide custom logits processors while the stock model runner is built, and yield them."""
    given = _set(config, logits_processors=None)
    try:
        yield given["logits_processors"]
    finally:
        _set(config, **given)


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
    _set(runner, speculator=speculator)


def replace_logits_processors(batch: Any, processors: Any, custom: bool) -> None:
    """Let an input batch apply `processors`.

    Args:
        batch: The engine's input batch.
        processors: The engine's collection of logits processors.
        custom: Whether there are custom ones, which may read the requests' output tokens.
    """
    _set(batch, logitsprocs=processors, logitsprocs_need_output_token_ids=custom)


def replace_thinking_budgets(batch: Any, holder: Any) -> None:
    """Let an input batch use `holder` for the state of thinking budgets."""
    if holder is not None and not hasattr(holder, "_state"):
        raise unknown(f"{type(holder).__name__} has no _state")
    _set(batch, thinking_budget_state_holder=holder)


def replace_budget_states(holder: Any, states: dict[int, Any]) -> None:
    """Replace the states of the requests with thinking budgets, by row of the batch."""
    _set(holder, _state=states)


@contextmanager
def override_backend(backend: AttentionBackendEnum, ours: type) -> Iterator[None]:
    """Let attention layers that are built inside the context use another backend.

    It is registered under the stock backend's name, for which everything else is configured, and
    only while the layers are built: other engines of the process keep the stock one.

    Args:
        backend: The stock backend.
        ours: The class of the backend that replaces it.
    """
    from vllm.v1.attention.backends.registry import register_backend

    parameters = ["backend", "class_path", "is_mamba"]
    check_parameters("register_backend", register_backend, parameters, unknown)
    previous = backend.get_path() if backend.is_overridden() else None
    register_backend(backend, f"{ours.__module__}.{ours.__name__}")
    _forget_selected_backends()
    try:
        yield
    finally:
        backend.clear_override()
        if previous is not None:
            register_backend(backend, previous)
        _forget_selected_backends()


def keep_convolutions() -> None:
    """Let Gated DeltaNet layers on a CPU verify any number of drafts."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    from drafttree.vllm.chains.cpu_gdn import spec_forward

    expected = ["layer", "attn_metadata_i", "mixed_qkv_spec", "b_spec", "a_spec", "conv_buf"]
    replace_function(
        gdn_attention,
        "_spec_forward",
        lambda _: spec_forward,
        expected=[*expected, "ssm_state", "width", "state_len"],
        unknown=unknown,
    )


def _forget_selected_backends() -> None:
    """Clear the caches of the engine's backend selection."""
    from vllm.v1.attention import selector

    for function in vars(selector).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _set(owner: Any, **values: Any) -> dict[str, Any]:
    """Set attributes that an object of the engine must have, and return their old values."""
    for name in values:
        if not hasattr(owner, name):
            raise unknown(f"{type(owner).__name__} has no {name}")
    given = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    return given
