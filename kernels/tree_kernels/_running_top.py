"""The largest of many logits in one pass, for Triton kernels.

A key is a logit's order in the upper 32 bits and the inverted id in the lower, so that the largest
keys are the answer, ties go to the lowest id, and no two are equal."""

from __future__ import annotations

from tree_kernels._triton import jit, tl


@jit
def no_keys(slots: tl.tensor) -> tl.tensor:
    """As many keys as there are slots, below those of all logits."""
    return slots.to(tl.int64) - 0x7FFFFFFFFFFFFFFF


@jit
def keep_largest(best: tl.tensor, values: tl.tensor, ids: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """The largest keys of `best` and of float32 `values`, as many as `best` has.

    ids: of the values; those beyond the vocabulary have no keys.
    """
    # Both zeros are equal, and NaN counts as the largest, as in torch.sort.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    order = tl.where(ids < vocab, order, -0x80000000)
    low = tl.min(best, 0)
    # Most blocks hold nothing: half a key tells, and costs less than half.
    if tl.max(order, 0) >= (low >> 32).to(tl.int32):
        keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        keys = tl.where(ids < vocab, keys, -0x7FFFFFFFFFFFFFFF)
        top = tl.max(keys, 0)
        while top > low:
            best = tl.where(best == low, top, best)
            keys = tl.where(keys == top, -0x7FFFFFFFFFFFFFFF, keys)
            top = tl.max(keys, 0)
            low = tl.min(best, 0)
    return best
