"""vLLM's schedulers with tiers that follow what was measured, and grammars that follow trees.

`SchedulerConfig.scheduler_cls` names `make_scheduler`, as whether scheduling is asynchronous is
known only when the scheduler is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from drafttree.vllm import patches
from drafttree.vllm.session_turns import SessionTurns
from drafttree.vllm.structured.scheduler import GrammarTrees
from drafttree.vllm.v2.tier_steps import TierSteps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, StreamingUpdate


class _Tiers:
    """Mixin listed before one of vLLM's schedulers.

    The engine's table from batch sizes to numbers of draft tokens is replaced by `TierSteps`, for
    which it is the upper bound. There is none, and nothing to choose, with data parallelism.
    """

    dynamic_sd_lookup: Any
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tiers: TierSteps | None = None
        if self.dynamic_sd_lookup is not None:
            self.tiers = TierSteps(
                self.dynamic_sd_lookup,
                lambda: [request.request_id for request in self.running],
            )
            patches.replace_table(self, self.tiers)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and decide on the trees of the next."""
        stock: Any = super()
        if self.tiers is not None:
            self.tiers.before_schedule()
        output: SchedulerOutput = stock.schedule(*args, **kwargs)
        if self.tiers is not None:
            self.tiers.scheduled(output)
            patches.request_lookup(output, self.tiers.looks_up)
            patches.attach_update(output, self.tiers.take_update())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Learn from the outputs of a step before the engine has them."""
        stock: Any = super()
        if self.tiers is not None:
            self.tiers.arrived(scheduler_output, model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = stock.update_from_output(
            scheduler_output, model_runner_output
        )
        return outputs

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """As the engine's, for a turn that may be drafted for where the last one was not."""
        stock: Any = super()
        stock._update_request_as_session(session, update)
        if self.tiers is not None:
            self.tiers.forget(session.request_id)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """As the engine's; a pause in which requests are kept is no step."""
        stock: Any = super()
        stock.set_pause_state(pause_state)
        if self.tiers is not None:
            self.tiers.restart_clock()


class TierScheduler(_Tiers, GrammarTrees, SessionTurns, Scheduler):
    """For synchronous scheduling."""


class AsyncTierScheduler(_Tiers, GrammarTrees, SessionTurns, AsyncScheduler):
    """For asynchronous scheduling."""


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """Make the scheduler that suits the configuration."""
    is_async = vllm_config.scheduler_config.async_scheduling
    ours = AsyncTierScheduler if is_async else TierScheduler
    return ours(vllm_config=vllm_config, **kwargs)
