"""The Lyanna drafter: builds the tree to verify from the logits of all steps.

The host runs the layer and stores its KV. The drafter keeps the logits of each request's last
tree, from which a second tree is drafted after a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from drafttree.budget import TreeShape
from drafttree.hot_head import HotHead
from drafttree.model_drafters import Attend, Head, HiddenStateDrafter
from drafttree.target import Target
from drafttree.tensor_parallel import is_drafting_rank
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from lyanna_plugin.config import LyannaOptions
from lyanna_plugin.tree import (
    TokenTable,
    candidates,
    choose,
    expand_tree,
    merge,
    resample_logits,
    sample_tree,
    united_steps,
)
from recycle_plugin.shared_trees import SharedTrees
from recycle_plugin.sharing import SharingDrafter


class LyannaTrees(SharingDrafter, HiddenStateDrafter):
    """The part of the drafter that builds trees, which needs no model.

    Args:
        options: The method's options.
        info: The token info.
        dtype: Data type in which logits are kept for the second tree.
    """

    _options: LyannaOptions

    def __init__(self, options: LyannaOptions, info: TokenTable, dtype: torch.dtype) -> None:
        self.max_depth = options.steps
        # The last one with drafts; a host that plans nothing is proposed the largest trees.
        self._shape = TreeShape(options.steps, options.width, options.regular_nodes)
        if options.auto:
            self._shape = options.shapes[-1]
        self._options = options
        self._info = info
        self._dtype = dtype
        self._resamples = options.second_draft_tokens(options.steps - 1) > 0
        regular = options.regular_draft_tokens
        seconds = [options.second_draft_tokens(steps) for steps in range(options.steps)]
        # Indexed by the number of steps that remain for a second tree.
        self._max_draft_tokens = torch.tensor(
            [regular + second if options.fusion else second or regular for second in seconds],
            device=info.row_of.device,
        )

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        """Allocate, for each slot, the logits that are kept for a second tree."""
        super().allocate(max_requests, max_model_len)
        device = self._info.row_of.device
        # The last one is for the padding of graphs, with the slot -1.
        slots = max_requests + 1
        shape = slots, self._options.steps, len(self._info.row_of)
        self._logits = torch.zeros(
            shape if self._resamples else (slots, 0, 0), dtype=self._dtype, device=device
        )
        # The number of valid steps in them, and of the draft tokens accepted from their tree.
        self._steps = torch.zeros(slots, dtype=torch.int64, device=device)
        self._accepted = torch.zeros_like(self._steps)

    @property
    def steps(self) -> int:
        """Steps of the layer: the depth of the tree, if it is of its nodes alone."""
        return self._shape.depth

    @property
    def proposes_in_graphs(self) -> bool:
        """True without tables, which keep an account of a step on the host."""
        return self._shared is None

    def plan(self, slots: Tensor, drafted: int) -> TreeShape:
        """Choose the shape of the next trees, with `nodes=auto`."""
        return self._shape if self._budget is None else self._budget.choose(slots, drafted=drafted)

    def follow_plan(self, shape: TreeShape) -> None:
        """Propose trees of this shape, with `nodes=auto`."""
        self._shape = shape
        if self._shared is None:
            self.max_depth = shape.depth

    def max_draft_tokens(self, slots: Tensor) -> Tensor:
        """Maximum number of draft tokens of each request's next tree, `int64 [B]`."""
        if self.plans:
            return torch.full_like(slots, self._shape.nodes)
        remaining = (self._steps[slots] - 1 - self._accepted[slots]).clamp(min=0)
        return self._max_draft_tokens[remaining]

    def propose(self, slots: Tensor, roots: Tensor, logits: Tensor, steps: Tensor) -> DraftTree:
        """Draft the regular tree and, if steps remain after a rejection, the second one."""
        if self._shared is not None:
            return self._propose_shared(self._shared, slots, roots, logits, steps)
        options = self._options
        shape = self._shape
        regular = sample_tree(logits, steps, roots, self._info, shape.width, shape.nodes)
        if not self._resamples:
            return regular
        remaining, remaining_steps = self._remaining(slots, steps)
        second = sample_tree(
            remaining, remaining_steps, roots, self._info, options.width, options.resample_nodes
        )
        # A second tree that is verified alone uses up the kept logits.
        alone = (remaining_steps > 0) & (not options.fusion)
        self._steps[slots] = torch.where(alone, 0, steps)
        self._logits[slots] = torch.where(alone[:, None, None], self._logits[slots], logits)
        if options.fusion:
            return merge(regular, second, options.steps)
        return choose(alone, second, regular)

    def _remaining(self, slots: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """The logits for second trees `[B, L - 1, C]`, and their numbers of valid steps `[B]`."""
        remaining, remaining_steps = resample_logits(
            self._logits[slots], self._steps[slots], self._accepted[slots]
        )
        # A request without a regular tree gets no second one.
        unused = (remaining_steps <= self._options.resample_min_steps) | (steps == 0)
        return remaining, remaining_steps.masked_fill(unused, 0)

    def _propose_shared(
        self, shared: SharedTrees, slots: Tensor, roots: Tensor, logits: Tensor, steps: Tensor
    ) -> DraftTree:
        """Draft trees that are shared with the tables, as large as they would be without them."""
        width, depth = self._options.width, self._options.steps
        largest = self._shape.nodes if self.plans else None
        most = self.max_draft_tokens(slots).masked_fill(steps == 0, 0)
        own = candidates(expand_tree(logits, steps, roots, self._info, width))
        if self._resamples:
            second = expand_tree(*self._remaining(slots, steps), roots, self._info, width)
            own = united_steps(own, candidates(second), depth)
            self._steps[slots] = steps
            self._logits[slots] = logits
        return shared.choose(slots, own, most, largest)

    def on_verified(self, slots: Tensor, trees: DraftTree, verified: Verified) -> None:
        """Record the number of accepted tokens; a step without drafts discards the kept logits."""
        super().on_verified(slots, trees, verified)
        if not self._resamples:
            return
        self._accepted[slots] = (verified.num_emitted - 1).long()
        self._steps[slots] *= trees.tree_size > 1

    def release(self, slots: Sequence[int]) -> None:
        """Drop the logits of requests that finished."""
        super().release(slots)
        which = on_device(np.array(slots, np.int64), self._steps.device)
        self._steps.index_fill_(0, which, 0)

    def reset(self) -> None:
        """Drop the logits of all requests."""
        super().reset()
        self._steps.zero_()


class LyannaDrafter(LyannaTrees):
    """The complete drafter: the trained layer, and the trees from its logits.

    Args:
        options: The method's options.
        target: The target, whose files must be on this machine.

    Raises:
        ValueError: The folder `options.model` does not contain a drafter for this target, its
            drafter has learned only the first of several steps, or a device would have to be
            waited for in each of the layer's steps.
    """

    def __init__(self, options: LyannaOptions, target: Target) -> None:
        # Loads transformers, which the options alone do not need.
        from lyanna_plugin.checkpoint import load
        from lyanna_plugin.served_layer import ServedLayer

        assert target.embed is not None, "hidden-state drafters get the target's embeddings"
        options.check_device(target.device)
        module = load(Path(options.model), target.folder or Path(target.model))
        if target.device.type != "cpu" and module.self_attn.reads_positions:
            raise ValueError(
                f"the target {target.model} has rope_type={module.self_attn.rotary.rope_type!r} in "
                "its config.json: frequencies follow the longest position, which each step of "
                "Lyanna's layer would wait for on a GPU. Use Token Recycling, or serve on a CPU"
            )
        _check_steps(options, module.config.steps, target)
        module.to(target.device).requires_grad_(False)
        self._embed, self._token_info = target.embed, module.token_info
        layer = module.layer_config
        self._head: Head | None = None
        self._hot_head: HotHead | None = None
        if options.head == "hot":
            hot = module.token_info.hot_tokens
            _check_width(options, len(hot))
            self._hot_head = HotHead(hot, layer.hidden_size, target.dtype)
        dtype = torch.float8_e4m3fn if options.table == "float8" else target.dtype
        table = TokenTable.of(module.token_info, self._hot_embeddings(), dtype)
        if self._hot_head is not None:
            table = table.hot_alone()
        super().__init__(options, table, target.dtype)
        module.cast(target.dtype)
        self._layer = ServedLayer(module)
        self.heads = self._layer.heads
        self.share_tables(target)

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        """Allocate the state of the slots, and compute the layer's rotary table."""
        super().allocate(max_requests, max_model_len)
        self._layer.allocate(max_model_len + self._options.steps)

    def _hot_embeddings(self) -> Tensor:
        """The target's embeddings of the hot tokens, `float32 [H, d]`."""
        return self._embed(self._token_info.hot_tokens.long()).float()

    def on_new_weights(self) -> None:
        """Compute the table of token info and read the head again: CUDA graphs read them there."""
        with torch.inference_mode():
            if self._hot_head is not None and self._head is not None:
                self._hot_head.read(self._head)
            self._token_info.collapse_into(self._info.table, self._hot_embeddings())

    def read_head(self, head: Head) -> None:
        """Copy the hot tokens' part of the target's output head, if it is used.

        Raises:
            ValueError: The logits are not a product with the head alone.
        """
        if self._hot_head is None:
            return
        self._head = head
        try:
            with torch.inference_mode():
                self._hot_head.check(head)
                self._hot_head.read(head)
        except ValueError as error:
            raise ValueError(
                f"head=hot, the default, does not work with this target: {error}. Choose head=whole"
            ) from error

    def logits(self, states: Tensor, head: Head) -> Tensor:
        """Logits `[N, C]` of the layer's outputs; with `head=hot` those of the hot tokens."""
        if self._hot_head is not None:
            # The last column is that of all other tokens.
            return pad(self._hot_head.logits(states), (0, 1), value=-torch.inf)
        # Engines may compute the target's in float32, whatever its data type.
        return head(states).to(self._dtype)

    def fuse(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The layer's input `[N, d]` at accepted tokens."""
        return self._layer.fuse(hidden, self._embed(tokens))

    def between(self, states: Tensor) -> Tensor:
        """The layer's input `[N, d]` at the steps after the first."""
        return self._layer.between(states)

    def layer(
        self, x: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None
    ) -> Tensor:
        """One step of the layer: `[N, d]` at `positions [N]` to `[M, d]`, the output of `last`."""
        return self._layer(x, positions, attend, last)


def _check_width(options: LyannaOptions, hot: int) -> None:
    """Raise an error if a node has more children than there are tokens to draft."""
    if options.width > hot:
        raise ValueError(
            f"width={options.width}, but with head=hot, the default, only the {hot} frequent "
            f"tokens of model={options.model!r} are drafted: choose a width up to {hot}, or "
            "head=whole"
        )


def _check_steps(options: LyannaOptions, trained: int, target: Target) -> None:
    """Warn if more steps are to be drafted than were trained.

    Raises:
        ValueError: Only one was: there is no trained map to the second.
    """
    if options.steps <= trained:
        return
    if trained == 1:
        raise ValueError(
            f"steps={options.steps}, but model={options.model!r} was trained with one step: choose "
            "steps=1, or train a drafter with a larger --steps"
        )
    if target.group is None or is_drafting_rank(target.group):
        target.logger.warning(
            "steps=%d, but model=%r was trained with %d, so drafts of further steps are seldom "
            "accepted: choose steps=%d, or train a drafter with --steps %d",
            *(options.steps, options.model, trained, trained, options.steps),
        )
