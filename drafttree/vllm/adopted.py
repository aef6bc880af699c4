"""The part of vLLM's model runner with draft trees that runs outside a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from drafttree.budget.forward_profile import MOST_ON_CPU, of_trees, profile_drafter
from drafttree.method import Method
from drafttree.metrics import Counters
from drafttree.tensor_parallel import (
    follow_measurements,
    is_drafting_rank,
    leading_measurements,
)
from drafttree.vllm import patches
from drafttree.vllm.drafting import DraftingRunner, allocated
from drafttree.vllm.forward import forward_seconds, step_seconds
from drafttree.vllm.graphs import capture_small_batches
from drafttree.vllm.sampling import build_logits_processors
from drafttree.vllm.step_logits import max_rows

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


class AdoptedRunner(DraftingRunner, GPUModelRunner):
    """Base class of the runners that `patches.adopt` makes from a stock model runner.

    The stock runner for CPUs also derives from the one for GPUs.
    """

    def set_up(
        self, method: Method[Any], options: dict[str, Any], logits_processors: Sequence[Any] | None
    ) -> None:
        """Prepare an adopted runner, before its model is loaded.

        Args:
            method: The method that drafts.
            options: The method's options, as the user gave them.
            logits_processors: Custom logits processors, as the user gave them.
        """
        before = allocated(self.device)
        self._plan_budget()
        patches.replace_logits_processors(
            self.input_batch,
            build_logits_processors(self.vllm_config, self.device, logits_processors),
            bool(logits_processors),
        )
        # At the level of that warning, which is printed when the stock runner is built.
        logger.warning_once(
            "Requests may set min_p and logit_bias: vLLM's warning that these do not work with "
            "speculative decoding does not apply here",
            scope="local",
        )
        self.counters = Counters(self.device)
        self._set_up_drafter(method, options)
        self._state_bytes = allocated(self.device) - before

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        """Make the drafter, or keep what is needed to make it once the target is loaded."""
        raise NotImplementedError

    def _plan_budget(self) -> None:
        """Determine the token budget of a step, and warn if it truncates trees."""
        budget = self._token_budget = self._step_budget()
        num_draft_tokens = budget // self.max_num_reqs - 1
        if num_draft_tokens < self.num_spec_tokens:
            logger.warning(
                "A budget of %d tokens per step truncates draft trees to %d of %d draft tokens "
                "when all max_num_seqs=%d requests run; %d tokens would verify whole trees",
                budget,
                max(num_draft_tokens, 0),
                self.num_spec_tokens,
                self.max_num_reqs,
                self.max_num_reqs * (1 + self.num_spec_tokens),
            )
        logger.info(
            "Draft trees reserve up to %d KV slots per request, beside its own tokens",
            self.num_spec_tokens,
        )

    @property
    def _max_step_rows(self) -> int:
        """Greatest number of rows of a step that have logits."""
        return min(self._token_budget, self.max_num_reqs * (1 + self.num_spec_tokens))

    @property
    def _max_logits_rows(self) -> int:
        """Greatest number of rows of logits that are computed at a time."""
        if self.lora_config:
            # The engine has set which adapter is for which row of a step.
            return self._max_step_rows
        # The engine itself needs one for each request.
        return max(max_rows(self._logits_row_bytes, self._sets_of_logits), self.max_num_reqs)

    @property
    def _sets_of_logits(self) -> int:
        """How many sets of `_max_logits_rows` rows exist at a time.

        The first is kept while another is computed. With tensor parallelism, each rank computes a
        share of the columns; they are gathered, and then put in order.
        """
        return 2 if get_tp_group().world_size == 1 else 4

    @property
    def _logits_bytes(self) -> int:
        most, sets = self._max_logits_rows, self._sets_of_logits
        rows = sets * min(self._max_step_rows, most)
        if self._max_step_rows <= most and sets == 2:
            rows = self._max_step_rows
        return rows * self._logits_row_bytes

    @property
    def _logits_row_bytes(self) -> int:
        return int(self.model_config.get_vocab_size() * self.model_config.dtype.itemsize)

    def _check_and_update_cudagraph_mode(self, *args: Any, **kwargs: Any) -> None:
        """Called by the engine before it captures graphs."""
        super()._check_and_update_cudagraph_mode(*args, **kwargs)
        capture_small_batches(
            self.speculative_config, self.compilation_config, self.cudagraph_dispatcher
        )

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and what else depends on the batch."""
        super().initialize_kv_cache(*args, **kwargs)
        # The stock holder counts the logits rows of a chain. This one expects one row per request,
        # as trees are sampled level by level.
        patches.replace_thinking_budgets(
            self.input_batch,
            maybe_create_thinking_budget_state_holder(
                self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, False
            ),
        )

    def profile_forwards(self) -> None:
        """Let the drafter measure forwards of the model, while the KV cache is still empty."""
        measure, most = self._timed_forwards()
        group = get_tp_group()
        if not is_drafting_rank(group):
            follow_measurements(measure, group, self.device)
            return
        with leading_measurements(measure, group, self.device) as led:
            profile_drafter(self._drafter, led, most, logger)

    def _timed_forwards(self) -> tuple[Callable[[int], float], int]:
        """What runs a forward and returns its seconds, and the most tokens that it can compute."""
        if self.device.type != "cpu":
            return lambda tokens: step_seconds(self, tokens), self._max_step_rows
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        # The engine keeps one block for itself.
        pool = (self.kv_cache_config.num_blocks - 1) * spec.block_size
        longest, tree_tokens = min(self.max_model_len, pool), self.num_spec_tokens + 1
        return (
            of_trees(
                lambda *shape: forward_seconds(self, *shape),
                min(tree_tokens, longest),
                longest,
                pool,
            ),
            min(pool, self._max_step_rows, max(tree_tokens, MOST_ON_CPU)),
        )
