"""The largest of many logits in one pass, for Triton kernels.

A key is a logit's order in the upper 32 bits and the inverted id in the lower, so that the largest
keys are the answer, ties go to the lowest id, and no two are equal."""

from __future__ import annotations

from tree_kernels._triton import jit, tl


@jit
def logit_keys(values: tl.tensor, ids: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """The keys of float32 `values`, int64; the least of all for ids beyond the vocabulary."""
    # Both zeros are equal, and NaN counts as the largest, as in torch.sort.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    return tl.where(ids < vocab, keys, -0x7FFFFFFFFFFFFFFF)


@jit
def keep_largest(best: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """The largest of both, as many as `best` has."""
    top = tl.max(keys, 0)
    low = tl.min(best, 0)
    while top > low:
        best = tl.where(best == low, top, best)
        keys = tl.where(keys == top, -0x7FFFFFFFFFFFFFFF, keys)
        top = tl.max(keys, 0)
        low = tl.min(best, 0)
    return best
