"""A drafter's layer in CUDA graphs of its own, where the target has piecewise ones.

vLLM does not compile the layer. The engine's own wrapper captures it eagerly: each step along the
chains of some number of requests, the trees that are built from these, and a forward over some
number of known tokens. Attention is part of these graphs. Its launches depend on shapes alone, and
it reads lengths, blocks and slots from buffers. Chains and tokens are padded to what was captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from drafttree.model_drafters import Attend, HiddenStateDrafter
from drafttree.tree import DraftTree
from drafttree.vllm.drafters.draft_chains import DraftChains
from drafttree.vllm.drafters.step_parts import StepParts, other_model
from drafttree.vllm.drafters.target_graphs import TargetGraphs

if TYPE_CHECKING:
    from drafttree.vllm.attention.triton import TritonTreeMetadata

ABSENT = -1
"""In the buffers, no KV slot and no request."""


class LayerBuffers:
    """What the graphs of a layer read and write.

    Args:
        rows: Greatest number of tokens of a forward.
        requests: Greatest number of requests, R.
        steps: Number of states of a chain, L.
        pages: Number of blocks of a request, P.
        states: The layer's states by slot, `[slots, d]`.

    Attributes:
        hidden: The target's states before the tokens of a forward, `[rows, d]`.
        tokens: These tokens, `int64 [rows]`.
        positions: Their positions, `int64 [rows]`.
        slots: Their KV slots, `int64 [rows]`.
        starts: First row of each request, and the number of rows, `int32 [R + 1]`.
        lengths: Number of tokens of each request up to the last of its rows, `int32 [R]`.
        chains: For each request of a step its slot, its root, the root's position, its number of
            columns and of states, and the KV slot of its row in each step along the chain,
            `int64 [5 + L - 1, R]`.
        outputs: The states of the chains, `[R, L, d]`.
        trees: The tensors of the trees, of R requests; empty before the first ones.
        blocks: Blocks of the requests, `int32 [R, P]`.
    """

    def __init__(
        self, rows: int, requests: int, steps: int, pages: int, states: torch.Tensor
    ) -> None:
        device, width = states.device, states.shape[1]
        longs = partial(torch.zeros, dtype=torch.int64, device=device)
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        self.hidden = states.new_zeros(rows, width)
        self.tokens, self.positions, self.slots = longs(rows), longs(rows), longs(rows)
        self.starts, self.lengths = ints(requests + 1), ints(requests)
        self.chains = longs(5 + steps - 1, requests)
        self.outputs = states.new_zeros(requests, steps, width)
        self.trees: list[torch.Tensor] = []
        self.blocks = ints(requests, pages)
        # While graphs are captured there are neither rows nor requests.
        self.slots.fill_(ABSENT)
        self.chains.fill_(ABSENT)


class LayerGraphs(TargetGraphs):
    """Runs a drafter's layer in graphs within the engine's forward contexts.

    Args:
        drafter: The drafter, which plans nothing yet.
        attend: The layer's attention, for all rows of the forward context.
        states: The layer's output after each request's last token, by slot, `[slots, d]`.
        config: The engine's configuration.
        parts: The parts of a step for the layer, when the engine's KV caches exist.
        build: Builds trees of slots, roots, the states of chains, and their numbers of states; None
            if it must not be captured.
    """

    def __init__(
        self,
        drafter: HiddenStateDrafter,
        attend: Attend,
        states: torch.Tensor,
        config: Any,
        parts: Callable[[], StepParts],
        build: Callable[..., DraftTree] | None,
    ) -> None:
        super().__init__()
        self._drafter, self._attend, self._states, self._build = drafter, attend, states, build
        self._parts = parts
        self._max_rows: int = config.compilation_config.max_cudagraph_capture_size
        self._steps = drafter.steps
        self._chain = [
            CUDAGraphWrapper(partial(self._step, ahead), config, CUDAGraphMode.PIECEWISE)
            for ahead in range(self._steps - 1)
        ]
        self._trees = CUDAGraphWrapper(self._build_trees, config, CUDAGraphMode.PIECEWISE)
        self._forward = CUDAGraphWrapper(self._read, config, CUDAGraphMode.PIECEWISE)
        # After a forward over a step's tokens the engine may read the target's states again, for
        # logprobs of prompts. They are in the memory that its graphs share, so these have memory of
        # their own. Where all graphs must be in the memory that sleeps, there are none.
        self._forward.graph_pool = torch.cuda.graph_pool_handle()
        self._captures_reads = not getattr(config, "use_cumem_cudagraph_pool", False)
        self._chains_captured: set[int] = set()
        self._buffers: LayerBuffers | None = None

    def forget(self) -> None:
        """The engine drops its graphs, and the KV caches for which they were captured."""
        super().forget()
        self._chains_captured.clear()
        self._buffers = None

    def _capture(self, descriptor: BatchDescriptor) -> None:
        requests = len(self._states)
        if self._buffers is None:
            pages = self._parts().cache.blocks.shape[1]
            self._buffers = LayerBuffers(self._max_rows, requests, self._steps, pages, self._states)
        size = descriptor.num_tokens
        if self._captures_reads:
            self._run([self._forward], size, captured=False)  # kernels are compiled and tuned
            self._run([self._forward], size)
        size = min(size, requests)
        if size not in self._chains_captured:
            drafts = [*self._chain]
            if self._build is not None:
                drafts.append(self._trees)
            self._run(drafts, size, captured=False)
            self._run(drafts, size)
            self._chains_captured.add(size)

    @staticmethod
    def _run(graphs: list[CUDAGraphWrapper], size: int, *, captured: bool = True) -> Any:
        """Capture or replay graphs of `size` requests or rows, or run what they hold."""
        result = None
        with other_model(BatchDescriptor(size) if captured else None):
            for each in graphs:
                result = each(size)
        return result

    def reads(self, rows: int) -> bool:
        """Whether `read` serves so many tokens."""
        return self._captures_reads and self._graphs_for(rows) is not None

    def read(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        metadata: TritonTreeMetadata,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Run the layer over known tokens, those of each request as a text.

        Args:
            hidden: The target's states before the tokens, `[P, d]`.
            tokens: The tokens, `int [P]`.
            positions: Their positions, `int64 [P]`.
            metadata: Whose tokens they are.
            slots: Their KV slots, `int64 [P]` or fewer; there is none for the tokens after these.

        Returns:
            The layer's output, `[P, d]`, until the next call.
        """
        graphs, buffers = self._graphs_for(len(tokens)), self._buffers
        assert graphs is not None
        assert buffers is not None
        # Rows after these have no slot and no request. Any token and position will do for them.
        buffers.slots[: graphs.num_tokens].fill_(ABSENT)
        buffers.starts.copy_(metadata.query_starts[-1:])
        for buffer, values in (
            (buffers.hidden, hidden),
            (buffers.tokens, tokens),
            (buffers.positions, positions),
            (buffers.slots, slots),
            (buffers.starts, metadata.query_starts),
            (buffers.lengths, metadata.lengths),
            (buffers.blocks, metadata.block_table),
        ):
            buffer[: len(values)].copy_(values)
        states: torch.Tensor = self._run([self._forward], graphs.num_tokens)
        return states[: len(tokens)]

    def _read(self, size: int) -> torch.Tensor:
        """The forward over the first `size` rows of the buffers."""
        buffers, drafter = self._buffers, self._drafter
        assert buffers is not None
        requests = min(size, len(buffers.lengths))
        with self._parts().reading_at(
            buffers.slots[:size],
            buffers.blocks[:requests],
            buffers.starts[: requests + 1],
            buffers.lengths[:requests],
            size,
            size,
        ):
            x = drafter.fuse(buffers.hidden[:size], buffers.tokens[:size])
            return drafter.layer(x, buffers.positions[:size], self._attend)

    def unroll(self, chains: DraftChains, parts: StepParts) -> torch.Tensor | None:
        """Run the layer on its own outputs, see `DraftLayer.unroll`.

        Args:
            chains: The chains; the layer reads one of their rows in each step.
            parts: The parts of the step, for the layer.

        Returns:
            `[B, L, d]` as the drafter has planned L, until the next call; None if there are no
            graphs of so many requests.
        """
        rows = chains.rows[:, : self._drafter.steps - 1]
        requests, ahead = rows.shape
        size, buffers, cache = self._chains_for(requests), self._buffers, parts.cache
        if size is None or not ahead:
            return None
        assert buffers is not None
        given = buffers.chains[:, :requests]
        buffers.chains[:, :size].fill_(ABSENT)
        slots, roots, positions, _, sizes, steps = chains
        for row, values in enumerate((slots, roots, positions, sizes, steps)):
            given[row].copy_(values)
        given[5 : 5 + ahead].copy_(cache.slots[rows.T])
        buffers.blocks[:requests].copy_(cache.blocks)
        self._run(self._chain[:ahead], size)
        num_steps = self._drafter.steps
        outputs = buffers.outputs[:requests, :num_steps]
        if ahead + 1 < num_steps:
            outputs[:, ahead + 1 :].copy_(outputs[:, ahead : ahead + 1])
        return outputs

    def draft(self, chains: DraftChains, parts: StepParts) -> DraftTree | None:
        """Run the layer on its own outputs, and build the trees, see `DraftLayer.draft`.

        Args:
            chains: The chains.
            parts: The parts of the step, for the layer.

        Returns:
            The trees, until the next call; None if there are no graphs of so many requests, or none
            that build trees.
        """
        if self._build is None or self.unroll(chains, parts) is None:
            return None
        requests = len(chains.slots)
        size, buffers = self._chains_for(requests), self._buffers
        assert size is not None
        assert buffers is not None
        self._run([self._trees], size)
        return DraftTree(*(each[:requests] for each in buffers.trees))

    def _chains_for(self, requests: int) -> int | None:
        """Number of chains of the smallest graphs that have so many; None if all have fewer."""
        graphs = self._graphs_for(requests)
        return None if graphs is None else min(graphs.num_tokens, len(self._states))

    def _build_trees(self, size: int) -> torch.Tensor:
        """The trees of the first `size` chains of the buffers."""
        buffers = self._buffers
        assert buffers is not None
        assert self._build is not None
        slots, roots, _, _, steps = buffers.chains[:5, :size]
        trees = self._build(slots, roots.int(), buffers.outputs[:size], steps)
        tensors = trees.tokens, trees.parents, trees.tree_size
        if not buffers.trees:
            most = len(buffers.outputs)
            buffers.trees.extend(each.new_zeros(most, *each.shape[1:]) for each in tensors)
        for buffer, values in zip(buffers.trees, tensors, strict=True):
            buffer[:size].copy_(values)
        return buffers.trees[0]

    def _step(self, ahead: int, size: int) -> torch.Tensor:
        """The step of the first `size` chains from column `ahead` on."""
        buffers, drafter = self._buffers, self._drafter
        assert buffers is not None
        slots, _, positions, sizes, _, *kv_slots = buffers.chains[:, :size]
        outputs = buffers.outputs[:size]
        if ahead == 0:
            outputs[:, 0].copy_(self._states[slots.clamp(min=0)])
        with self._parts().reading_at(
            kv_slots[ahead],
            buffers.blocks[:size],
            torch.arange(size + 1, dtype=torch.int32, device=slots.device),
            # Padded chains have no keys.
            (positions + sizes.clamp(max=ahead + 1)).clamp(min=0),
            size,
            1,
        ):
            x, here = drafter.between(outputs[:, ahead]), (positions + ahead).clamp(min=0)
            state = drafter.layer(x, here, self._attend)
        outputs[:, ahead + 1].copy_(state)
        return outputs
