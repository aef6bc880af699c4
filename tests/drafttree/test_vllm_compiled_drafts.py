"""Models that vLLM compiles are compiled at the start, and capture graphs as `DraftGraphs` asks.

What a graph would hold are the operations of a piece, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fake_gpu.graphs import Graph
from fake_gpu.record import Record
from fake_gpu.vllm_graphs import capture, context
from vllm.compilation import cuda_graph, monitor
from vllm.compilation.backends import set_model_tag
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from drafttree.vllm.drafters.draft_graphs import DraftGraphs

VOCAB, WIDTH, MOST = 32, 4, 16
SIZES = (8, 4)
CPU = torch.device("cpu")
ATTEND = "drafttree_tests::attend"


@torch.library.custom_op(ATTEND, mutates_args=("out",))
def attend(x: torch.Tensor, out: torch.Tensor) -> None:
    """Stands for attention: it is never part of a graph, and knows how many rows there are."""
    rows = get_forward_context().attn_metadata or 0
    out.fill_(float("nan"))
    out[:rows] = x[:rows].cumsum(0)


@attend.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


class Layers(torch.nn.Module):
    """What vLLM compiles of a model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embeddings = torch.nn.Parameter(
            torch.randn(VOCAB, WIDTH, generator=generator), requires_grad=False
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Two pieces, and attention between them."""
        x = self.embeddings[input_ids] + positions[:, None]
        out = torch.empty_like(x)
        torch.ops.drafttree_tests.attend(x, out)
        return 2 * out + x


class Model(torch.nn.Module):
    """A model, whose hooks run before what is compiled."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The states of rows."""
        states: torch.Tensor = self.layers(input_ids, positions)
        return states


class _Captured(TorchDispatchMode):
    """Notes the operations of a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._graph.operated(func, args, kwargs or {}, result)
        return result


def compiled(tag: str, seed: int, config: VllmConfig) -> Model:
    kind: Any = type(tag, (Layers,), {"forward": Layers.forward})
    support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})(kind)
    with set_current_vllm_config(config), set_model_tag(tag):
        return Model(kind(vllm_config=config, prefix=tag, seed=seed))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """A configuration with which vLLM compiles in pieces and captures their graphs, as on CUDA."""
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setattr(
        type(current_platform),
        "get_static_graph_wrapper_cls",
        lambda self: "vllm.compilation.cuda_graph.CUDAGraphWrapper",
    )
    made = VllmConfig()
    compilation = made.compilation_config
    compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "eager"
    compilation.cudagraph_mode, compilation.splitting_ops = CUDAGraphMode.PIECEWISE, [ATTEND]
    compilation.compile_sizes, compilation.compile_ranges_endpoints = [], [MOST]
    return made


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Counts the graphs that are replayed."""
    gpu: Any = SimpleNamespace(record=Record())

    @contextmanager
    def captured(graph: Graph, pool: Any = None, stream: Any = None) -> Iterator[None]:
        graph.gpu = gpu
        with _Captured(graph):
            yield

    for holder, name, value in (
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", captured),
        (cuda_graph, "weak_ref_tensors", lambda tensors: tensors),
        (type(current_platform), "get_global_graph_pool", lambda self: (0, 0)),
        (monitor, "cudagraph_capturing_enabled", True),
    ):
        monkeypatch.setattr(holder, name, value)
    found: Record = gpu.record
    return found


def test_compiled_pieces_are_replayed(config: VllmConfig, record: Record) -> None:
    target, draft = compiled("Target", 1, config), compiled("Drafting", 2, config)
    graphs = DraftGraphs(draft, MOST, CPU)
    graphs.capture_with(target, lambda: False)
    runner = SimpleNamespace(
        get_model=lambda: target,
        initialize_kv_cache=lambda *args, **kwargs: graphs.forget(),
        device=CPU,
    )
    capture(runner, MOST, SIZES)
    plain = Layers(vllm_config=config, seed=2)
    generator = torch.Generator().manual_seed(3)
    for rows, replayed in ((3, 2), (8, 2), (1, 2), (9, 0), (4, 2)):
        ids = torch.randint(VOCAB, (rows,), generator=generator)
        positions = torch.randint(90, (rows,), generator=generator)
        record.kernels.clear()
        with context(CUDAGraphMode.NONE, MOST):
            get_forward_context().attn_metadata = rows  # type: ignore[assignment]
            states = graphs.forward(ids.int(), positions)
            assert states.equal(plain(ids, positions))
        assert record.kernels["graph"] == replayed


def test_compiled_at_the_start(config: VllmConfig) -> None:
    """No request waits until a draft model is compiled, where there are no graphs too."""
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    target, draft = compiled("Target", 1, config), compiled("Drafting", 2, config)
    graphs = DraftGraphs(draft, MOST, CPU)
    graphs.capture_with(target, lambda: False)
    ids, positions = torch.arange(MOST).int(), torch.arange(MOST)
    with context(CUDAGraphMode.NONE, MOST):
        target(input_ids=ids, positions=positions)
        seen = compilation_counter.num_graphs_seen
        graphs.forward(ids[:3], positions[:3])
    assert compilation_counter.num_graphs_seen == seen > 0
