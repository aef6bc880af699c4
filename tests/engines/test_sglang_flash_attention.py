"""FlashAttention 3's backend in SGLang reads the masks of draft trees as they are meant.

Its kernels need a GPU, but which KV slots each row attends to is laid out with PyTorch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_parents import random_trees
from tree_kernels.full_mask import full_mask
from tree_kernels.mask import tree_mask

pytest.importorskip("sglang", reason="SGLang is not installed here")

WIDTH = 12
LENGTHS = [5, 9, 1]
SIZES = [12, 7, 1]


class _Backend:
    """What the backend's layout reads of it."""

    has_swa = use_sliding_window_kv_pool = use_mla = False
    _kv_shard_pool = local_attn_builder = None
    topk, page_size, speculative_num_draft_tokens = 8, 1, WIDTH
    max_context_len = 64
    kv_index_translator = SimpleNamespace(is_translating=False)

    def __init__(self, table: torch.Tensor) -> None:
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

        return getattr(FlashAttentionBackend, name).__get__(self)


@pytest.mark.parametrize("seed", range(10))
def test_each_row_attends_to_the_context_and_to_its_ancestors(seed: int) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    parents, sizes = random_trees(seed, SIZES, "any")
    masks = tree_mask(parents, sizes)
    lengths = torch.tensor(LENGTHS)
    size = WIDTH * int((lengths + WIDTH).sum())
    table = torch.randperm(8 * 64).view(8, 64).int()
    slots = torch.tensor([3, 6, 1])
    backend = _Backend(table)
    backend.init_forward_metadata(
        SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=NgramVerifyInput(
                draft_token_num=WIDTH, custom_mask=full_mask(masks, lengths, size)
            ),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            batch_size=len(SIZES),
            req_pool_indices=slots,
            encoder_lens=None,
        )
    )
    prefix, drafts = backend.forward_metadata, backend.forward_metadata_spec_decode_expand
    assert prefix.cache_seqlens_int32.tolist() == LENGTHS
    for row, (slot, length) in enumerate(zip(slots.tolist(), LENGTHS, strict=True)):
        assert torch.equal(prefix.page_table[row, :length], table[slot, :length])
        for node in range(SIZES[row]):
            path, above = [], node
            while above >= 0:
                path.insert(0, int(table[slot, length + above]))
                above = int(parents[row, above])
            place = WIDTH * row + node
            count = int(drafts.cache_seqlens_int32[place])
            assert drafts.page_table[place, :count].tolist() == path
