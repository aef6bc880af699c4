"""A drafter's layer among the engine's own: its KV is one more layer of the cache groups.

Both of vLLM's model runners run it so, within the forward context of a step. Each tensor-parallel
rank has the whole layer, but like the target's only some of its heads: it attends with these, and
has their KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tree_kernels.layer_rows import LayerRows
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from drafttree.deferred_rows import TakenRows
from drafttree.model_drafters import HiddenStateDrafter
from drafttree.tensor_parallel import drafts_alone
from drafttree.transfer import all_on_device, on_device
from drafttree.tree import DraftTree
from drafttree.vllm.drafters.draft_chains import DraftChains
from drafttree.vllm.drafters.layer_graphs import LayerGraphs
from drafttree.vllm.drafters.step_parts import StepParts
from drafttree.vllm.drafters.target_graphs import is_compiled

LAYER = "draft_layer.0.attn"
"""Name of the layer in the engine's registry of layers."""


class KnownRows(NamedTuple):
    """The P tokens that the layer reads of R requests, request by request.

    Attributes:
        kv_slots: Their KV slots, `int64 [P]`; -1 where nothing is written.
        hidden: The target's hidden states before the tokens, `[P, d]`.
        tokens: The tokens, `int [P]`.
        positions: Their positions, `int64 [P]`.
        last: The row of each request's last token, `int64 [R]`.
    """

    kv_slots: torch.Tensor
    hidden: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor


