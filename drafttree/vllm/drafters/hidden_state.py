"""vLLM's model runner with a layer that continues the target's hidden states.

The layer's KV is one more layer of the engine's cache groups. At the end of a step the layer reads
the accepted rows, each with the target's hidden state and the token after it. At the beginning of
the next step it runs on its own outputs, in the slots granted for draft tokens, and the tree is
built from the logits of all its steps. Where trees are planned, the drafter may draft without the
layer, which then reads the tokens of several steps at a time.

Tensor-parallel ranks all run the layer, and share its attention. They verify the first one's trees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from tree_kernels.layer_rows import rows_to_read
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context, override_forward_context

from drafttree.arrays import IntArray
from drafttree.deferred_rows import DeferredRows
from drafttree.method import Method
from drafttree.model_drafters import HiddenStateDrafter
from drafttree.tensor_parallel import broadcast_tensor, shape_of_first_rank
from drafttree.transfer import on_device
from drafttree.tree import NO_TOKEN, DraftTree, Verified
from drafttree.vllm.adapters import unadapted_target
from drafttree.vllm.drafters.draft_chains import DraftChains
from drafttree.vllm.drafters.draft_layer import LAYER, DraftLayer, KnownRows
from drafttree.vllm.drafters.in_step import InStepRunner, InStepState
from drafttree.vllm.step import StepTrees


@dataclass
class HiddenStateStep(InStepState):
    """A step whose accepted hidden states the layer reads.

    Attributes:
        context: The engine's forward context, without which attention cannot run.
    """

    context: Any = field(init=False)


class AcceptedRows(NamedTuple):
    """The R rows of a step's accepted paths, request by request.

    Attributes:
        requests: The request of each row, `int64 [R]`.
        columns: Its place on the accepted path, `int64 [R]`.
        sources: The step's row with the target's hidden state, `int [R]`.
        tokens: The token after it, `int32 [R]`.
        positions: The position that it has in the text, `int64 [R]`.
    """

    requests: torch.Tensor
    columns: torch.Tensor
    sources: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, step: HiddenStateStep, verified: Verified) -> AcceptedRows:
        """The rows of a step that reads no prompt; the host waits for their number."""
        requests, columns = (verified.path >= 0).nonzero(as_tuple=True)
        nodes = verified.path[requests, columns]
        return cls(
            *(requests, columns, step.rows[requests, nodes.long()]),
            *(verified.emitted[requests, columns], step.root_positions[requests] + columns),
        )


def _decodes_alone(trees: StepTrees) -> bool:
    """Whether a step has the rows of trees alone, none of a prompt."""
    return len(trees.position_offsets) == len(trees.rows) and bool(trees.counted.all())


class HiddenStateRunner(InStepRunner[HiddenStateStep]):
    """Drafts with a `HiddenStateDrafter`."""

    dropped = (*InStepRunner.dropped, "_unadapted", "_layer", "_deferred")
    _drafter: HiddenStateDrafter
    _deferred: DeferredRows[str] | None = None

    def _set_up_drafter(self, method: Method[Any], options: dict[str, Any]) -> None:
        self._method = method
        self._options = method.parse(options)

    def _load_drafter(self) -> None:
        self._unadapted = unadapted_target(self)
        target = self._target(self._unadapted.embed_input_ids)
        self._drafter = self._method.drafter(self._options, target)
        self._drafter.allocate(self.max_num_reqs, self.max_model_len)
        self._layer = DraftLayer(
            *(self._drafter, self.vllm_config, self.max_num_reqs, self.device),
            *(get_tp_group(), self._unadapted.compute_logits),
        )
        self._layer.capture_with(
            *(self.get_model(), lambda: self._step is not None, lambda: self.step_parts(LAYER)),
            plans=False,  # it plans on CPUs alone, which have no graphs
        )

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build the KV caches, and what the layer reads later, if trees are planned."""
        super().initialize_kv_cache(*args, **kwargs)
        self._layer.forget_graphs()
        self._deferred = None
        on_cpu = self.device.type == "cpu"
        if self._drafter.plans and on_cpu and not kwargs.get("is_profiling"):
            self._deferred = DeferredRows()

    def _requests_ended(self, names: list[str]) -> None:
        super()._requests_ended(names)
        if self._deferred is not None:
            self._deferred.forget(names)

    def _propose(self, roots: IntArray) -> DraftTree:
        """Propose placeholders, for which the scheduler grants KV slots."""
        slots, group = self._batch_slots(), get_tp_group()
        most, self._known = self.num_spec_tokens, None
        if self._deferred is not None:
            # A step that reads prompts alone is not measured, so it is none to try a shape in.
            if not (drafted := int((roots >= 0).sum())):
                return self._propose_without_model(slots, roots)
            planned = shape_of_first_rank(lambda: self._drafter.plan(slots, drafted), group)
            if not planned.depth:
                return self._propose_without_model(slots, roots)
            self._drafter.follow_plan(planned)
            most = planned.nodes
        sizes = 1 + self._drafter.max_draft_tokens(slots)
        broadcast_tensor(sizes, group)
        return self._placeholders(sizes, 1 + most)

    def _new_step(self, trees: StepTrees) -> HiddenStateStep:
        return HiddenStateStep(trees)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is not None:
            step.context = get_forward_context()
        return super()._model_forward(*args, **kwargs)

    def _draft(self, step: HiddenStateStep, roots: torch.Tensor) -> DraftTree:
        """The step's trees: drafted before, or built now from the layer's own outputs."""
        known = self._trees_without_model(step, roots)
        if known is not None:
            return known
        return self._place_trees(step, self._draft_with_layer(step, roots))

    def _draft_with_layer(self, step: HiddenStateStep, roots: torch.Tensor) -> DraftTree:
        """Run the layer on its own outputs, and build the trees from the logits."""
        step.model_drafts = True
        sizes = step.trees.tensors.tree_size.long()
        self._read_deferred(step)
        chains = DraftChains(
            *(self._batch_slots(), roots, step.root_positions, step.rows, sizes),
            self._layer.valid_steps(sizes),
        )
        return self._layer.draft(chains, self.step_parts(LAYER))

    def _step_verified(self, step: HiddenStateStep, verified: Verified) -> None:
        started = perf_counter()
        if self._defers(step, verified):
            return
        self._read_accepted(step, verified)
        if step.trees.drafted:
            seconds = perf_counter() - started
            self.draft_seconds += seconds
            self._drafter.drafted(seconds)

    def _defers(self, step: HiddenStateStep, verified: Verified) -> bool:
        """Whether what was accepted in a step is read later, as nothing else is to be read."""
        deferred = self._deferred
        if deferred is None or step.model_drafts:
            return False
        if not _decodes_alone(step.trees):
            self._read_deferred(step)
            return False
        names = self.input_batch.req_ids
        if step.trees.drafted:
            rows = AcceptedRows.of(step, verified)
            names = [names[request] for request in rows.requests.tolist()]
            accepted = step.hidden[rows.sources], rows.tokens, rows.positions
        else:
            hidden = step.hidden[: len(names)]
            accepted = hidden, verified.emitted[:, 0], step.root_positions
        if deferred.add(names, *accepted):
            self._read_deferred(step)
        return True

    def _read_deferred(self, step: HiddenStateStep) -> None:
        """Let the layer read what was accepted in the steps before."""
        deferred = self._deferred
        rows = None if deferred is None else deferred.take(self.input_batch.req_ids)
        if rows is None:
            return
        started = perf_counter()
        with override_forward_context(step.context):
            self._layer.read(rows, self._batch_slots(), self.step_parts(LAYER))
        step.read_seconds += perf_counter() - started

    def _read_accepted(self, step: HiddenStateStep, verified: Verified) -> None:
        """Run the layer on the step's accepted rows, and store its output after the last."""
        # A GPU would have to wait until the host knows which rows these are.
        on_host = self.device.type == "cpu" and step.trees.drafted
        read = self._read_paths if on_host and _decodes_alone(step.trees) else self._read_step
        with override_forward_context(step.context):
            read(step, verified)

    def _read_paths(self, step: HiddenStateStep, verified: Verified) -> None:
        """Let the layer read the rows of accepted paths alone.

        Rows of rejected drafts, most of a tree, need not be read.
        """
        rows, parts = AcceptedRows.of(step, verified), self.step_parts(LAYER)
        places = step.rows[rows.requests, rows.columns]
        known = KnownRows(
            *(parts.cache.slots[places], step.hidden[rows.sources], rows.tokens, rows.positions),
            last=verified.num_emitted.cumsum(0) - 1,
        )
        self._layer.read_known(known, self._batch_slots(), parts.cache.blocks, parts)

    def _read_step(self, step: HiddenStateStep, verified: Verified) -> None:
        """Let the layer read all rows of a step.

        The KV of rejected drafts is written again before it is read.
        """
        path, sizes = verified.path, step.trees.tensors.tree_size
        starts = self.query_start_loc.gpu[: len(path) + 1]
        following = self._following(step, verified)
        rows = rows_to_read(step.input_ids, step.positions, starts, sizes, path, following)
        self._layer.read_step(rows, step.hidden, self._batch_slots(), self.step_parts(LAYER))

    def _following(self, step: HiddenStateStep, verified: Verified) -> torch.Tensor:
        """The tokens after the rows of the accepted paths, `int32 [B, D + 1]`.

        They are those emitted, but a prompt that is read in part goes on with its own next token.
        """
        batch = self.input_batch
        unfinished = self.discard_request_mask.np[: batch.num_reqs].astype(np.bool_)
        if not unfinished.any():
            return verified.emitted
        ends = np.minimum(step.ends, batch.token_ids_cpu.shape[1] - 1)
        of_prompts = batch.token_ids_cpu[np.arange(len(ends)), ends]
        given = on_device(np.where(unfinished, of_prompts, NO_TOKEN), self.device)[:, None]
        return torch.where(given >= 0, given, verified.emitted)
