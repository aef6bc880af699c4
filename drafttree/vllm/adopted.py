"""The part of vLLM's model runner with draft trees that runs outside a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from tree_kernels.kv_move import KvMover, movers_of
from vllm.logger import init_logger
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from drafttree.budget.forward_profile import of_one_request, profile_drafter
from drafttree.drafter import Drafter, Target
from drafttree.method import Method
from drafttree.metrics import Counters
from drafttree.model_files import bos_token, local_folder
from drafttree.vllm import patches
from drafttree.vllm.attention.backends import TreeBackend
from drafttree.vllm.forward import forward_seconds, step_seconds
from drafttree.vllm.graphs import capture_small_batches
from drafttree.vllm.priming import blocks_for_priming
from drafttree.vllm.sampling import build_logits_processors

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


class AdoptedRunner(GPUModelRunner):
    """Base class of the runners that `patches.adopt` makes from a stock model runner.

    The stock runner for CPUs also derives from the one for GPUs.

    Attributes:
        counters: Counts of drafted and accepted tokens.
        draft_seconds: The host's time spent drafting with a model, in seconds.
    """

    counters: Counters
    draft_seconds: float = 0.0
    _drafter: Drafter

    def set_up(
        self, method: Method[Any], options: dict[str, Any], logits_processors: Sequence[Any] | None
    ) -> None:
        """Prepare an adopted runner, before its model is loaded.

        Args:
            method: The method that drafts.
            options: The method's options, as the user gave them.
            logits_processors: Custom logits processors, as the user gave them.
        """
        before = _allocated(self.device)
        self._plan_budget()
        patches.replace_logits_processors(
            self.input_batch,
            build_logits_processors(self.vllm_config, self.device, logits_processors),
            bool(logits_processors),
        )
        self.counters = Counters(self.device)
        self._set_up_drafter(method, options)
        self._state_bytes = _allocated(self.device) - before

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        """Make the drafter, or keep what is needed to make it once the target is loaded."""
        raise NotImplementedError

    def _target(self, embed: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Target:
        """Describe the target to the method that makes the drafter."""
        model, vocab_size = self.model_config, self.model_config.get_vocab_size()
        return Target(
            model=model.model,
            vocab_size=vocab_size,
            device=self.device,
            dtype=model.dtype,
            logger=logger,
            embed=embed,
            bos=bos_token(model.hf_text_config, vocab_size),
            folder=local_folder(model.model, model.revision, self.load_config.download_dir),
        )

    def _plan_budget(self) -> None:
        """Determine the token budget of a step, and warn if it truncates trees."""
        scheduler = self.scheduler_config
        budget: int = min(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        )
        self._token_budget = budget
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

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Let the engine measure the memory of a step before it sizes its KV cache.

        The engine computes one row of logits per request here, but trees have one for each node.
        """
        super().profile_run(*args, **kwargs)
        rows, vocab = self._max_step_rows, self.model_config.get_vocab_size()
        logits = torch.empty(rows, vocab, dtype=self.model_config.dtype, device=self.device)
        logger.info(
            "Logits of %d nodes, the most that max_num_batched_tokens and max_num_seqs allow in a "
            "step, take %.1f MiB",
            rows,
            logits.nbytes / 2**20,
        )

    def _check_and_update_cudagraph_mode(self, *args: Any, **kwargs: Any) -> None:
        """Called by the engine before it captures graphs."""
        super()._check_and_update_cudagraph_mode(*args, **kwargs)
        capture_small_batches(
            self.speculative_config, self.compilation_config, self.cudagraph_dispatcher
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and add the memory of the drafter's state to that of the weights.

        The engine sizes its KV cache by the memory of the weights and of a step. It does not count
        what was allocated before the weights.
        """
        super().load_model(*args, **kwargs)
        if self.device.type == "cuda":
            self.model_memory_usage += self._state_bytes
            logger.info("The drafter's state takes %.1f MiB", self._state_bytes / 2**20)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and the movers that compact them after each step."""
        super().initialize_kv_cache(*args, **kwargs)
        # The stock holder counts the logits rows of a chain. This one expects one row per request,
        # as trees are sampled level by level.
        patches.replace_thinking_budgets(
            self.input_batch,
            maybe_create_thinking_budget_state_holder(
                self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, False
            ),
        )
        layers = self.compilation_config.static_forward_context
        self._movers: list[list[KvMover]] = []
        for group in self.kv_cache_config.kv_cache_groups:
            rows = []
            for name in group.layer_names:
                backend = layers[name].get_attn_backend()
                assert issubclass(backend, TreeBackend)
                rows.append(backend.kv_rows(layers[name].kv_cache))
            self._movers.append(movers_of(chain.from_iterable(rows)))

    def profile_forwards(self) -> None:
        """Let the drafter measure forwards of the model, while the KV cache is still empty."""
        if self.parallel_config.tensor_parallel_size > 1:
            return  # one rank's forwards would wait for the others
        if self.device.type != "cpu":
            profile_drafter(
                self._drafter,
                lambda tokens: step_seconds(self, tokens),
                self._max_step_rows,
                logger,
            )
            return
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        # The engine keeps one block for itself.
        room = min(self.max_model_len, (self.kv_cache_config.num_blocks - 1) * spec.block_size)
        profile_drafter(
            self._drafter,
            of_one_request(lambda *shape: forward_seconds(self, *shape), room),
            min(room, self._token_budget, self.num_spec_tokens + 1),
            logger,
        )

    def prime_at_start(self) -> None:
        """Let the drafter prime, while the KV cache is still empty."""
        size = min(group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups)
        # The engine keeps one block for itself.
        last = min(blocks_for_priming(size), self.kv_cache_config.num_blocks - 1)
        self.prime(range(1, last + 1), idle=False)

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """Let the drafter compute something beforehand, if it can.

        Args:
            blocks: Blocks of the KV cache that nothing else uses.
            idle: See `ModelFreeDrafter.prime`.

        Returns:
            How much is computed, and how much there is in all.
        """
        return 0, 0

    def reset_drafting(self) -> None:
        """Forget everything learned, and all counts."""
        self.forget()
        self.counters = Counters(self.device)

    def forget(self) -> None:
        """Forget everything learned, for instance because the weights have changed."""
        self._drafter.reset()

    def explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen; see `Drafter.explain`."""
        return self._drafter.explain()

    def acceptance(self) -> dict[str, Any]:
        """How often drafts were accepted; see `Drafter.acceptance`."""
        return self._drafter.acceptance()


def _allocated(device: torch.device) -> int:
    """Bytes allocated on a CUDA device; 0 on others."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
