"""Which layers and steps flash attention serves, with a stand-in for vLLM's on a CPU."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

import flash_stand_in
import vllm
from tree_kernels.mask import tree_mask
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from drafttree.attention_routes import Routes
from drafttree.vllm.attention import prefix
from drafttree.vllm.attention.prefix import FlashAttention, flash_attention_for
from drafttree.vllm.attention.triton import TritonTreeImpl, TritonTreeMetadataBuilder
from drafttree.vllm.step_masks import StepMasks

CPU = torch.device("cpu")
PAGE, HEADS, KV_HEADS, SIZE = 16, 4, 2, 16
MODEL_LEN = 4096
SPEC: dict[str, Any] = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": SIZE}


class Flash:
    """Flash attention that keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        return flash_stand_in.flash_attn_varlen_func(**given)


@pytest.fixture(params=[2, 3])
def flash(request: pytest.FixtureRequest) -> Iterator[Flash]:
    made = Flash()
    with flash_stand_in.in_use(request.param, made):
        yield made


def builder_for(spec: Any) -> TritonTreeMetadataBuilder:
    scheduler = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64)
    config: Any = SimpleNamespace(scheduler_config=scheduler, num_speculative_tokens=4)
    return TritonTreeMetadataBuilder(spec, ["layer"], config, CPU)


def common_of(rows: list[int], lengths: list[int], longest: int) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    table = torch.arange(8 * len(rows)).int().view(len(rows), 8)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths).int(),
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=longest,
        block_table_tensor=table,
        slot_mapping=torch.arange(sum(rows)),
    )


def trees_of_last(requests: int, size: int) -> StepMasks:
    """A star for the last request."""
    parents = torch.tensor([[-1] + [0] * (size - 1)]).int()
    sizes = torch.tensor([size])
    return StepMasks(torch.tensor([requests - 1]), sizes, tree_mask(parents, sizes))


def attended(builder: TritonTreeMetadataBuilder, **layer: Any) -> torch.Tensor:
    """Attention of a step with a prompt's chunk, a single row and a tree."""
    torch.manual_seed(0)
    builder.step_masks = trees_of_last(3, 5)
    metadata = builder.build(0, common_of([7, 1, 5], [27, 40, 55], 55))
    cache = torch.randn(24, KV_HEADS, PAGE, 2 * SIZE)
    query = torch.randn(13, HEADS, SIZE)
    attributes = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **layer}
    impl = TritonTreeImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, **attributes)
    none: Any = None
    return impl.forward(none, query, none, none, cache, metadata, torch.zeros_like(query))


def test_chunks_with_lookback_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks of the context with lookback"):
        TritonTreeImpl(HEADS, SIZE, 1.0, KV_HEADS, None, 64, "auto", chunk_lookback=1)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft_cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": torch.tensor([2.0, -1.0, 30.0, 0.0])},
}


@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_that_of_the_kernel_alone(flash: Flash, name: str) -> None:
    found = attended(builder_for(FullAttentionSpec(**SPEC, dtype=torch.float32)), **LAYERS[name])
    (call,) = flash.calls
    assert call["seqused_k"].tolist() == [20, 39, 50]
    assert call["softcap"] == LAYERS[name].get("logits_soft_cap", 0.0)
    with flash_stand_in.in_use(3, flash, everywhere=False):
        builder = builder_for(FullAttentionSpec(**SPEC, dtype=torch.float32))
        alone = attended(builder, **LAYERS[name])
    assert len(flash.calls) == 1
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


def test_a_layer_with_a_window_in_a_cache_without_one(flash: Flash) -> None:
    attended(builder_for(FullAttentionSpec(**SPEC, dtype=torch.float32)), sliding_window=24)
    assert not flash.calls


