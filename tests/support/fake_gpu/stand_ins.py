"""Stand-ins for models, attention and KV caches, of both of vLLM's model runners.

The KV of a token is the token, so that a text can be read in the cache. A draft model and a
drafter's layer are functions of a row's token, its position and the nodes that its mask lets it
see, so that a mistake in any of them changes what is drafted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
from vllm.compilation.counter import compilation_counter
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from drafttree.method import HIDDEN_STATE, Method
from drafttree.target import Target
from drafttree.vllm.attention.backends import TreeMetadataBuilder
from drafttree.vllm.drafters import draft_layer
from drafttree.vllm.drafters.draft_layer import LAYER
from drafttree.vllm.drafters.draft_model_loader import PREFIX
from drafttree.vllm.step_masks import StepMasks
from fake_gpu.layer_drafter import LayerDrafter, pattern
from fake_gpu.vllm_graphs import capture, piece
from lyanna_plugin.config import LyannaOptions

VOCAB = 64
MAX_REQUESTS = 4
MAX_LEN = 96
BLOCK = 16
TARGET = "target.0"
"""Name of the target's layer."""
DRAFTED = f"{PREFIX}.0"
"""Name of the draft model's layer."""

BUDGET = MAX_REQUESTS * MAX_LEN
"""Most tokens of a step."""

ONE_RANK = SimpleNamespace(world_size=1, rank_in_group=0)
"""The group of tensor-parallel ranks."""

_BITS = 32


