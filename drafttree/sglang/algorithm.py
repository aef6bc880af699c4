"""A tree method as SGLang's scheduler sees it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from drafttree.method import Method
from drafttree.sglang.options import parse_options
from drafttree.sglang.plugin import CPU_BACKEND, CUDA_BACKENDS

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap

# Below SGLang's own logger, or nothing would print it.
logger = logging.getLogger(f"sglang.{__name__}")

MAX_RUNNING_REQUESTS = 48
"""What the host takes for its own drafting methods where nothing is given."""


class TreeAlgorithm(CustomSpecAlgo):
    """Takes the host's branches for drafts that need no model and are verified as a tree.

    The host asks custom algorithms for more than their base class has; the last four methods are
    those.
    """

    method: Method

    def is_ngram(self) -> bool:
        """The host's word for a verify input with a tree mask and without a draft model."""
        return True

    def has_draft_kv(self) -> bool:
        """Nothing but the target writes KV."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Settle what the user left open.

        Raises:
            ValueError: the method's options are wrong; the message says how to mend them.
        """
        options = parse_options(
            self.method,
            server_args.speculative_num_draft_tokens,
            server_args.speculative_draft_model_path,
        )
        tokens = options.num_nodes + 1
        server_args.speculative_num_draft_tokens = tokens
        # The host reserves max(steps * width, tokens) slots for a tree: these add nothing.
        server_args.speculative_eagle_topk = min(8, tokens)
        server_args.speculative_num_steps = tokens // min(8, tokens)
        _check_room(server_args.max_total_tokens, tokens)
        if server_args.device == "cpu":
            server_args.attention_backend = CPU_BACKEND
        else:
            _settle_cuda(server_args)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
            logger.warning(
                "At most %d requests run at once; --max-running-requests sets another number",
                MAX_RUNNING_REQUESTS,
            )
        if server_args.enable_mixed_chunk:
            server_args.enable_mixed_chunk = False
            logger.warning("Prefill and decoding are not mixed in one batch: drafts are trees")

    def carries_draft_hidden_states(self) -> bool:
        """There are none."""
        return False

    def need_topk(self) -> bool:
        """No draft probabilities pass from step to step."""
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        """What carries the steps' results past the overlapping scheduler."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def get_platform_worker_cls(self) -> None:
        """No platform brings a worker of its own."""
        return None


class DraftModelAlgorithm(TreeAlgorithm):
    """Takes the host's branches for a draft model with a vocabulary and a KV cache of its own."""

    def is_ngram(self) -> bool:
        """There is a draft model."""
        return False

    def is_standalone(self) -> bool:
        """The host's word for a draft model that needs nothing of the target's."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The draft model reads the nodes of a tree as the target does."""
        return True

    def has_draft_kv(self) -> bool:
        """The draft model writes KV too."""
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Settle what the user left open; `TreeAlgorithm` says what is wrong."""
        super().handle_server_args(server_args)
        server_args.disable_overlap_schedule = True


def _settle_cuda(server_args: Any) -> None:
    logger.warning("Draft trees have not been run on CUDA yet: compare answers first")
    if server_args.attention_backend not in CUDA_BACKENDS:
        logger.warning(
            "--attention-backend=%s takes no tree's mask; %s is used instead",
            server_args.attention_backend,
            CUDA_BACKENDS[0],
        )
        server_args.attention_backend = CUDA_BACKENDS[0]


def _check_room(max_total_tokens: int | None, tokens: int) -> None:
    """The host reserves two trees a request, and a request needs a slot of its own at least."""
    needed = 2 * tokens + 1
    if max_total_tokens is not None and max_total_tokens < needed:
        raise ValueError(
            f"--max-total-tokens={max_total_tokens} has no room for draft trees of {tokens} "
            f"tokens: set it to {needed} or more, or --speculative-num-draft-tokens lower"
        )


def algorithm_for(method: Method) -> type[TreeAlgorithm]:
    """The class that the host makes the method's algorithm of."""
    base = DraftModelAlgorithm if method.draft_model else TreeAlgorithm
    return type(base.__name__, (base,), {"method": method})
