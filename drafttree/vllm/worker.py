"""vLLM's CPU worker, with a model runner that verifies draft trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from drafttree.method import find_method
from drafttree.vllm.attention import tree_attention_backend
from drafttree.vllm.plugin import requested
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.table_runner import TableRunner


class TreeCPUWorker(CPUWorker):
    """Chosen through `parallel_config.worker_cls` when a method of ours is asked for."""

    model_runner: TreeModelRunner

    def init_device(self) -> None:
        """Build the stock runner, then make it one that verifies trees."""
        # The stock runner refuses custom logits processors under speculation; ours builds them.
        processors = self.model_config.logits_processors
        self.model_config.logits_processors = None
        try:
            super().init_device()
        finally:
            self.model_config.logits_processors = processors
        request = requested(self.vllm_config.speculative_config)
        assert request is not None
        name, options = request
        method = find_method(name)
        runner: type[TreeModelRunner] = TableRunner
        # The others rest on more of the engine than this one needs.
        if method.draft_model:
            from drafttree.vllm.draft_model_runner import DraftModelRunner

            runner = DraftModelRunner
        elif method.hidden_states:
            from drafttree.vllm.hidden_state_runner import HiddenStateRunner

            runner = HiddenStateRunner
        self.model_runner = runner.adopt(self.model_runner, method, options, processors)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model with attention layers that honour tree masks."""
        with tree_attention_backend():
            super().load_model(load_dummy_weights=load_dummy_weights)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and then let the drafter know what forwards cost."""
        times = super().compile_or_warm_up_model()
        self.model_runner.calibrate()
        return times

    def drafttree_explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen."""
        return self.model_runner.explain()

    def drafttree_acceptance(self) -> dict[str, Any]:
        """How often what was drafted was accepted since the start or the last reset."""
        return self.model_runner.acceptance()

    def drafttree_counters(self) -> dict[str, int]:
        """What was drafted and accepted since the start or the last reset."""
        return self.model_runner.counters.as_dict()

    def drafttree_draft_seconds(self) -> float:
        """The host's time spent drafting with a draft model."""
        return float(getattr(self.model_runner, "draft_seconds", 0.0))

    def drafttree_reset(self) -> None:
        """Forget all that was learnt, and all counts."""
        self.model_runner.reset_drafting()

    def reload_weights(self, *args: object, **kwargs: object) -> None:
        """Reload the weights; what the drafter learnt of the old ones goes."""
        super().reload_weights(*args, **kwargs)
        self.model_runner.forget()
