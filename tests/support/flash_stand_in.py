"""vLLM's flash attention over paged KV in PyTorch, for engines without a GPU."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import triton_on_cpu
from torch import Tensor

VARIABLE = "TESTS_FLASH_ON_CPU"

SERVED = "flash attention read what comes before the rows of trees"
"""Line in the log of an engine in which it did."""


def environment(version: int) -> dict[str, str]:
    """The environment of an engine on a CPU that uses a version of flash attention."""
    return triton_on_cpu.ENVIRONMENT | {VARIABLE: str(version)}


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
) -> tuple[Tensor, Tensor]:
    """Attend from all rows of a request to its first tokens.

    Args:
        q: Queries, `[T, H, D]`.
        k: Pages of keys, `[C, S, K, D]`.
        v: Pages of values, `[C, S, K, D]`.
        max_seqlen_q: Greatest number of rows of a request.
        cu_seqlens_q: First row of each request, and the number of rows, `int32 [B + 1]`.
        max_seqlen_k: Greatest number of tokens of a request.
        seqused_k: Number of tokens of each request, `int32 [B]`.
        softmax_scale: Factor of the scores.
        causal: Must be false.
        softcap: Cap of the scores; 0 for none.
        block_table: Pages of each request, `int32 [B, P]`.
        return_softmax_lse: Must be true.
        out: `[T, H, D]`, written.
        num_splits: Greatest number of parts of the KV.
        fa_version: The version of flash attention.

    Returns:
        `out`, and the logarithms of the sums of exponentials `[H, T]`. Those of a request without
        tokens are inf in version 2, and -inf in version 3; rows of no request are left as they are.
    """
    assert not causal
    assert return_softmax_lse
    assert out is not None
    assert block_table is not None
    assert fa_version == 3 or num_splits <= 1, "version 2 does not split the KV"
    for integers in (cu_seqlens_q, seqused_k, block_table):
        assert integers.dtype == torch.int32
        assert integers.stride(-1) == 1
    assert cu_seqlens_q.is_contiguous()
    assert seqused_k.is_contiguous()
    assert len(seqused_k) == len(block_table) == len(cu_seqlens_q) - 1
    assert k.dtype == v.dtype == q.dtype == out.dtype
    group = q.shape[1] // k.shape[2]
    log_sums = torch.full((q.shape[1], len(q)), torch.nan)
    for request, (start, stop) in enumerate(pairwise(cu_seqlens_q.tolist())):
        length = int(seqused_k[request])
        assert 0 <= length <= max_seqlen_k
        assert stop - start <= max_seqlen_q
        rows = slice(start, stop)
        if length == 0:
            out[rows] = 0.0
            log_sums[:, rows] = torch.inf if fa_version == 2 else -torch.inf
            continue
        pages = block_table[request, : -(-length // k.shape[1])].long()
        key, value = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for cache in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), key) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        log_sums[:, rows] = scores.logsumexp(2)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(2), value).to(out.dtype)
    return out, log_sums


@contextmanager
def in_use(
    version: int, function: Callable[..., Any] = flash_attn_varlen_func, *, everywhere: bool = True
) -> Iterator[None]:
    """Let vLLM have a GPU for which flash attention is there, with queries in float32 too.

    Args:
        version: The version of flash attention.
        function: Flash attention.
        everywhere: Whether the table says that it is always faster, or never.
    """
    from vllm.v1.attention.backends import fa_utils

    from drafttree.attention_routes import NEVER, Routes
    from drafttree.vllm.attention import prefix

    least = 0 if everywhere else NEVER
    routes = Routes("sm_90", 256, "a test", (1,), (1,), ((least,),))
    with ExitStack() as stack:
        for holder, name, value in (
            (prefix, "architecture", lambda: routes.architecture),
            (prefix, "routes_of", lambda *_: routes),
            (prefix, "DTYPES", (*prefix.DTYPES, torch.float32)),
            (fa_utils, "get_flash_attn_version", lambda *_, **__: version),
            (fa_utils, "flash_attn_varlen_func", function),
        ):
            stack.enter_context(mock.patch.object(holder, name, value, create=True))
        yield


def enable() -> None:
    """Let this process's engine, whose attention is that of `triton_on_cpu`, use it."""
    from drafttree.vllm.attention.triton import TritonTreeMetadataBuilder

    def logged(**given: Any) -> tuple[Tensor, Tensor]:
        result = flash_attn_varlen_func(**given)
        if given["max_seqlen_q"] > 1 and given["seqused_k"].any():
            print(SERVED)
        return result

    for_good = ExitStack()
    for_good.enter_context(in_use(int(os.environ[VARIABLE]), logged))
    atexit.register(for_good.close)
    build, places = TritonTreeMetadataBuilder.build, dict[int, int]()

    def build_in_place(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        if metadata.prefix is not None:
            # A captured graph reads them at the same address in every step.
            place = metadata.prefix.lengths.data_ptr()
            assert places.setdefault(id(self), place) == place
        return metadata

    TritonTreeMetadataBuilder.build = build_in_place
