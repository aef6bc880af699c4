"""Patches of SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttree.patches import Patch, replace_function
from drafttree.sglang.patches.when import WITH_A_WORKER
from drafttree.sglang.versions import unknown

COUNTERS_KEY = "drafttree"
"""Key of the counters in `Engine.get_server_info()["internal_states"]`."""

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.get_internal_state",
        when=WITH_A_WORKER,
        reason="SGLang has no hook through which a plugin could report counters.",
    ),
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.maybe_sleep_on_idle",
        when=f"{WITH_A_WORKER}, for methods that learn from logits",
        reason="SGLang calls it in each round of its loop in which no request is running, and then "
        "looks for requests again. Drafters prime there, one short forward in a round, and the "
        "requests that finished are released.",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.weight_updater:"
        "SchedulerWeightUpdaterManager.update_weights_from_disk",
        when="on a GPU, before CUDA graphs are captured, where some are drafttree's own",
        reason="After an update of weights SGLang captures its own CUDA graphs again if it is "
        "asked to. Those that drafttree has captured beside them would go on with what they were "
        "captured with, so it is refused.",
    ),
    Patch(
        target="sglang.srt.managers.scheduler_components.weight_updater:"
        "SchedulerWeightUpdaterManager.flush_cache_after_weight_update",
        when=WITH_A_WORKER,
        reason="SGLang tells methods of updates of weights by flushing its cache, which users may "
        "turn off. What was learned from the old weights must go all the same, and rows that are "
        "primed with the new ones must not get into the old ones' file.",
    ),
    Patch(
        target="sglang.srt.managers.schedule_batch:Req.update_finish_state",
        when=WITH_A_WORKER,
        reason="Of the tokens that one step accepts, SGLang looks for stop strings before it looks "
        "for ending tokens, and for each string in the order of the request's list. So a request "
        "could end later than with plain decoding, at a stop that comes after the first one.",
    ),
)


def report_counters() -> None:
    """Add the counters of a tree method's worker to its scheduler's internal state.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers.scheduler import Scheduler

    from drafttree.metrics import Counters

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def get_internal_state(self: Any, recv_req: Any) -> Any:
            answer = stock(self, recv_req)
            counters = getattr(self.draft_worker, "counters", None)
            if isinstance(counters, Counters):
                answer.internal_state[COUNTERS_KEY] = counters.as_dict()
            return answer

        return get_internal_state

    expected = ["self", "recv_req"]
    replace_function(Scheduler, "get_internal_state", wrap, expected=expected, unknown=unknown)


def use_idle_rounds() -> None:
    """Let a tree method's worker release requests that finished, and prime, while none is running.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers.scheduler import Scheduler

    def wrap(stock: Callable[[Any], None]) -> Callable[[Any], None]:
        def maybe_sleep_on_idle(self: Any) -> None:
            release = getattr(self.draft_worker, "drafttree_release", None)
            if release is not None:
                release()
            prime = getattr(self.draft_worker, "drafttree_prime", None)
            # Older versions keep this in the scheduler itself.
            weights = getattr(self, "weight_updater", self)
            if getattr(weights, "offload_tags", ()) or getattr(weights, "_session", None):
                prime = None  # memory is released, or weights are being replaced
            progress = None if prime is None else prime(self.tree_cache)
            # Until all is primed the scheduler looks for requests instead of sleeping.
            if progress is None or progress[0] == progress[1]:
                stock(self)

        return maybe_sleep_on_idle

    replace_function(Scheduler, "maybe_sleep_on_idle", wrap, expected=["self"], unknown=unknown)


def refuse_recaptures() -> None:
    """Refuse updates of weights with new CUDA graphs for workers that have captured graphs.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    def wrap(stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def update_weights_from_disk(self: Any, recv_req: Any) -> Any:
            has_graphs = getattr(self.draft_worker, "has_own_graphs", False)
            if recv_req.recapture_cuda_graph and has_graphs:
                return UpdateWeightFromDiskReqOutput(
                    success=False,
                    message="the weights were not updated: recapture_cuda_graph=True does not work "
                    "with the CUDA graphs that drafttree has captured, leave it out",
                )
            return stock(self, recv_req)

        return update_weights_from_disk

    replace_function(
        SchedulerWeightUpdaterManager,
        "update_weights_from_disk",
        wrap,
        expected=["self", "recv_req"],
        unknown=unknown,
    )


def report_new_weights() -> None:
    """Let SGLang's updates of weights tell a tree method's worker that there are new ones.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def flush_cache_after_weight_update(self: Any, *given: Any) -> Any:
            # SGLang calls this after each update, and it looks whether to flush.
            changed = getattr(self.draft_worker, "weights_changed", None)
            if changed is not None:
                changed()
            return stock(self, *given)

        return flush_cache_after_weight_update

    # Newer versions give it more arguments.
    replace_function(
        SchedulerWeightUpdaterManager,
        "flush_cache_after_weight_update",
        wrap,
        expected=None,
        unknown=unknown,
    )


def check_stops_in_order() -> None:
    """With stop strings, let SGLang check a step's tokens one by one, as in plain decoding.

    Raises:
        RuntimeError: The patch does not fit this SGLang.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from drafttree.sglang.algorithm import TreeAlgorithm

    def is_checked_at_once(request: Any, new_accepted_len: int) -> bool:
        parameters = request.sampling_params
        if new_accepted_len < 2 or not (parameters.stop_strs or parameters.stop_regex_strs):
            return True
        if request.finished() or request.to_finish:
            return True
        algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
        return not isinstance(algorithm, TreeAlgorithm)

    def wrap(stock: Callable[..., None]) -> Callable[..., None]:
        def update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
            if is_checked_at_once(self, new_accepted_len):
                stock(self, new_accepted_len)
                return
            accepted, grammar = self.output_ids[-new_accepted_len:], self.grammar
            del self.output_ids[-new_accepted_len:]
            for count, token in enumerate(accepted, 1):
                self.output_ids.append(token)
                # The grammar has read all of them, so it can have ended with the last one alone.
                self.grammar = grammar if count == new_accepted_len else None
                stock(self)
                if self.finished():
                    # Where there is no length, SGLang would take that of all tokens.
                    if self.finished_len is None:
                        self.finished_len = len(self.output_ids)
                    self.output_ids.extend(accepted[count:])
                    break
            self.grammar = grammar

        return update_finish_state

    expected = ["self", "new_accepted_len"]
    replace_function(Req, "update_finish_state", wrap, expected=expected, unknown=unknown)
