"""The algorithm classes through which SGLang's scheduler runs tree methods."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from drafttree.method import Method, load
from drafttree.sglang.chains.choice import announce, choose_chains
from drafttree.sglang.kv_types import FP8_KV, kv_cache_dtype
from drafttree.sglang.options import parse_options
from drafttree.sglang.target_config import target_config
from drafttree.sglang.versions import CPU_BACKEND, CUDA_BACKENDS

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")

MAX_RUNNING_REQUESTS = 48
"""SGLang's own default for speculative decoding."""

CUDA_DRAFT_TOKENS = 15
"""Draft tokens of a tree on a GPU unless the user has chosen their number. SGLang captures graphs
for trees of one size, with memory and rows for as many requests as may run at once."""


class TreeAlgorithm(CustomSpecAlgo):
    """Makes the scheduler treat a method like its built-in NGRAM algorithm: tree mask, no draft KV.

    SGLang calls four methods of a custom algorithm that its base class lacks; they come last here.

    Attributes:
        method: The method.
    """

    method: Method[Any]

    def is_ngram(self) -> bool:
        """SGLang's name for a verify input with a tree mask and no draft model."""
        return True

    def has_draft_kv(self) -> bool:
        """Whether SGLang reserves whole pages for each branch of a tree: no.

        A draft model writes to the slots of the tree's nodes, one for each as the target does.
        """
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Set the server arguments that depend on the method and its options.

        Raises:
            ValueError: The method's options are wrong; the message names the option and the fix.
        """
        options = parse_options(
            self.method,
            server_args.speculative_num_draft_tokens,
            server_args.speculative_draft_model_path,
        )
        num_draft_tokens, width = options.num_draft_tokens, 8
        chains = choose_chains(self.method, server_args)
        if chains is not None:
            num_draft_tokens, width = min(num_draft_tokens, options.depth, chains.longest), 1
            announce(self.method.title, chains.reason, num_draft_tokens)
        elif server_args.device != "cpu" and not options.is_limited:
            num_draft_tokens = min(num_draft_tokens, CUDA_DRAFT_TOKENS)
            logger.warning(
                "Trees have %d draft tokens; --speculative-num-draft-tokens, which counts the root "
                "too, sets another number",
                num_draft_tokens,
            )
        # SGLang counts the root.
        tree_size = num_draft_tokens + 1
        server_args.speculative_num_draft_tokens = tree_size
        # SGLang reserves max(steps * width, tree size) slots for a tree: these add nothing.
        width = min(width, tree_size)
        server_args.speculative_eagle_topk = width
        server_args.speculative_num_steps = max(1, num_draft_tokens // width)
        _check_kv_slots(server_args.max_total_tokens, server_args.page_size or 1, tree_size)
        if server_args.device == "cpu":
            server_args.attention_backend = CPU_BACKEND
            # There a forward ends before its call returns, so nothing overlaps: tokens would only
            # be sent a step late, and requests that have ended would be verified once more.
            server_args.disable_overlap_schedule = True
        else:
            model = target_config(server_args)
            windows = model.is_hybrid_swa or getattr(model.hf_text_config, "sliding_window", None)
            _choose_cuda_backend(
                server_args,
                kv_cache_dtype(server_args),
                trees=chains is None,
                windows=bool(windows),
            )
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
            logger.warning(
                "At most %d requests run at once; --max-running-requests sets another number",
                MAX_RUNNING_REQUESTS,
            )
        if server_args.enable_mixed_chunk:
            server_args.enable_mixed_chunk = False
            logger.warning(
                "--enable-mixed-chunk is ignored: draft trees are verified in batches without "
                "prefills"
            )

    def carries_draft_hidden_states(self) -> bool:
        """No hidden states are passed between steps."""
        return False

    def need_topk(self) -> bool:
        """No draft probabilities are passed between steps."""
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        """SGLang's own relay of step results under overlapping scheduling."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def get_platform_worker_cls(self) -> None:
        """No platform has a worker class of its own."""
        return None


