"""Attention in a captured graph: flash attention before a step, then the kernel for its trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu.flash import flash_on
from fake_gpu.graphs import cuda_graphs
from fake_gpu.tensors import Gpu, held

pytest.importorskip("vllm", reason="vLLM is not installed here")

from tree_kernels.mask import tree_mask
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from drafttree.vllm.attention.triton import TritonTreeImpl, TritonTreeMetadataBuilder
from drafttree.vllm.step_masks import StepMasks

PAGE, HEADS, KV_HEADS, SIZE = 16, 4, 2, 16
REQUESTS, ROWS, MODEL_LEN = 3, 5, 96


class Layer:
    """A layer of attention, with the batch that it attends for."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        scheduler = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)
        config: Any = SimpleNamespace(scheduler_config=scheduler, num_speculative_tokens=ROWS - 1)
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
        )
        self._device = torch.device(device)
        self.builder = TritonTreeMetadataBuilder(spec, ["layer"], config, self._device)
        self.impl = TritonTreeImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        pages = MODEL_LEN // PAGE
        self.cache = torch.randn(REQUESTS * pages, KV_HEADS, PAGE, 2 * SIZE).to(device)
        self.query = torch.randn(REQUESTS * ROWS, HEADS, SIZE).to(device)
        self.out = torch.zeros(self.query.shape).to(device)
        self.starts = (ROWS * torch.arange(REQUESTS + 1)).int().to(device)
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32).to(device)
        self.table = torch.randperm(REQUESTS * pages).int().view(REQUESTS, pages).to(device)

    def common(self, longest: int) -> CommonAttentionMetadata:
        """The engine's description of a step."""
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=ROWS * torch.arange(REQUESTS + 1),
            seq_lens=self.lengths,
            num_reqs=REQUESTS,
            num_actual_tokens=REQUESTS * ROWS,
            max_query_len=ROWS,
            max_seq_len=longest,
            block_table_tensor=self.table,
            slot_mapping=self.starts,
        )

    def next_step(self, lengths: list[int], parents: list[list[int]]) -> Any:
        """Give the first requests trees, and build the metadata."""
        self.lengths.copy_(torch.tensor(lengths))
        trees = torch.tensor(parents).int()
        sizes = torch.full((len(parents),), ROWS)
        given = torch.arange(len(parents)), sizes, tree_mask(trees, sizes)
        self.builder.step_masks = StepMasks(*(each.to(self._device) for each in given))
        return self.common(max(lengths))

    def attend(self, metadata: Any) -> torch.Tensor:
        """Attend; returns the output."""
        none: Any = None
        return self.impl.forward(none, self.query, none, none, self.cache, metadata, self.out)


STAR, CHAIN, BUSH = [-1, 0, 0, 0, 0], [-1, 0, 1, 2, 3], [-1, 0, 0, 1, 2]
STEPS = [
    ([40, 5, 96], [STAR, BUSH]),
    ([41, 9, 5], [CHAIN, STAR, BUSH]),
    ([5, 77, 30], [BUSH]),
]
"""Lengths of the requests, some of which have nothing before their rows, and their trees."""


@pytest.mark.parametrize("version", [2, 3])
def test_one_graph_serves_any_lengths_and_trees(gpu: Gpu, version: int) -> None:
    plain = Layer("cpu")
    with flash_on(gpu, version), cuda_graphs(gpu):
        layer, graph = Layer("cuda"), torch.cuda.CUDAGraph()
        metadata = layer.builder.build_for_cudagraph_capture(layer.common(MODEL_LEN))
        with gpu.recording() as record, torch.cuda.graph(graph), gpu.no_waiting():
            layer.attend(metadata)
        assert record.kernels == {"flash_attn_varlen_func": 1, "_attend_kernel": 1}
        for lengths, parents in STEPS:
            common = layer.next_step(lengths, parents)
            with gpu.recording() as record, gpu.no_waiting():
                layer.builder.build(0, common)
                graph.replay()
            assert not record.waits
            expected = plain.attend(plain.builder.build(0, plain.next_step(lengths, parents)))
            torch.testing.assert_close(held(layer.out), expected, rtol=2e-5, atol=2e-5)