def new_cache(device: torch.device) -> torch.Tensor:
    """The KV cache of a layer with one head of size 1.

    The engine writes nothing to the slot -1, which here is in a block that no request has.
    """
    return torch.full((BUDGET // BLOCK + 1, 1, BLOCK, 1), -1.0, device=device)


def groups_of(layer: str, device: torch.device, num_draft_tokens: int) -> list[Any]:
    """A runner's `attn_groups`: the target's layer and another one have one builder."""
    builder: Any = _make_builder(layer, device, num_draft_tokens)
    group = SimpleNamespace(layer_names=builder.layer_names, get_metadata_builder=lambda _: builder)
    return [[group]]


@contextmanager
def context_of_step(groups: list[Any], common: CommonAttentionMetadata) -> Iterator[None]:
    """The engine's forward context of a whole step."""
    metadata, slots = {}, {}
    for group in (each for of_caches in groups for each in of_caches):
        built = group.get_metadata_builder(0).build(0, common)
        metadata.update(dict.fromkeys(group.layer_names, built))
        slots.update(dict.fromkeys(group.layer_names, common.slot_mapping))
    with override_forward_context(ForwardContext({}, metadata, slots)):
        yield


@dataclass
class _HostMetadata:
    """What the masks of a step say when attention reads them."""

    starts: torch.Tensor
    lengths: torch.Tensor
    masks: StepMasks | None


class _HostBuilder(TreeMetadataBuilder):
    """A builder whose metadata reads the masks late, as on a CPU."""

    def __init__(self, layer_names: list[str]) -> None:
        self.layer_names = layer_names

    def build(self, prefix: int, common: CommonAttentionMetadata) -> _HostMetadata:
        """Keep what is needed."""
        return self.build_part(common, self.step_masks)

    def build_part(self, common: CommonAttentionMetadata, masks: StepMasks | None) -> _HostMetadata:
        """Keep what is needed."""
        return _HostMetadata(common.query_start_loc, common.seq_lens, masks)

    def masks_changed(self) -> None:
        """Nothing is to be done."""


def _make_builder(layer: str, device: torch.device, num_draft_tokens: int) -> TreeMetadataBuilder:
    if device.type == "cpu":
        return _HostBuilder([TARGET, layer])
    from drafttree.vllm.attention.triton import TritonTreeMetadataBuilder

    scheduler = SimpleNamespace(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=BUDGET)
    config: Any = SimpleNamespace(
        scheduler_config=scheduler, num_speculative_tokens=num_draft_tokens
    )
    spec: Any = None
    return TritonTreeMetadataBuilder(spec, [TARGET, layer], config, device)


def nodes_seen(metadata: Any) -> torch.Tensor:
    """The draft nodes that each row of a step sees, a bit for each, `int64 [T]`."""
    _, in_tree, bits = _seen(metadata)
    return torch.where(in_tree, bits >> 1, 0)


def tokens_seen(metadata: Any) -> torch.Tensor:
    """How many tokens each row of a step sees, `int64 [T]`."""
    before, in_tree, bits = _seen(metadata)
    nodes = (bits[:, None] >> torch.arange(_BITS, device=bits.device)) & 1
    return before + torch.where(in_tree, nodes.sum(1), 0)


def _seen(metadata: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each row sees: the number of tokens outside its tree, and a bit for each node of it.

    Returns:
        `int64 [T]`; whether the row is in a tree, `bool [T]`; the bits, the root's first, `int64`.
    """
    on_host = isinstance(metadata, _HostMetadata)
    starts = (metadata.starts if on_host else metadata.query_starts).long()
    count = int(starts[-1]) if on_host else metadata.num_actual_tokens
    rows = torch.arange(count, device=starts.device)
    # Rows of no request, which pad a graph, may see anything.
    request = (rows[:, None] >= starts[None, 1:]).sum(1).clamp(max=len(starts) - 2)
    places = metadata.lengths[request] - starts[request + 1] + rows
    if not on_host:
        assert metadata.masks.shape[1] == 1
        tree = starts[request] + metadata.tree_starts[request]
        in_tree = rows >= tree
        before = torch.where(in_tree, places - rows + tree, places + 1)
        return before, in_tree, metadata.masks[:, 0].long()
    before, in_tree, bits = places + 1, torch.zeros(count, dtype=torch.bool), rows * 0
    masks = metadata.masks
    for tree, request_of_tree in enumerate(masks.requests.tolist() if masks else ()):
        assert masks is not None
        size, end = int(masks.tree_sizes[tree]), int(starts[request_of_tree + 1])
        first = 0 if masks.first_nodes is None else int(masks.first_nodes[tree])
        here = slice(end - size + first, end)
        before[here] = int(metadata.lengths[request_of_tree]) - size
        in_tree[here] = True
        columns = torch.arange(masks.masks.shape[2])
        bits[here] = (masks.masks[tree, first:size].long() << columns).sum(1)
    return before, in_tree, bits


class Runner(Protocol):
    """A model runner with stand-ins.

    Attributes:
        device: Where everything is.
        weights: The target's logits after each token, `[V, V]`.
        caches: The KV caches of all layers, by name.
        reads: Rows of each forward of the draft model, and whether graphs were replayed.
        attended: Rows whose KV was written, of each forward of the layer that replayed no graph.
        captured: Numbers of rows for which graphs are captured on a fake GPU, the largest first.
        graphs: Number of graphs that were captured.
    """

    device: torch.device
    weights: torch.Tensor
    caches: dict[str, torch.Tensor]
    reads: list[tuple[int, bool]]
    attended: list[int]
    captured: tuple[int, ...]
    graphs: int

    def uncounted(self) -> AbstractContextManager[Any]:
        """Where nothing is counted, or forbidden."""


def target_on(device: torch.device, embed: Any) -> Target:
    """What a drafter is told of the target."""
    return Target("none", VOCAB, device, torch.float32, logging.getLogger(__name__), embed=embed)


class DraftModel(torch.nn.Module):
    """Logits that resemble the target's; attention is between two pieces.

    Args:
        runner: The model runner.
        wrap: Wraps the pieces, as vLLM does when it has compiled a model; None if it has not.
    """

    def __init__(self, runner: Runner, wrap: Callable[..., Any] | None) -> None:
        super().__init__()
        self._runner = runner
        self._pieces_run = 0
        self.do_not_compile = wrap is None
        pieces = self._before_attention, self._after_attention
        self._before, self._after = pieces if wrap is None else map(wrap, pieces)
        generator = torch.Generator().manual_seed(4)
        shape = VOCAB, VOCAB
        self._weights = runner.weights + 0.5 * torch.randn(shape, generator=generator).to(
            runner.device
        )
        self._noise = torch.randn(shape, generator=generator).to(runner.device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The states of rows, `int64 [P, 2]`; those of padding are arbitrary."""
        pieces_run = self._pieces_run
        keys, seen = self._before(input_ids, positions)
        rows = self._attend(keys, seen)
        states: torch.Tensor = self._after(input_ids, positions, seen)
        self._runner.reads.append((rows, self._pieces_run == pieces_run))
        return states

    def _before_attention(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """Keys, and memory for what attention gives."""
        self._pieces_run += 1
        with self._runner.uncounted():
            return input_ids.float(), torch.empty_like(positions)

    def _attend(self, keys: torch.Tensor, seen: torch.Tensor) -> int:
        """Write the cache, and tell which nodes the rows see; returns the number of rows."""
        context = get_forward_context()
        metadata: Any = context.attn_metadata
        with self._runner.uncounted():
            if metadata is None:
                seen.fill_(0)
                return 0
            slots: Any = context.slot_mapping
            rows = len(slots[DRAFTED])
            self._runner.caches[DRAFTED].view(-1)[slots[DRAFTED]] = keys[:rows]
            seen[:rows] = nodes_seen(metadata[DRAFTED])
        return rows

    def _after_attention(
        self, input_ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        self._pieces_run += 1
        with self._runner.uncounted():
            return torch.stack((input_ids.long(), (31 * positions + 7 * seen) % VOCAB), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits `[R, V]` of rows."""
        with self._runner.uncounted():
            return self._weights[hidden[:, 0]] + 0.5 * self._noise[hidden[:, 1]]


@contextmanager
def loads_draft_model(runner: Runner, module: Any) -> Iterator[None]:
    """Where a runner, defined in `module`, is given the stand-in for its draft model."""
    runner.caches[DRAFTED], runner.reads = new_cache(runner.device), []
    captures = runner.device.type == "cuda" and runner.captured
    model = DraftModel(runner, piece if captures else None)
    with mock.patch.object(module, "load_draft_model", return_value=model):
        yield
    if captures:
        capture(runner, BUDGET, runner.captured)


LAYER_METHOD = Method(
    name="layer",
    title="A layer",
    kind=HIDDEN_STATE,
    options=LyannaOptions,
    make_drafter=LayerDrafter,
)
"""Lyanna, with a layer without weights."""


class LayerAttention:
    """Attention of the layer: the query, and a little of the number of tokens that it sees."""

    runner: Runner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.runner.attended.append(len(k))
        with self.runner.uncounted():
            context = get_forward_context()
            metadata: Any = context.attn_metadata
            slots: Any = context.slot_mapping
            self.runner.caches[LAYER].view(-1)[slots[LAYER]] = k[:, 0]
            seen = (tokens_seen(metadata[LAYER]) % 13)[:, None]
            return q + 0.5 * seen * pattern(q)


@contextmanager
def loads_layer(runner: Runner) -> Iterator[None]:
    """Where a runner is given the stand-in for its layer's attention."""
    runner.caches[LAYER], runner.attended = new_cache(runner.device), []
    kind = type("Attention", (LayerAttention,), {"runner": runner})
    with mock.patch.object(draft_layer, "Attention", kind):
        yield
    if runner.device.type == "cuda" and runner.captured:
        capture(runner, BUDGET, runner.captured)
        runner.attended.clear()
        runner.graphs = compilation_counter.num_cudagraph_captured


def check_layer_graphs(runner: Runner) -> None:
    """Graphs of the layer are replayed wherever one is large enough, and none is captured."""
    if runner.device.type == "cuda":
        assert all(rows > runner.captured[0] for rows in runner.attended)
        assert compilation_counter.num_cudagraph_captured == runner.graphs
