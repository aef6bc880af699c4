"""A step's requests in chunks whose logits take bounded memory, on the V2 model runner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

T = TypeVar("T", torch.Tensor, np.ndarray[Any, Any])


@dataclass(frozen=True)
class Chunk:
    """Requests of a batch that are sampled together.

    Attributes:
        requests: Their places in the batch.
        rows: The rows that have logits.
        is_whole: Whether they are all of the batch.
    """

    requests: slice
    rows: slice
    is_whole: bool

    def requests_of(self, values: T) -> T:
        """What belongs to the chunk of one value for each request."""
        return values if self.is_whole else values[self.requests]

    def rows_of(self, values: T) -> T:
        """What belongs to the chunk of one value for each row."""
        return values if self.is_whole else values[self.rows]


def chunks_of(ends: np.ndarray[Any, Any], max_rows: int) -> Iterator[Chunk]:
    """Divide a batch between requests.

    Processors that read a request's text look for its draft tokens in the rows before.

    Args:
        ends: Integers `[B + 1]`: the rows of request b are `ends[b]` to `ends[b + 1] - 1`.
        max_rows: Greatest number of rows of a chunk, unless one request has more.
    """
    first, last = 0, len(ends) - 1
    if int(ends[last]) <= max_rows:
        yield Chunk(slice(0, last), slice(0, int(ends[last])), is_whole=True)
        return
    while first < last:
        fit = int(np.searchsorted(ends, ends[first] + max_rows, side="right")) - 1
        end = min(max(fit, first + 1), last)
        rows = slice(int(ends[first]), int(ends[end]))
        yield Chunk(slice(first, end), rows, is_whole=end - first == last)
        first = end


def mask_chunk(
    worker: Any, logits: torch.Tensor, batch: InputBatch, grammar: GrammarOutput, chunk: Chunk
) -> None:
    """Mask the tokens that grammars forbid, in place, with the engine's own function.

    Args:
        worker: The engine's `StructuredOutputsWorker`.
        logits: The chunk's logits, `[n, V]`.
        batch: The engine's batch.
        grammar: The masks of all requests that a grammar binds, one for each of their rows.
        chunk: The chunk.
    """
    names, masks = grammar.structured_output_request_ids, grammar.grammar_bitmask
    if not chunk.is_whole:
        first, end = chunk.requests.start, chunk.requests.stop
        ends, drafts = batch.cu_num_logits_np, batch.num_draft_tokens_per_req
        inside = dict.fromkeys(batch.req_ids[first:end])
        # The rows of the batch are in its order, and those of the masks in that of their names.
        sizes = dict(zip(batch.req_ids, np.diff(ends).tolist(), strict=True))
        kept = np.repeat([name in inside for name in names], [sizes[name] for name in names])
        names, masks = [name for name in names if name in inside], masks[kept]
        batch = replace(
            batch,
            req_ids=[*inside],
            cu_num_logits=batch.cu_num_logits[first : end + 1] - chunk.rows.start,
            cu_num_logits_np=ends[first : end + 1] - chunk.rows.start,
            num_draft_tokens_per_req=None if drafts is None else drafts[first:end],
        )
    worker.apply_grammar_bitmask(logits, batch, names, masks)
