"""A second route of tree attention on a GPU: vLLM's flash attention reads what comes before a step.

All rows of a request attend to all tokens before them, so that part of attention needs no mask.
`tree_attention` merges it with attention to the step's own tokens, of which a tree has few. The
table in `drafttree.attention_routes` says where the two launches take less time than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tree_kernels.attention_prefix import Prefix
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from drafttree.attention_routes import Routes, routes_of

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")

DTYPES = (torch.bfloat16, torch.float16)
"""The types of queries, keys and values that flash attention computes with."""

VERSIONS = (2, 3)
"""The versions of flash attention whose log-sums are known: `[H, T]`, natural logarithms."""

_MAX_HEAD_SIZE = 256
_GRAPH_CONTEXT = 2048
"""Tokens before the rows for which the route of a captured graph, which serves any, is chosen."""
_PROGRAMS, _MAX_SPLITS, _SPLIT_ROWS = 256, 32, 32


@dataclass(frozen=True)
class StepPrefix:
    """What flash attention reads in a step, the same for all layers.

    Attributes:
        flash: Flash attention.
        lengths: Number of tokens before each request's rows, `int32 [B]`.
        most: The greatest of them, or more.
        splits: Greatest number of parts of the KV that are read at a time; 0 to let it choose.
    """

    flash: FlashAttention
    lengths: torch.Tensor
    most: int
    splits: int = 0

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        query_starts: torch.Tensor,
        max_query: int,
        scale: float,
        soft_cap: float,
        out: torch.Tensor,
    ) -> Prefix:
        """Attend from all rows to the tokens before them.

        Args:
            query: Queries, `[T, H, D]`.
            keys: Pages of keys, `[C, S, K, D]`.
            values: Pages of values, `[C, S, K, D]`.
            block_table: Pages of each request, `int32 [B, P]`.
            query_starts: First row of each request, and the number of rows, `int32 [B + 1]`.
            max_query: Greatest number of rows of a request.
            scale: Factor of the scores.
            soft_cap: Cap of the scores; 0 for none.
            out: `[T, H, D]`, written.

        Returns:
            What `tree_attention` merges.
        """
        _, log_sums = self.flash.function(
            q=query,
            k=_with_wide_strides(keys),
            v=_with_wide_strides(values),
            out=out,
            cu_seqlens_q=query_starts,
            max_seqlen_q=max_query,
            seqused_k=self.lengths,
            max_seqlen_k=self.most,
            softmax_scale=scale,
            causal=False,
            softcap=soft_cap,
            block_table=block_table,
            return_softmax_lse=True,
            num_splits=self.splits,
            fa_version=self.flash.version,
        )
        return Prefix(self.lengths, log_sums)


class FlashAttention:
    """vLLM's flash attention for the layers of one KV cache.

    Args:
        function: vLLM's `flash_attn_varlen_func`.
        version: The version of flash attention.
        routes: Where it is used.
        kv_heads: Number of KV heads.
        max_requests: Greatest number of requests of a step.
        device: The GPU.
    """

    def __init__(
        self,
        function: Any,
        version: int,
        routes: Routes,
        kv_heads: int,
        max_requests: int,
        device: torch.device,
    ) -> None:
        self.function, self.version = function, version
        self._routes, self._kv_heads = routes, kv_heads
        self._lengths = torch.zeros(max_requests, dtype=torch.int32, device=device)

    def of_step(self, common: CommonAttentionMetadata, rows: torch.Tensor) -> StepPrefix | None:
        """What flash attention reads in a step.

        The lengths are written in any case: a captured graph may read them.

        Args:
            common: The engine's description of the step.
            rows: Number of rows of each request, `int32 [B]`.

        Returns:
            None where the table says that drafttree's kernel alone is faster.
        """
        lengths = self._lengths[: len(rows)]
        # Requests that pad a graph have rows and no tokens.
        torch.sub(common.seq_lens, rows, out=lengths).clamp_(min=0)
        most = common.max_seq_len - 1
        if not self._routes.takes_flash(len(rows), common.max_query_len, most):
            return None
        return StepPrefix(self, lengths, most)

    def of_graph(self, common: CommonAttentionMetadata) -> StepPrefix | None:
        """What flash attention reads in the steps of a graph, which is captured without tokens.

        Returns:
            None where the table says that drafttree's kernel alone is faster, with a usual number
            of tokens before the rows.
        """
        requests, rows = len(common.query_start_loc) - 1, common.max_query_len
        most = common.max_seq_len
        if not self._routes.takes_flash(requests, rows, min(most, _GRAPH_CONTEXT)):
            return None
        splits = 0
        if self.version == 3:
            # Left to itself, it would choose by the lengths of the capture.
            programs = requests * self._kv_heads * -(-rows // _SPLIT_ROWS)
            splits = max(1, min(_PROGRAMS // programs, _MAX_SPLITS))
        return StepPrefix(self, self._lengths[:requests].zero_(), most, splits)


def _with_wide_strides(cache: torch.Tensor) -> torch.Tensor:
    """Pages `[C, S, K, D]` in which one KV head has a stride that flash attention 3 can load."""
    if cache.shape[2] != 1:
        return cache
    page, slot, _, one = cache.stride()
    return cache.as_strided(cache.shape, (page, slot, cache.shape[3], one))


def architecture() -> str | None:
    """The kind of the GPU, such as "sm_90"; None if it is not NVIDIA's."""
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return None if capability is None else f"sm_{capability.to_int()}"


def flash_attention_for(
    spec: AttentionSpec, max_requests: int, device: torch.device
) -> FlashAttention | None:
    """Flash attention for the layers of a KV cache, if it can read what comes before a step.

    Args:
        spec: The KV cache.
        max_requests: Greatest number of requests of a step.
        device: The GPU.

    Returns:
        None if it cannot, or if nothing says where it is faster; drafttree's kernel serves all.
    """
    kind = architecture()
    routes = None if kind is None else routes_of(kind, spec.head_size)
    if routes is None:
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )
    except ImportError:
        return None
    version = get_flash_attn_version()
    for found, what in (
        (version not in VERSIONS, f"flash attention {version}"),
        (spec.dtype not in DTYPES, f"a KV cache in {spec.dtype}"),
        (not isinstance(spec, FullAttentionSpec), f"a cache of the kind {type(spec).__name__}"),
        (
            spec.head_size % 8 or spec.head_size > _MAX_HEAD_SIZE,
            f"attention heads of size {spec.head_size}",
        ),
    ):
        if found:
            logger.info_once("Attention of draft trees takes drafttree's kernel alone: %s", what)
            return None
    logger.info_once(
        "Flash attention %s reads what comes before draft trees where that is faster (%s)",
        version,
        routes.source,
    )
    heads = spec.num_kv_heads
    return FlashAttention(flash_attn_varlen_func, version, routes, heads, max_requests, device)
