"""What vLLM's workers get in addition: a model runner that verifies draft trees."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from drafttree.method import find_method
from drafttree.vllm.backends import TreeBackend, stand_in
from drafttree.vllm.plugin import requested
from drafttree.vllm.runner import TreeModelRunner
from drafttree.vllm.table_runner import TableRunner


class TreeWorker:
    """Stands before a stock worker among the bases of a class of ours, which is chosen through
    `parallel_config.worker_cls` when a method of ours is asked for.

    Attributes:
        stock_runner: the runner that the engine must have chosen.
        backend: the attention backend that it must choose for every layer.
        ours: what stands in for it.
    """

    stock_runner: ClassVar[type]
    backend: ClassVar[AttentionBackendEnum]
    ours: ClassVar[type[TreeBackend]]

    model_config: Any
    model_runner: Any
    vllm_config: Any

    def init_device(self) -> None:
        """Build the stock runner, then make it one that verifies trees."""
        stock: Any = super()
        # The stock runner refuses custom logits processors under speculation; ours builds them.
        processors = self.model_config.logits_processors
        self.model_config.logits_processors = None
        try:
            stock.init_device()
        finally:
            self.model_config.logits_processors = processors
        if type(self.model_runner) is not self.stock_runner:
            raise RuntimeError(
                f"draft trees need vLLM's {self.stock_runner.__name__}, not "
                f"{type(self.model_runner).__name__}: unset VLLM_USE_V2_MODEL_RUNNER"
            )
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
        stock: Any = super()
        with stand_in(self.backend, self.ours):
            stock.load_model(load_dummy_weights=load_dummy_weights)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and then let the drafter know what forwards cost."""
        stock: Any = super()
        times = stock.compile_or_warm_up_model()
        self.model_runner.calibrate()
        return times

    def drafttree_explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen."""
        explained: list[dict[str, Any]] = self.model_runner.explain()
        return explained

    def drafttree_acceptance(self) -> dict[str, Any]:
        """How often what was drafted was accepted since the start or the last reset."""
        accepted: dict[str, Any] = self.model_runner.acceptance()
        return accepted

    def drafttree_counters(self) -> dict[str, int]:
        """What was drafted and accepted since the start or the last reset."""
        counted: dict[str, int] = self.model_runner.counters.as_dict()
        return counted

    def drafttree_draft_seconds(self) -> float:
        """The host's time spent drafting with a draft model."""
        return float(getattr(self.model_runner, "draft_seconds", 0.0))

    def drafttree_reset(self) -> None:
        """Forget all that was learnt, and all counts."""
        self.model_runner.reset_drafting()

    def reload_weights(self, *args: object, **kwargs: object) -> None:
        """Reload the weights; what the drafter learnt of the old ones goes."""
        stock: Any = super()
        stock.reload_weights(*args, **kwargs)
        self.model_runner.forget()