class DraftLayer:
    """The attention of a hidden-state drafter's layer, and the layer's states.

    Args:
        drafter: The drafter.
        config: The engine's configuration, in which the layer is registered.
        requests: Number of slots.
        device: Where the states are.
        group: The engine's tensor-parallel ranks.
        compute_logits: The target's logits `[N, V]` of states `[N, d]`.

    Attributes:
        states: `[requests, d]`, the layer's output after each request's last token, by slot.
    """

    def __init__(
        self,
        drafter: HiddenStateDrafter,
        config: Any,
        requests: int,
        device: torch.device,
        group: GroupCoordinator,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._drafter = drafter
        self._compute_logits = compute_logits
        drafter.read_head(compute_logits)
        self._config = config
        self._group = group
        self._graphs: LayerGraphs | None = None
        heads, kv_heads, size = drafter.heads
        self._heads, self._kv_heads = (self._own(each) for each in (heads, kv_heads))
        # The engine allocates the scales of the layer's KV on the default device.
        with set_current_vllm_config(config), device:
            self._attention = Attention(
                self._heads.stop - self._heads.start,
                size,
                size**-0.5,
                num_kv_heads=self._kv_heads.stop - self._kv_heads.start,
                cache_config=config.cache_config,
                prefix=LAYER,
            )
        # Where the rows of requests begin that have one each.
        self._starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
        model = config.model_config
        self.states = torch.zeros(
            requests, model.get_hidden_size(), dtype=model.dtype, device=device
        )

    def capture_with(
        self,
        target: torch.nn.Module,
        serves: Callable[[], bool],
        parts: Callable[[], StepParts],
        *,
        plans: bool,
    ) -> None:
        """Capture CUDA graphs of the layer beside piecewise ones of the target, if there are any.

        Args:
            target: The target, which the engine calls as a module.
            serves: Whether it is called to serve requests.
            parts: The parts of a step for the layer, when the engine's KV caches exist.
            plans: Whether trees have another shape from step to step, so that none are captured.
        """
        if self.states.device.type == "cuda" and is_compiled(target):
            self._graphs = LayerGraphs(
                *(self._drafter, self.attend, self.states, self._config, parts),
                None if plans or not self._drafter.proposes_in_graphs else self._trees,
            )
            self._graphs.capture_with(target, serves)

    def forget_graphs(self) -> None:
        """The engine has other KV caches, and captures its graphs again."""
        if self._graphs is not None:
            self._graphs.forget()

    def draft(self, chains: DraftChains, parts: StepParts) -> DraftTree:
        """Run the layer on its own outputs, and build trees from the logits of all its states.

        Args:
            chains: The chains.
            parts: The parts of the step, for the layer.

        Returns:
            The trees, until the next call.
        """
        trees = None if self._graphs is None else self._graphs.draft(chains, parts)
        if trees is None:
            states = self.unroll(chains, parts)
            trees = self._trees(chains.slots, chains.roots, states, chains.steps)
        return trees

    def _trees(
        self, slots: torch.Tensor, roots: torch.Tensor, states: torch.Tensor, steps: torch.Tensor
    ) -> DraftTree:
        """The trees from the states of chains, `[B, L, d]`."""
        logits = self._drafter.logits(states.flatten(0, 1), self._compute_logits)
        return self._drafter.propose(slots, roots, logits.view(*states.shape[:2], -1), steps)

    def unroll(self, chains: DraftChains, parts: StepParts) -> torch.Tensor:
        """Run the layer on its own outputs, along a chain: each step reads one row of a request.

        Args:
            chains: The chains.
            parts: The parts of the step, for the layer.

        Returns:
            `[B, L, d]`, the states of all steps, until the next call; beyond N + 1 they repeat the
            last.
        """
        if self._graphs is not None:
            unrolled = self._graphs.unroll(chains, parts)
            if unrolled is not None:
                return unrolled
        num_steps = self._drafter.steps
        rows, positions = chains.rows[:, : num_steps - 1], chains.root_positions
        state = self.states[chains.slots]
        states = [state]
        starts = self._starts[: len(rows) + 1]
        for ahead in range(rows.shape[1]):
            lengths = positions + chains.sizes.clamp(max=ahead + 1)
            with parts.reading(rows[:, ahead], starts, lengths, 1):
                state = self._drafter.layer(
                    self._drafter.between(state), positions + ahead, self.attend
                )
            states.append(state)
        states += states[-1:] * (num_steps - len(states))
        return torch.stack(states, 1)

    def read(self, rows: TakenRows, slots: torch.Tensor, parts: StepParts) -> None:
        """Read tokens before a step's, and store the layer's output after each request's last one.

        Args:
            rows: The tokens.
            slots: The slots of the step's requests, `int64 [B]`.
            parts: The parts of the step, for the layer.
        """
        if self._has_graph(len(rows.tokens)):
            with parts.reading_before(rows.places, rows.counts, rows.positions):
                states = self._replay(rows.hidden, rows.tokens, rows.positions)
            read = slots[on_device(rows.places, slots.device)]
            self.states[read] = states[rows.last].to(self.states.dtype)
            return
        requests, of_rows = all_on_device(
            [rows.places, np.repeat(np.arange(len(rows.counts)), rows.counts)], slots.device
        )
        blocks, kv_slots = parts.cache.at(requests, of_rows, rows.positions)
        known = KnownRows(kv_slots, rows.hidden, rows.tokens, rows.positions, rows.last)
        self.read_known(known, slots[requests], blocks, parts)

    def read_step(
        self,
        rows: LayerRows,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        parts: StepParts,
    ) -> None:
        """Read the rows of a step, and store the layer's output after each request's last one.

        Args:
            rows: The rows.
            hidden: The target's hidden states of the step, `[T, d]`.
            slots: The slots of the step's requests, `int64 [B]`.
            parts: The parts of the step, for the layer.
        """
        hidden = hidden[rows.sources]
        if self._has_graph(len(rows.tokens)):
            states = self._replay(hidden, rows.tokens, rows.positions)
            self.states[slots] = states[rows.last].to(self.states.dtype)
            return
        context: Any = get_forward_context()
        kv_slots = context.slot_mapping[LAYER]
        known = KnownRows(kv_slots, hidden, rows.tokens, rows.positions, rows.last)
        self.read_known(known, slots, parts.cache.blocks, parts)

    def read_known(
        self, rows: KnownRows, slots: torch.Tensor, blocks: torch.Tensor, parts: StepParts
    ) -> None:
        """Read known tokens, and store the layer's output after each request's last one.

        The other ones do not attend: only their keys and values are needed.

        Args:
            rows: The tokens, of R requests.
            slots: The requests' slots, `int64 [R]`.
            blocks: Their KV blocks, `int32 [R, n]`.
            parts: The parts of a step, for the layer.
        """
        lengths, count = rows.positions[rows.last] + 1, len(rows.last)
        with parts.reading_at(
            *(rows.kv_slots, blocks, self._starts[: count + 1], lengths), rows=count, most=1
        ):
            x = self._drafter.fuse(rows.hidden, rows.tokens)
            states = self._drafter.layer(x, rows.positions, self.attend, rows.last)
        self.states[slots] = states.to(self.states.dtype)

    def _has_graph(self, rows: int) -> bool:
        """Whether there is a graph that reads so many rows."""
        return self._graphs is not None and self._graphs.reads(rows)

    def _replay(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output `[P, d]` over the rows of the forward context, from a graph."""
        context: Any = get_forward_context()
        metadata, kv_slots = context.attn_metadata[LAYER], context.slot_mapping[LAYER]
        assert self._graphs is not None
        return self._graphs.read(hidden, tokens, positions, metadata, kv_slots)

    def valid_steps(self, sizes: torch.Tensor) -> torch.Tensor:
        """How many of the states follow from a request's own rows, `int [B]`; 0 without drafts.

        Args:
            sizes: Number of each request's rows, `int [B]`.
        """
        return (1 + sizes.clamp(max=self._drafter.steps - 1)).masked_fill(sizes == 1, 0)

    def _own(self, heads: int) -> slice:
        """The heads of this rank; ranks share one where there are fewer heads than ranks."""
        ranks, rank = self._group.world_size, self._group.rank_in_group
        first = rank * heads // ranks
        return slice(first, first + max(heads // ranks, 1))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The engine's attention for all rows of the forward context."""
        q, k, v = q[:, self._heads], k[:, self._kv_heads], v[:, self._kv_heads]
        attended = self._attention(q.flatten(1), k.flatten(1), v.flatten(1)).view_as(q)
        if drafts_alone(self._group):
            return attended
        gathered: torch.Tensor = self._group.all_gather(attended, 1)
        return gathered