REFUSED: dict[str, Callable[[], Any]] = {
    "float32": lambda: FullAttentionSpec(**SPEC, dtype=torch.float32),
    "uint8": lambda: FullAttentionSpec(**SPEC, dtype=torch.uint8),
    "SlidingWindowSpec": lambda: SlidingWindowSpec(**SPEC, dtype=torch.bfloat16, sliding_window=32),
    "size 12": lambda: FullAttentionSpec(**SPEC | {"head_size": 12}, dtype=torch.bfloat16),
    "size 512": lambda: FullAttentionSpec(**SPEC | {"head_size": 512}, dtype=torch.bfloat16),
    "flash attention 4": lambda: FullAttentionSpec(**SPEC, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_read_is_found_at_start(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(prefix.logger, "info_once", lambda text, *given: said.append(text % given))
    version, stock = 4 if reason == "flash attention 4" else 3, prefix.DTYPES
    with flash_stand_in.in_use(version), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "DTYPES", stock)
        assert flash_attention_for(REFUSED[reason](), 4, CPU) is None
        (line,) = said
        assert reason in line
        served = flash_attention_for(FullAttentionSpec(**SPEC, dtype=torch.bfloat16), 4, CPU)
        assert (served is None) == (reason == "flash attention 4")


def test_a_gpu_without_a_table_and_no_gpu() -> None:
    spec = FullAttentionSpec(**SPEC, dtype=torch.bfloat16)
    assert flash_attention_for(spec, 4, CPU) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "architecture", lambda: "sm_120")
        assert flash_attention_for(spec, 4, CPU) is None


def test_the_table_decides_by_the_step(flash: Flash) -> None:
    routes = Routes("sm_90", 64, "a test", (2,), (5,), ((30,),))
    made = FlashAttention(flash, 3, routes, KV_HEADS, 4, CPU)
    for rows, longest, takes in (
        ([5, 5], 31, True),
        ([5, 5], 30, False),
        ([5], 31, False),
        ([4, 4], 31, False),
        ([1, 9, 1], 200, True),
    ):
        common = common_of(rows, [20] * len(rows), longest)
        counts = torch.tensor(rows).int()
        step = made.of_step(common, counts)
        assert (step is not None) == takes
        # A graph that was captured with flash attention may be replayed in any step.
        assert made._lengths[: len(rows)].tolist() == [20 - each for each in rows]


def test_a_graph_is_captured_for_any_lengths(flash: Flash) -> None:
    builder = builder_for(FullAttentionSpec(**SPEC, dtype=torch.float32))
    version = builder._flash.version if builder._flash else 0
    captured = builder.build_for_cudagraph_capture(common_of([5, 5], [5, 5], MODEL_LEN))
    replayed = builder.build(0, common_of([5, 5], [40, 5], 40))
    assert captured.prefix is not None
    assert replayed.prefix is not None
    assert captured.prefix.most == MODEL_LEN
    assert captured.prefix.lengths.data_ptr() == replayed.prefix.lengths.data_ptr()
    assert captured.prefix.lengths.tolist() == [35, 0]
    # Version 3 would otherwise split by the lengths of the capture.
    assert captured.prefix.splits == (32 if version == 3 else 0)
    assert replayed.prefix.splits == 0


def test_a_graph_with_many_rows_splits_less(flash: Flash) -> None:
    routes = Routes("sm_90", 64, "a test", (1,), (1,), ((prefix._GRAPH_CONTEXT,),))
    made = FlashAttention(flash, 3, routes, 8, 64, CPU)
    splits = []
    for requests in (1, 2, 8, 64):
        common: Any = SimpleNamespace(
            query_start_loc=torch.zeros(requests + 1), max_query_len=64, max_seq_len=MODEL_LEN
        )
        step = made.of_graph(common)
        assert step is not None
        splits.append(step.splits)
    assert splits == [16, 8, 2, 1]
    common.max_seq_len = prefix._GRAPH_CONTEXT - 1
    assert made.of_graph(common) is None


def test_one_kv_head_has_a_stride_of_its_own() -> None:
    pages = torch.randn(3, PAGE, 2 * SIZE).as_strided((3, PAGE, 1, SIZE), (512, 32, 1, 1))
    wide = prefix._with_wide_strides(pages)
    assert wide.stride() == (512, 32, SIZE, 1)
    assert torch.equal(wide, pages)
    two = torch.randn(3, PAGE, 2, SIZE)
    assert prefix._with_wide_strides(two) is two


def test_the_engines_function_takes_what_it_is_given(flash: Flash) -> None:
    """Its module needs a GPU's libraries, but its file can be read without them."""
    file = Path(vllm.__file__).parent / "vllm_flash_attn/flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("flash_attn_interface", file)
    assert spec is not None
    assert spec.loader is not None
    interface = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interface)
    engines = inspect.signature(interface.flash_attn_varlen_func)
    attended(builder_for(FullAttentionSpec(**SPEC, dtype=torch.float32)))
    (call,) = flash.calls
    engines.bind(**call)
    for name, ours in inspect.signature(flash_stand_in.flash_attn_varlen_func).parameters.items():
        theirs = engines.parameters[name]
        if ours.default is not inspect.Parameter.empty:
            assert theirs.default == ours.default, name
    fa_utils = inspect.getsource(importlib.import_module("vllm.v1.attention.backends.fa_utils"))
    assert "def get_flash_attn_version(" in fa_utils
    assert "flash_attn_varlen_func," in fa_utils
