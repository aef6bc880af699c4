"""The largest logits of a row in one pass, for Triton kernels.

A key has the order of a logit in its upper 32 bits and the inverted id in its lower 32 bits. The
largest keys are then the largest logits, equal logits are ordered by lowest id, and no two keys are
equal.
"""

from __future__ import annotations

from tree_kernels._triton import jit, tl


@jit
def no_keys(slots: tl.tensor) -> tl.tensor:
    """One key for each of `slots`, smaller than the key of any logit."""
    return slots.to(tl.int64) - 0x7FFFFFFFFFFFFFFF


@jit
def keep_largest(best: tl.tensor, values: tl.tensor, ids: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """Update `best`, the K largest keys so far, with the keys of `values`.

    Args:
        best: Int64 `[K]`, the largest keys so far.
        values: Float32 logits.
        ids: The ids of `values`; ids outside the vocabulary are ignored.
        vocab: Size of the vocabulary.
    """
    # Both zeros are equal, and NaN counts as the largest, as in torch.sort.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    order = tl.where(ids < vocab, order, -0x80000000)
    low = tl.min(best, 0)
    # Most blocks have no large logit, which half of each key shows at less than half the cost.
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
