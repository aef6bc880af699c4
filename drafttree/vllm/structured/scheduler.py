"""vLLM's schedulers with grammars that follow draft trees.

`SchedulerConfig.scheduler_cls` names `make_scheduler`, as whether scheduling is asynchronous is
known only when the scheduler is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from drafttree.vllm import patches
from drafttree.vllm.session_turns import SessionTurns
from drafttree.vllm.structured.grammars import TreeGrammars, why_not
from drafttree.vllm.structured.shown_trees import TreeReceiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.structured_output import StructuredOutputManager


class GrammarTrees:
    """Mixin listed before one of vLLM's schedulers.

    The shapes of trees come with the draft tokens. The scheduler binds the trees to the requests'
    grammars, and their new shapes go to the model runner with the step that verifies them.
    """

    def __init__(
        self,
        vllm_config: Any,
        *args: Any,
        structured_output_manager: StructuredOutputManager,
        **kwargs: Any,
    ) -> None:
        self.grammars: TreeGrammars | None = None
        self._shown: TreeReceiver | None = None
        manager: Any = structured_output_manager
        if why_not() is None:
            # Otherwise requests with structured output have no drafts, and chains' masks are right.
            num_draft_tokens = vllm_config.speculative_config.num_speculative_tokens
            manager = self.grammars = TreeGrammars(manager, num_draft_tokens)
            self._shown = TreeReceiver(vllm_config)
        stock: Any = super()
        stock.__init__(vllm_config, *args, structured_output_manager=manager, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the trees that were drafted for the next step."""
        if self.grammars is not None:
            self.grammars.propose(patches.proposals_in(draft_token_ids))
        stock: Any = super()
        stock.update_draft_token_ids(draft_token_ids)

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Take draft tokens that are in a step already, so none of them can be dropped."""
        if self.grammars is not None:
            self.grammars.propose(patches.proposals_in(draft_token_ids))
        stock: Any = super()
        stock.update_draft_token_ids_in_output(draft_token_ids, scheduler_output)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, and say which of its trees are bound to a grammar."""
        stock: Any = super()
        output: SchedulerOutput = stock.schedule(*args, **kwargs)
        if self.grammars is not None:
            self.grammars.forget(output.finished_req_ids)
            if shapes := self.grammars.bound(output.scheduled_spec_decode_tokens):
                patches.send_bound(output, shapes)
        if self._shown is not None:
            self._shown.number(output)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """The masks of a step's nodes, some of whose trees may have been drafted within it."""
        if self.grammars is not None and self._shown is not None:
            self.grammars.draft(self._shown.trees(scheduler_output))
        stock: Any = super()
        masks: GrammarOutput | None = stock.get_grammar_bitmask(scheduler_output)
        return masks

    def shutdown(self) -> None:
        """End the connection to the model runner."""
        if self._shown is not None:
            self._shown.close()
        stock: Any = super()
        stock.shutdown()


class GrammarScheduler(GrammarTrees, SessionTurns, Scheduler):
    """For synchronous scheduling."""


class AsyncGrammarScheduler(GrammarTrees, SessionTurns, AsyncScheduler):
    """For asynchronous scheduling."""


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """Make the scheduler that suits the configuration."""
    is_async = vllm_config.scheduler_config.async_scheduling
    ours = AsyncGrammarScheduler if is_async else GrammarScheduler
    return ours(vllm_config=vllm_config, **kwargs)
