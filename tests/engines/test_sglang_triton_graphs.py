"""SGLang's Triton backend reads the masks of trees in the CUDA graphs of a draft model.

Its kernels need a GPU, but what the graphs read is laid out with PyTorch.
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

WIDTH = 6
LENGTHS = [5, 9]
CONTEXT = 64


def backend_of_a_draft_model() -> Any:
    """The backend with what it reads of itself for graphs, and without kernels."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    vars(backend).update(
        device="cpu",
        num_head=1,
        max_kv_splits=1,
        v_head_dim=1,
        swa_v_head_dim=None,
        lean_total_programs=1,
        lean_block_m=1,
        max_context_len=CONTEXT,
        skip_prefill=False,
        is_draft_runner=True,
        num_draft_tokens=WIDTH,
        target_verify_num_tokens_per_req=WIDTH,
        sliding_window_size=None,
        use_sliding_window_kv_pool=False,
        window_kv_indptr=None,
        qo_indptr=torch.zeros(3, dtype=torch.int64),
        kv_indptr=torch.zeros(3, dtype=torch.int32),
        mask_indptr=torch.zeros(3, dtype=torch.int64),
        kv_index_translator=SimpleNamespace(pack_read_stream=lambda plan, **given: None),
    )
    return backend


@pytest.mark.parametrize("in_capture", [True, False])
def test_a_draft_model_reads_masks(in_capture: bool) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    from drafttree.sglang.patches import verify_in_graphs

    backend = backend_of_a_draft_model()
    verify_in_graphs(SimpleNamespace(attn_backend=backend))
    backend.init_cuda_graph_state(len(LENGTHS), len(LENGTHS) * WIDTH)
    lengths = torch.tensor(LENGTHS)
    parents, sizes = random_trees(1, [WIDTH, WIDTH - 2], "any")
    masks = full_mask(tree_mask(parents, sizes), lengths, WIDTH * int((lengths + WIDTH).sum()))
    backend.init_forward_metadata_out_graph(
        SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=NgramVerifyInput(draft_token_num=WIDTH, custom_mask=masks),
            batch_size=len(LENGTHS),
            req_pool_indices=torch.tensor([1, 2]),
            seq_lens=lengths,
            encoder_lens=None,
            out_cache_loc=None,
            kv_loc_plan=None,
        ),
        in_capture=in_capture,
    )
    buffer = backend.verify_mask.buffer
    assert torch.equal(buffer[: len(masks)].bool(), masks)
    assert backend.mask_indptr.tolist() == [0, WIDTH * (5 + WIDTH), len(masks)]
    if in_capture:
        assert backend.forward_metadata.custom_mask is buffer


def test_other_backends_are_left_alone() -> None:
    from drafttree.sglang.patches import verify_in_graphs

    other = SimpleNamespace(is_draft_runner=True)
    verify_in_graphs(SimpleNamespace(attn_backend=other))
    assert other.is_draft_runner
