"""What the runners of both of vLLM's model runners share: the drafter, outside of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tree_kernels.kv_move import KvMover, movers_of
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from drafttree.drafter import Drafter
from drafttree.metrics import Counters
from drafttree.model_files import bos_token, local_folder, reads_files
from drafttree.target import Target
from drafttree.vllm import patches
from drafttree.vllm.attention.backends import TreeBackend, TreeMetadataBuilder
from drafttree.vllm.priming import blocks_for_priming
from drafttree.vllm.structured.shown_trees import TreeSender

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


class DraftingRunner:
    """Mixin listed before a stock model runner.

    Attributes:
        counters: Counts of drafted and accepted tokens.
        draft_seconds: The host's time spent drafting with a model, in seconds.
        dropped: Names of the attributes that refer to models, KV caches or the drafter.
    """

    dropped: ClassVar[tuple[str, ...]] = ("_drafter", "_movers")
    counters: Counters
    draft_seconds: float = 0.0
    _drafter: Drafter
    _movers: list[list[KvMover]]
    _state_bytes: int = 0
    # For trees that are drafted within a step; None where no request with a grammar has any, and on
    # ranks other than the first.
    _tree_sender: TreeSender | None = None

    attn_groups: list[list[Any]]
    compilation_config: Any
    device: torch.device
    kv_cache_config: Any
    load_config: Any
    max_num_reqs: int
    model_config: Any
    model_memory_usage: int
    parallel_config: Any
    scheduler_config: Any

    def _target(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        sizes_trees: bool = False,
    ) -> Target:
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
            changed_by=self._changed_by(),
            sizes_trees=sizes_trees,
            group=get_tp_group(),
        )

    def _changed_by(self) -> str | None:
        """The option with which the target may differ from the model in its files, if any."""
        load_format = self.load_config.load_format
        if not reads_files(load_format):
            return f"load_format={load_format!s}"
        options = ("hf_overrides", "hf_config_path")
        return next((name for name in options if getattr(self.model_config, name)), None)

    def _step_budget(self) -> int:
        """Greatest number of tokens of a step."""
        scheduler = self.scheduler_config
        budget: int = min(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        )
        return budget

    @property
    def _max_step_rows(self) -> int:
        """Greatest number of rows of a step that have logits."""
        raise NotImplementedError

    @property
    def _logits_bytes(self) -> int:
        """Most bytes of logits that exist at a time in a step."""
        raise NotImplementedError

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """Let the engine measure the memory of a step before it sizes its KV cache.

        The engine computes one row of logits per request here, but trees have one for each node.
        """
        stock: Any = super()
        stock.profile_run(*args, **kwargs)
        size = self._logits_bytes + self._drafting_bytes
        torch.empty(size, dtype=torch.uint8, device=self.device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target."""
        stock: Any = super()
        stock.load_model(*args, **kwargs)
        logger.info(
            "The logits of a step of up to %d nodes, which max_num_batched_tokens and max_num_seqs "
            "allow, take up to %.1f MiB",
            self._max_step_rows,
            self._logits_bytes / 2**20,
        )

    @property
    def _drafting_bytes(self) -> int:
        """Most bytes that drafting takes in a step, on a GPU."""
        return self._drafter.step_bytes(self._most_drafted) if self.device.type == "cuda" else 0

    @property
    def _most_drafted(self) -> int:
        """Greatest number of requests that have the largest trees in a step."""
        return self.max_num_reqs

    def load_drafter(self) -> None:
        """Load the drafter after the target, and add its memory to that of the weights.

        The engine sizes its KV cache by the memory of the weights and of a step. It counts neither
        what was allocated before the weights nor what is loaded after them.
        """
        before = allocated(self.device)
        self._load_drafter()
        taken = self._state_bytes + allocated(self.device) - before
        if self.device.type == "cuda":
            patches.replace_model_memory(self, self.model_memory_usage + taken)
            logger.info(
                "The drafter takes %.1f MiB, and a step with max_num_seqs requests up to %.1f MiB",
                taken / 2**20,
                self._drafting_bytes / 2**20,
            )

    def _load_drafter(self) -> None:
        """Load what drafts, if it needs the target."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and the movers that compact them after each step."""
        # The caches with which the engine measures its graphs are dropped again, and so must be
        # whatever else refers to them.
        self._movers = []
        stock: Any = super()
        stock.initialize_kv_cache(*args, **kwargs)
        if not kwargs.get("is_profiling"):
            self._movers = self._make_movers()

    @contextmanager
    def _shows_trees(self, scheduled: SchedulerOutput) -> Iterator[None]:
        """A context for a step whose trees the scheduler may wait for, even if the step fails."""
        try:
            yield
        finally:
            if self._tree_sender is not None:
                self._tree_sender.end(scheduled)

    def shutdown(self) -> None:
        """Give memory back; an engine in the user's process may be referenced for longer."""
        if self._tree_sender is not None:
            self._tree_sender.close()
        if "_drafter" in vars(self):
            self._drafter.close()
        for name in self.dropped:
            vars(self).pop(name, None)
        stock: Any = super()
        stock.shutdown()

    def _make_movers(self, of: Callable[[str], bool] = bool) -> list[list[KvMover]]:
        """The movers that compact KV caches after a step, by group of caches.

        Args:
            of: Whether a layer, given its name, is one of those whose caches they compact.
        """
        layers = self.compilation_config.static_forward_context
        movers = []
        for group in self.kv_cache_config.kv_cache_groups:
            rows = []
            for name in filter(of, group.layer_names):
                backend = layers[name].get_attn_backend()
                if not issubclass(backend, TreeBackend):
                    raise ValueError(
                        f"draft trees do not work with this model: its layer {name} chooses the "
                        f"attention backend {backend.get_name()} itself. Leave the speculative "
                        "method out."
                    )
                rows.append(backend.kv_rows(layers[name]))
            movers.append(movers_of(chain.from_iterable(rows)))
        return movers

    def _builders(self) -> Iterator[TreeMetadataBuilder]:
        """What prepares a step for attention, by group of layers."""
        for groups in self.attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                assert isinstance(builder, TreeMetadataBuilder)
                yield builder

    def warmed_up(self) -> None:
        """The engine has run all its forwards that serve no request."""

    def profile_forwards(self) -> None:
        """Let the drafter measure forwards of the model, while the KV cache is still empty."""

    def prime_at_start(self) -> None:
        """Let the drafter prime, while the KV cache is still empty."""
        # The engine keeps one block for itself.
        last = min(self.priming_blocks(), self.kv_cache_config.num_blocks - 1)
        self.prime(range(1, last + 1), idle=False)

    def priming_blocks(self) -> int:
        """Number of blocks of the KV cache that `prime` can use."""
        groups = self.kv_cache_config.kv_cache_groups
        return blocks_for_priming(min(group.kv_cache_spec.block_size for group in groups))

    def prime(self, blocks: Sequence[int], *, idle: bool) -> tuple[int, int]:
        """Let the drafter compute something beforehand, if it can.

        Args:
            blocks: Blocks of the KV cache that nothing else uses.
            idle: See `ModelFreeDrafter.prime`.

        Returns:
            How much is computed, and how much there is in all.
        """
        return 0, 0

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A context after which nothing is learned or counted of what was served inside."""
        with self._drafter.preserved():
            try:
                yield
            finally:
                self.reset_drafting()

    def reset_drafting(self) -> None:
        """Forget everything learned, and all counts."""
        self.forget()
        self.counters = Counters(self.device)

    def forget(self) -> None:
        """Forget everything learned."""
        self._drafter.reset()

    def weights_changed(self) -> None:
        """Forget what was learned from the old weights, and let the drafter read the new ones."""
        self.forget()
        self._drafter.on_new_weights()

    def explain(self) -> list[dict[str, Any]]:
        """How the sizes of trees were chosen; see `Drafter.explain`."""
        return self._drafter.explain()

    def choices(self) -> list[dict[str, Any]]:
        """Why the last sizes were chosen, where the scheduler chooses them; else empty."""
        return []

    def acceptance(self) -> dict[str, Any]:
        """How often drafts were accepted; see `Drafter.acceptance`."""
        return self._drafter.acceptance()


def allocated(device: torch.device) -> int:
    """Bytes allocated on a CUDA device; 0 on others."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
