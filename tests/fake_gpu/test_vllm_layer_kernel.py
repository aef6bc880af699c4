"""A drafter's layer with the kernel for tree attention gives in graphs what it gives without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_gpu.tensors import Gpu, held

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fake_gpu.vllm_graphs import capture, context, vllm_graphs
from tree_kernels.layer_rows import LayerRows
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec

from drafttree.model_drafters import Attend, Head
from drafttree.vllm.attention.triton import TritonTreeImpl, TritonTreeMetadataBuilder
from drafttree.vllm.drafters import draft_layer
from drafttree.vllm.drafters.draft_chains import DraftChains
from drafttree.vllm.drafters.draft_layer import LAYER, DraftLayer
from drafttree.vllm.drafters.step_parts import StepCache, StepParts

PAGE, HEADS, KV_HEADS, SIZE, STEPS = 16, 4, 2, 16, 4
WIDTH, VOCAB, REQUESTS, PAGES = HEADS * SIZE, 32, 5, 6
SIZES = (16, 8, 2)
"""Numbers of rows for which graphs are captured; chains are captured of up to five requests."""


class Drafter:
    """A layer with random weights."""

    heads = HEADS, KV_HEADS, SIZE
    steps = STEPS
    proposes_in_graphs = False

    def __init__(self) -> None:
        torch.manual_seed(0)
        shapes = {
            **{"fuse": (WIDTH, WIDTH), "tokens": (VOCAB, WIDTH), "between": (WIDTH, WIDTH)},
            **{"q": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)},
            **dict.fromkeys("kv", (WIDTH, KV_HEADS * SIZE)),
        }
        self._weights = {
            name: (0.2 * torch.randn(shape)).to("cuda") for name, shape in shapes.items()
        }

    def read_head(self, head: Head) -> None:
        """The layer's outputs are its drafts: it uses no head."""

    def fuse(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The layer's input at known tokens."""
        return hidden @ self._weights["fuse"] + self._weights["tokens"][tokens]

    def between(self, states: torch.Tensor) -> torch.Tensor:
        """The layer's input at a step along a chain."""
        return states @ self._weights["between"]

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output."""
        x = x + (0.1 * positions)[:, None].sin()
        q, k, v = ((x @ self._weights[name]).unflatten(1, (-1, SIZE)) for name in "qkv")
        if last is not None:
            x, q = x[last], q[last]
        return (x + attend(q, k, v).flatten(1) @ self._weights["o"]).tanh()


class Attention:
    """The engine's layer of attention, whose cache has a page for what has no slot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._impl = TritonTreeImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        self.cache = torch.randn(REQUESTS * PAGES + 1, KV_HEADS, PAGE, 2 * SIZE).to("cuda")

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        here: Any = get_forward_context()
        none, slots, metadata = None, here.slot_mapping[LAYER], here.attn_metadata[LAYER]
        pair = torch.cat([each.unflatten(1, (-1, SIZE)) for each in (k, v)], 2)
        self.cache[slots // PAGE, :, slots % PAGE] = pair
        query = q.unflatten(1, (-1, SIZE))
        output = torch.zeros_like(query)
        attended: torch.Tensor = self._impl.forward(
            none,  # type: ignore[arg-type]
            query,
            none,  # type: ignore[arg-type]
            none,  # type: ignore[arg-type]
            self.cache,
            metadata,
            output,
        )
        return attended.flatten(1)


class Target(torch.nn.Module):
    """Does nothing."""

    def forward(self, **inputs: torch.Tensor) -> None:
        pass


@contextmanager
def layers() -> Iterator[None]:
    """Where a layer can be made."""
    with (
        mock.patch.object(draft_layer, "Attention", Attention),
        mock.patch.object(draft_layer, "set_current_vllm_config", return_value=nullcontext()),
    ):
        yield


class Engine:
    """The layer, and steps in which it runs.

    Args:
        gpu: The fake GPU.
        graphs: Whether the target is compiled, so that graphs of the layer are captured too.
    """

    def __init__(self, gpu: Gpu, *, graphs: bool) -> None:
        self._gpu, self.device = gpu, torch.device("cuda")
        scheduler = SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=64)
        config: Any = SimpleNamespace(
            scheduler_config=scheduler,
            num_speculative_tokens=STEPS,
            cache_config=None,
            model_config=SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.float32),
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=SIZES[0]),
            use_cumem_cudagraph_pool=False,
        )
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32
        )
        builder = TritonTreeMetadataBuilder(spec, [LAYER], config, self.device)
        group = SimpleNamespace(layer_names=[LAYER], get_metadata_builder=lambda _: builder)
        self.max_model_len, self.attn_groups = PAGE * PAGES, [[group]]
        ranks: Any = SimpleNamespace(world_size=1, rank_in_group=0)
        drafter: Any = Drafter()
        with layers():
            self.layer = DraftLayer(drafter, config, REQUESTS, self.device, ranks, torch.zeros_like)
        self.layer.states.copy_(torch.randn(REQUESTS, WIDTH))
        self._tables = torch.randperm(REQUESTS * PAGES).int().view(REQUESTS, PAGES)
        self._target = Target()
        self._target.do_not_compile = not graphs
        nothing = self._parts(*[torch.arange(0)] * 3)
        self.layer.capture_with(self._target, lambda: False, lambda: nothing, plans=True)
        capture(self, SIZES[0], SIZES)

    def get_model(self) -> Target:
        """The target."""
        return self._target

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """The engine drops its graphs."""
        self.layer.forget_graphs()

    def _parts(
        self, requests: torch.Tensor, of_rows: torch.Tensor, positions: torch.Tensor
    ) -> StepParts:
        """The parts of a step with these requests, and with rows of theirs at positions."""
        pages = self._tables[requests][of_rows, positions // PAGE].long()
        slots = pages * PAGE + positions % PAGE
        cache = StepCache(self._tables[requests].to("cuda"), slots.to("cuda"), PAGE)
        return StepParts(self, LAYER, [cache])

    def run(self, roots: list[int], sizes: list[int]) -> list[torch.Tensor]:
        """Draft for the last requests, and then read the step's rows.

        Returns:
            The states of the chains, and those after the requests' last rows.
        """
        requests = torch.arange(REQUESTS)[-len(roots) :]
        counts, before = torch.tensor(sizes), torch.tensor(roots)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        of_rows = torch.arange(len(roots)).repeat_interleave(counts)
        positions = before[of_rows] + torch.arange(len(of_rows)) - starts[of_rows]
        parts = self._parts(requests, of_rows, positions)
        columns = torch.arange(max(sizes))
        rows = (starts[:-1, None] + columns).minimum(starts[1:, None] - 1)
        hidden, tokens = torch.randn(len(of_rows), WIDTH), torch.randint(VOCAB, of_rows.shape)
        given = requests, before, rows, counts, hidden, tokens, positions, starts.int()
        slots, before, rows, counts, hidden, tokens, positions, starts = (
            each.to("cuda") for each in given
        )
        found = []
        with context(CUDAGraphMode.NONE, 64), self._gpu.no_waiting():
            chains = DraftChains(slots, slots, before, rows, counts, counts)
            found.append(self.layer.unroll(chains, parts).clone())
            every = torch.arange(len(tokens), device="cuda")
            rows = LayerRows(every, tokens, positions, starts[1:].long() - 1)
            with parts.reading(every, starts, before + counts, max(sizes)):
                self.layer.read_step(rows, hidden, slots, parts)
            found.append(self.layer.states[slots].clone())
        return found


STEPS_OF_REQUESTS = [
    ([40, 3, 71], [3, 1, 4]),
    ([9], [2]),
    ([17, 60, 5, 33, 2], [4, 5, 1, 3, 3]),
    ([18, 62], [1, 1]),
    ([21, 64, 8, 35], [5, 5, 5, 5]),
]
"""Positions of roots, and numbers of columns. The last step has more rows than any graph."""


def run(gpu: Gpu, *, graphs: bool) -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
    """The states of all steps, the layer's cache, and the number of graphs that a step replayed."""
    found, replays = [], []
    with vllm_graphs(gpu):
        engine = Engine(gpu, graphs=graphs)
        captured = compilation_counter.num_cudagraph_captured
        for step, (roots, sizes) in enumerate(STEPS_OF_REQUESTS):
            torch.manual_seed(step)
            with gpu.recording() as record:
                found += [held(each) for each in engine.run(roots, sizes)]
            replays.append(record.kernels["graph"])
        assert compilation_counter.num_cudagraph_captured == captured
    cache = engine.layer._attention.cache
    return found, held(cache)[:-1], replays


def test_graphs_give_what_the_layer_gives_without(gpu: Gpu) -> None:
    expected, cache, without = run(gpu, graphs=False)
    found, cache_in_graphs, replays = run(gpu, graphs=True)
    assert not any(without)
    assert replays == [
        min(STEPS - 1, max(sizes)) + (sum(sizes) <= SIZES[0]) for _, sizes in STEPS_OF_REQUESTS
    ]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(cache_in_graphs, cache, rtol=1e-5, atol=5e-5)
