"""What the workers of both of vLLM's model runners share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from drafttree.method import Method, find_method
from drafttree.vllm import patches
from drafttree.vllm.attention.backends import TreeBackend
from drafttree.vllm.runner_choice import VARIABLE


class DraftingWorker:
    """Mixin listed before a stock worker class; installed through `parallel_config.worker_cls`.

    A subclass turns the stock model runner into one that verifies trees, in `init_device`.

    Attributes:
        stock_runner: Class of the model runner that the stock worker must have made.
        stock_backend: Attention backend that the engine chooses for every layer.
        tree_backend: Attention backend that replaces it.
    """

    stock_runner: ClassVar[type]
    stock_backend: ClassVar[AttentionBackendEnum]
    tree_backend: ClassVar[type[TreeBackend]]

    model_config: Any
    device: torch.device
    model_runner: Any
    vllm_config: Any

    _weights_missing = False

    def _requested(self) -> tuple[Method[Any], dict[str, Any]]:
        """The requested method and its options."""
        request = patches.requested(self.vllm_config.speculative_config)
        assert request is not None
        return find_method(request.name), request.options

    def _check_runner(self, *, uses_v2: bool) -> None:
        """Refuse to start with the other of vLLM's model runners.

        Args:
            uses_v2: Whether this worker is for V2.

        Raises:
            RuntimeError: vLLM chooses anew in each process, and has chosen the other one here.
        """
        # An older worker runs V1 only, or asks the environment when it makes the runner.
        if getattr(self, "use_v2_model_runner", uses_v2) is not uses_v2:
            ours, theirs = ("V2", "V1") if uses_v2 else ("V1", "V2")
            raise RuntimeError(
                f"draft trees were configured for vLLM's {ours} model runner, but this worker is "
                f"to run {theirs}: {VARIABLE} must have the same value in all of the engine's "
                "processes, from its configuration on"
            )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the target, with attention layers that can verify the drafts, and then the drafter.

        The engine keeps the target in a pool of memory that `sleep` at level 2 drops, since the
        weights are loaded again. Nothing would load the drafter again, so it is in other memory.
        """
        stock: Any = super()
        with self._attention_of_drafts():
            stock.load_model(load_dummy_weights=load_dummy_weights)
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.load_drafter()

    def _attention_of_drafts(self) -> AbstractContextManager[None]:
        """While it is open, attention layers are built that apply tree masks."""
        return patches.override_backend(self.stock_backend, self.tree_backend)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and then let the drafter measure the target, and prime."""
        stock: Any = super()
        times = stock.compile_or_warm_up_model()
        self.model_runner.warmed_up()
        self.model_runner.profile_forwards()
        self.model_runner.prime_at_start()
        return times

    def drafttree_priming_blocks(self) -> int:
        """Number of blocks of the KV cache that `drafttree_prime` can use."""
        count: int = self.model_runner.priming_blocks()
        return count

    def drafttree_prime(self, blocks: Sequence[int]) -> tuple[int, int] | None:
        """Let the drafter prime in one short forward, with KV in these blocks of the cache.

        Returns:
            See `ModelFreeDrafter.prime`; None while the weights are not those that are served.
        """
        if self._weights_missing:
            return None
        progress: tuple[int, int] = self.model_runner.prime(blocks, idle=True)
        return progress

    def drafttree_explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen; see `Drafter.explain`."""
        explained: list[dict[str, Any]] = self.model_runner.explain()
        return explained

    def drafttree_choices(self) -> list[dict[str, Any]]:
        """Why the last sizes were chosen, where the scheduler chooses them; else empty."""
        last: list[dict[str, Any]] = self.model_runner.choices()
        return last

    def drafttree_acceptance(self) -> dict[str, Any]:
        """How often drafts were accepted since the last reset; see `Drafter.acceptance`."""
        accepted: dict[str, Any] = self.model_runner.acceptance()
        return accepted

    def drafttree_counters(self) -> dict[str, int]:
        """Counts of draft tokens and steps since the last reset; see `Counters`."""
        counted: dict[str, int] = self.model_runner.counters.as_dict()
        return counted

    def drafttree_draft_seconds(self) -> float:
        """The host's time spent drafting with a model, in seconds; 0 without one."""
        return float(self.model_runner.draft_seconds)

    def drafttree_reset(self) -> None:
        """Forget everything learned, and all counts."""
        self.model_runner.reset_drafting()

    def sleep(self, level: int = 1) -> None:
        """Give memory back; at level 2 the weights must be loaded again."""
        stock: Any = super()
        stock.sleep(level)
        # A CPU's worker gives nothing back.
        self._weights_missing |= level == 2 and self.device.type != "cpu"

    def reload_weights(self, *args: object, **kwargs: object) -> None:
        """Reload the weights, and forget what was learned from the old ones."""
        stock: Any = super()
        stock.reload_weights(*args, **kwargs)
        self._weights_missing = False
        self.model_runner.weights_changed()

    def reset_weights(self) -> None:
        """Set the weights to zero, until others are loaded in their place."""
        stock: Any = super()
        stock.reset_weights()
        self._weights_missing = True

    def start_weight_update(self, *args: object, **kwargs: object) -> None:
        """Begin a transfer of new weights, until whose end there are none."""
        stock: Any = super()
        before, self._weights_missing = self._weights_missing, True
        try:
            stock.start_weight_update(*args, **kwargs)
        except Exception:
            self._weights_missing = before
            raise

    def finish_weight_update(self, *args: object, **kwargs: object) -> None:
        """End a transfer of new weights, and forget what was learned from the old ones."""
        stock: Any = super()
        stock.finish_weight_update(*args, **kwargs)
        self._weights_missing = False
        self.model_runner.weights_changed()