class DraftModelAlgorithm(TreeAlgorithm):
    """Makes the scheduler treat a method like its built-in STANDALONE algorithm: a draft model."""

    def is_ngram(self) -> bool:
        """There is a draft model."""
        return False

    def is_standalone(self) -> bool:
        """SGLang's name for a draft model that needs nothing from the target."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The draft model computes the nodes of a tree as the target does."""
        return True

    def handle_server_args(self, server_args: Any) -> None:
        """Set the same server arguments as `TreeAlgorithm`, and disable overlapping scheduling."""
        super().handle_server_args(server_args)
        server_args.disable_overlap_schedule = True


class HiddenStateAlgorithm(TreeAlgorithm):
    """The same for a method that reads the target's hidden states."""

    def handle_server_args(self, server_args: Any) -> None:
        """Set the same server arguments as `TreeAlgorithm`, and disable CUDA graphs of prompts."""
        super().handle_server_args(server_args)
        if server_args.device == "cpu":
            return
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

        # Those of decode steps are captured with hidden states, see `HiddenStateWorker`.
        server_args.cuda_graph_config = with_phase(
            server_args.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED
        )
        logger.warning(
            "Prompts are read without CUDA graphs, which leave out the hidden states that %s reads",
            self.method.title,
        )


def algorithm_for(method: Method[Any]) -> type[TreeAlgorithm]:
    """The class from which SGLang makes the method's algorithm."""
    base: type[TreeAlgorithm] = load(method.kind.sglang.algorithm)
    return type(base.__name__, (base,), {"method": method})


def _choose_cuda_backend(server_args: Any, kv_dtype: str, *, trees: bool, windows: bool) -> None:
    """Choose an attention backend that verifies drafts.

    Args:
        server_args: SGLang's arguments.
        kv_dtype: The data type of the KV cache.
        trees: Whether the drafts are trees.
        windows: Whether layers may have sliding windows.

    Raises:
        ValueError: A backend that was named for prompts or for decoding does not verify drafts.
    """
    logger.warning("Draft trees have not been run on CUDA yet: compare the output first")
    pages = server_args.page_size or 1
    split = {
        phase: getattr(server_args, f"{phase}_attention_backend") for phase in ("prefill", "decode")
    }
    for phase, given in split.items():
        reason = given and _why_not_verified(given, pages, kv_dtype, trees=trees, windows=windows)
        if reason:
            raise ValueError(
                f"--{phase}-attention-backend={given}: drafts {reason}: leave it out, or name "
                f"{CUDA_BACKENDS[0]}"
            )
    given = server_args.attention_backend
    reason = _why_not_verified(given, pages, kv_dtype, trees=trees, windows=windows)
    # Where both are given, SGLang uses them alone.
    if reason is None or all(split.values()):
        return
    server_args.attention_backend = CUDA_BACKENDS[0]
    logger.warning(
        "--attention-backend=%s: drafts %s. %s is used instead%s",
        given,
        reason,
        CUDA_BACKENDS[0],
        "" if split["prefill"] else ", for prompts too",
    )


def _why_not_verified(
    backend: str | None, pages: int, kv_dtype: str, *, trees: bool, windows: bool
) -> str | None:
    """Why an attention backend does not verify the drafts of a server; None if it does.

    FlashInfer does not combine sliding windows with the masks of drafts. FlashAttention 3 takes
    each node of a tree for a request, and SGLang gives it the scales of an FP8 KV cache for the
    requests alone.
    """
    if backend not in CUDA_BACKENDS:
        return "are not verified with it yet"
    if windows and (backend == "flashinfer" or (trees and backend == "fa3")):
        return "are not verified with it in sliding windows"
    if trees and backend == "fa3" and pages > 1:
        return f"are not verified with it and --page-size={pages}"
    if trees and backend == "fa3" and kv_dtype in FP8_KV:
        return f"are not verified with it and --kv-cache-dtype={kv_dtype}"
    return None


def _check_kv_slots(max_total_tokens: int | None, page_size: int, tree_size: int) -> None:
    """Refuse a KV pool without room for one request.

    SGLang reserves slots for two trees per request, and a request needs at least one more. The pool
    and what it reserves are whole pages.
    """
    needed = -(-(2 * tree_size + 1) // page_size) * page_size
    if max_total_tokens is not None and max_total_tokens < needed:
        raise ValueError(
            f"--max-total-tokens={max_total_tokens} has no room for draft trees of {tree_size} "
            f"tokens: set it to {needed} or more, or --speculative-num-draft-tokens lower"
        )
