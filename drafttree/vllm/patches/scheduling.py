"""Patches of vLLM's scheduler, and what travels between it and the model runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drafttree.patches import Patch
from drafttree.vllm.patches.settings import set_attributes

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    from drafttree.vllm.structured.shapes import BoundShapes, DraftedTrees, Proposals

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.scheduler_cls",
        when="When a drafttree method is requested, unless the user has set scheduler_cls.",
        reason="vLLM's setting for a scheduler class. The scheduler is a subclass of vLLM's own: "
        "its grammars follow draft trees, and with nodes=auto or tree=auto on the V2 model "
        "runner it chooses the number of draft tokens by what it measures.",
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
        target="vllm.v1.core.sched.output:SchedulerOutput.drafttree_number",
        when="On each step with draft tokens and structured output, where the worker is in another "
        "process and shows the scheduler trees while their step is under way.",
        reason="An additional attribute: the number that the message with these trees has.",
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
        when="On a scheduler made for nodes=auto or tree=auto on the V2 model runner.",
        reason="vLLM's scheduler reads the number of draft tokens from a table by batch size, "
        "which is replaced by what chooses it.",
    ),
    Patch(
        target="vllm.v1.core.sched.output:SchedulerOutput.drafttree_looks_up",
        when="On each step that such a scheduler schedules.",
        reason="An additional attribute: whether drafts are looked up even if none is verified.",
    ),
    Patch(
        target="vllm.v1.core.sched.output:SchedulerOutput.drafttree_update",
        when="On each step that such a scheduler schedules.",
        reason="An additional attribute: why the number of draft tokens was chosen, for the "
        "worker to explain.",
    ),
    Patch(
        target="vllm.v1.outputs:ModelRunnerOutput.drafttree_report",
        when="On the output of each step that such a scheduler has scheduled.",
        reason="An additional attribute: what the drafts were worth at each number of draft "
        "tokens, or what was accepted of those that a model drafted and what they took. It reaches "
        "the scheduler with the output.",
    ),
)

_SCHEDULER = "drafttree.vllm.structured.scheduler.make_scheduler"
_TIER_SCHEDULER = "drafttree.vllm.v2.scheduler.make_scheduler"
_PROPOSALS = "drafttree_proposals"  # attribute of drafts on their way to the scheduler
_BOUND = "drafttree_bound"  # attribute of a scheduled step
_NUMBER = "drafttree_number"  # attribute of a scheduled step
_DRAFTED = "drafttree_drafted"  # attribute of a step that has begun
_LOOKS_UP = "drafttree_looks_up"  # attribute of a scheduled step
_UPDATE = "drafttree_update"  # another attribute of a scheduled step
_REPORT = "drafttree_report"  # attribute of a step's output


def use_scheduler(engine: EngineArgs, *, tiers: bool = False) -> None:
    """Let engine arguments request drafttree's scheduler, unless the user has one.

    Args:
        engine: The engine's arguments.
        tiers: Whether the scheduler chooses tiers.
    """
    if getattr(engine, "scheduler_cls", None) is None:
        # The engine reads this later, also for further configurations of these arguments.
        set_attributes(engine, scheduler_cls=_TIER_SCHEDULER if tiers else _SCHEDULER)


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


def number_step(output: SchedulerOutput, number: int) -> None:
    """Number a scheduled step whose trees the worker is to show the scheduler."""
    setattr(output, _NUMBER, number)


def number_of(output: SchedulerOutput) -> int | None:
    """The number of a step; None without one."""
    return getattr(output, _NUMBER, None)


def show_drafted(output: SchedulerOutput, trees: Callable[[], DraftedTrees]) -> None:
    """Show the trees of a step to the scheduler of the same process, which may wait for them."""
    setattr(output, _DRAFTED, trees)


def drafted_in(output: SchedulerOutput) -> DraftedTrees:
    """The trees of a step that has begun; may wait for the device."""
    trees: Callable[[], DraftedTrees] = getattr(output, _DRAFTED, dict)
    return trees()


def replace_table(scheduler: Any, choice: object) -> None:
    """Let a scheduler ask `choice` for the number of draft tokens, by the number of requests."""
    set_attributes(scheduler, dynamic_sd_lookup=choice)


def request_lookup(output: SchedulerOutput, looks_up: bool) -> None:
    """Let a scheduled step say whether drafts are looked up after it, even if none is verified."""
    setattr(output, _LOOKS_UP, looks_up)


def wants_lookup(output: SchedulerOutput) -> bool:
    """Whether a scheduled step says so."""
    return getattr(output, _LOOKS_UP, False)


def attach_update(output: SchedulerOutput, update: object) -> None:
    """Let a scheduled step tell the worker what there is to explain of the choices."""
    setattr(output, _UPDATE, update)


def update_of(output: SchedulerOutput) -> Any:
    """What a scheduled step tells; None if nothing."""
    return getattr(output, _UPDATE, None)


def attach_report(output: ModelRunnerOutput, report: object) -> None:
    """Let a report for the scheduler travel with a step's output."""
    setattr(output, _REPORT, report)


def report_of(output: ModelRunnerOutput) -> Any:
    """The report that came with a step's output; None without one."""
    return getattr(output, _REPORT, None)
