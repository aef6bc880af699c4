"""Dynamic draft trees: a tree built best first for each request in each step.

Goes beyond the paper: candidates come from the adjacency matrix, from the bigram table and from
copies of what followed the same text earlier, in the request's own text or in a memory of finished
answers. A candidate is scored by how often candidates of the same source were accepted so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from tree_kernels.candidates import TOP
from tree_kernels.expansion import ExpandedTrees, columns_of, expand_trees
from tree_kernels.memory import append_texts
from tree_kernels.ngrams import previous_tokens, zeros
from tree_kernels.selection import best_nodes
from tree_kernels.source_stats import count

from drafttree.budget import NodeBudget, TreeChoice, candidate_sizes, measure_forwards
from drafttree.budget.planner import Planner
from drafttree.budget.scores import expected_tokens
from drafttree.drafter import ModelFreeDrafter, PrimeForward
from drafttree.transfer import on_device
from drafttree.tree import DraftTree, Verified
from recycle_plugin.chains import best_paths
from recycle_plugin.priors import DEPTH, tree_depth
from recycle_plugin.sources import by_source, source_name
from recycle_plugin.tables import Tables
from recycle_plugin.texts import Texts

PROMPT_TOKENS = 16
"""Tokens of a prompt that are remembered before its answer, so that an answer's beginning can be
matched too."""

_BATCH_SIZES = 16
"""How many batch sizes keep memory for their expanded trees."""

_CANDIDATES = 4
"""Candidates for each draft token to verify, where a grammar chooses among them."""

_UNTIMED_ON_CPU = 7
"""Draft tokens per request with `nodes=auto` on a CPU whose forwards were not measured."""

_UNTIMED_NODES = 512
"""Nodes of a step with `nodes=auto` on a GPU whose forwards were not measured: beyond them each
costs time on any GPU."""


def _of_requests(trees: ExpandedTrees, requests: torch.Tensor) -> ExpandedTrees:
    """Some of the expanded trees."""
    return ExpandedTrees(
        *(each[requests] for each in (trees.tokens, trees.parents, trees.sources, trees.scores))
    )


def level_width(num_draft_tokens: int) -> int:
    """Number of nodes to expand in each level so that a tree can have `num_draft_tokens`."""
    width = 2 * TOP
    while columns_of(width, DEPTH) <= num_draft_tokens:
        width *= 2
    return width


def candidate_columns(num_draft_tokens: int) -> int:
    """Number of columns of `DynamicTreeDrafter.candidates`."""
    spine = tree_depth(num_draft_tokens) - DEPTH
    return columns_of(level_width(num_draft_tokens), DEPTH, spine)


def untimed_draft_tokens(requests: int, device_type: str) -> int:
    """Most draft tokens per request with `nodes=auto` where no forward was measured.

    Args:
        requests: Batch size.
        device_type: Type of the device.
    """
    return _UNTIMED_ON_CPU if device_type == "cpu" else max(_UNTIMED_NODES // requests - 1, 0)


class DynamicTreeDrafter(ModelFreeDrafter):
    """Drafts the most probable nodes of a tree that is built under each root.

    Args:
        tables: The tables that candidates come from.
        num_draft_tokens: Draft tokens of each tree, excluding the root.
        auto: Whether a node budget chooses the draft tokens of each step, up to
            `num_draft_tokens`.
        private: Whether each request has its own tables.
        pads_trees: Whether a step verifies as many rows of each request as of the largest tree.
        late_steps: How many further steps the host proposes before it knows a step's outcome.
        by_score: Whether trees hold their most probable nodes first.
        chains: Whether only the best path of each tree is drafted.
    """

    def __init__(
        self,
        tables: Tables,
        num_draft_tokens: int,
        *,
        auto: bool,
        private: bool,
        pads_trees: bool = False,
        late_steps: int = 0,
        by_score: bool = False,
        chains: bool = False,
    ) -> None:
        self.tables = tables
        self._chains = chains
        self._by_score = by_score
        self._pads_trees = pads_trees
        self._late_steps = late_steps
        self._private = private
        self._num_draft_tokens = num_draft_tokens
        self._limit = num_draft_tokens
        self._auto = auto
        self._width = level_width(num_draft_tokens)
        self.max_depth = tree_depth(num_draft_tokens)
        self._spine = self.max_depth - DEPTH
        self._budget: NodeBudget | None = None
        self._scores: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The tables' device."""
        return self.tables.matrix.device

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        """Allocate the requests' texts and their n-gram indices."""
        device = self.device
        self.tables.allocate_own(max_requests, private=self._private)
        self._texts = Texts(max_requests, max_model_len, device)
        self._sources = zeros((max_requests, columns_of(self._width, DEPTH)), device)
        columns = candidate_columns(self._num_draft_tokens)
        # A step's trees are no longer needed when the next ones are expanded.
        self._expanded = lru_cache(maxsize=_BATCH_SIZES)(
            partial(ExpandedTrees.empty, columns=columns, device=device)
        )
        self._compile()

    def _compile(self) -> None:
        """Compile the kernels before the first request, by running them on an empty text."""
        slots = torch.zeros(1, dtype=torch.int64, device=self._sources.device)
        none = torch.full((1, 1), -1, dtype=torch.int32, device=self._sources.device)
        self.extend(slots, none)
        tokens, parents, sources, _ = best_nodes(
            self._expand(slots, none[0]), 0, by_score=self._by_score, into=(self._sources, slots)
        )
        count(self.tables.source_stats, tokens, parents, sources, none, slots)
        self._remember([0])

    def _expand(self, slots: torch.Tensor, roots: torch.Tensor) -> ExpandedTrees:
        tables = self.tables.candidates(self._texts.ngrams, roots.shape[0])
        into = self._expanded(roots.shape[0])
        expanded = expand_trees(tables, slots, roots, self._width, DEPTH, self._spine, into)
        return best_paths(expanded, self._num_draft_tokens) if self._chains else expanded

    def _remember(self, slots: Sequence[int]) -> None:
        """Append the answers in `slots` to the memory."""
        if self.tables.memory.capacity and slots:
            ngrams, starts = self._texts.ngrams, self._texts.starts
            which = on_device(np.array(slots, np.int64), starts.device)
            append_texts(
                self.tables.memory, ngrams.history, ngrams.lengths, which, starts, PROMPT_TOKENS
            )

    def check_remembers(self) -> None:
        """Check that there is a memory, and that it outlasts idle times.

        Raises:
            ValueError: Texts would not be kept.
        """
        if not self.tables.memory.capacity:
            raise ValueError(
                "Token Recycling remembers no texts with memory=0 or sharing='request': leave them "
                "out"
            )
        if not self.tables.hot_start:
            raise ValueError(
                "Token Recycling forgets texts when a request arrives while no other is running "
                "with hot_start=false: leave hot_start=false out"
            )

    def remember(self, tokens: torch.Tensor) -> None:
        """Append texts to the memory: int32 `[n]` on the CPU, separated by -1.

        Raises:
            ValueError: There is no memory that lasts.
        """
        self.check_remembers()
        self.tables.remember(tokens)
        self.tables.changed()

    def profile(self, measure_forward: Callable[[int], float], max_tokens: int) -> None:
        """With `auto`, measure forwards of up to `max_tokens` tokens and set up the node budget."""
        if self._auto:
            self._budget = NodeBudget.from_forwards(
                candidate_sizes(self._num_draft_tokens, self.device),
                measure_forwards(measure_forward, max_tokens),
                pads_trees=self._pads_trees,
                late=self._late_steps,
            )

    def plan_alone(self, forward_seconds: Mapping[int, float]) -> NodeBudget:
        """Set up the node budget for drafting alone now and then, in another drafter's steps.

        Args:
            forward_seconds: Seconds of a forward of the target by the number of its tokens.
        """
        planner = Planner(
            candidate_sizes(self._num_draft_tokens, self.device),
            forward_seconds,
            late=self._late_steps,
        )
        self._budget = NodeBudget(planner, pads_trees=self._pads_trees, late=self._late_steps)
        return self._budget

    def appraise(self, slots: torch.Tensor, candidates: ExpandedTrees) -> None:
        """Let the node budget know of candidates that are drafted together with others."""
        if self._budget is not None:
            self._budget.appraise(slots, candidates.scores)

    def prime(self, forward: PrimeForward, max_tokens: int, *, idle: bool) -> tuple[int, int]:
        """Compute rows of the adjacency matrix; see `storage.priming`."""
        return self.tables.prime(forward, max_tokens, idle=idle)

    def start(self, slot: int, text: Sequence[int]) -> None:
        """Start or restart the request in `slot` with its tokens so far."""
        if self._budget is not None:
            self._budget.discard()
        if self.tables.is_remembered(slot):
            self.release([slot])
        self.tables.begin(slot)
        self._texts.start(slot, text)

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append `tokens` (`int32 [B, E]`, padded with -1) to the requests' texts."""
        if self._budget is not None:
            # A part of a prompt was read, which may be another than the first.
            self._budget.discard()
        self._append(slots, tokens)

    def _append(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        self._texts.extend(slots, tokens)

    def previous_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """The token before the last token of each text, `int32 [B]`; -1 if there is none."""
        return previous_tokens(self._texts.ngrams, slots)

    def limit_draft_tokens(self, num_draft_tokens: int) -> None:
        """Build trees of at most that many draft tokens from now on."""
        self._limit = min(num_draft_tokens, self._num_draft_tokens)

    def candidates(self, slots: torch.Tensor, roots: torch.Tensor) -> ExpandedTrees:
        """All nodes under each root (`int32 [B]`, -1 for none), for callers that choose among them.

        They are valid until the next call. `chosen` must be called with the nodes that were chosen
        before these are verified.
        """
        return self._expand(slots, roots)

    def chosen(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Record the sources of the nodes that were chosen for each request's tree.

        Args:
            slots: The requests' slots, `int64 [B]`.
            sources: `int32 [B, N]`, those of `candidates`; 0 for roots and for nodes that
                are not from there.
        """
        self._sources[slots, : sources.shape[1]] = sources

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Build a tree under each root (`int32 [B]`): the request's last token, -1 for no tree."""
        expanded, choice = self._choose(slots, roots)
        if expanded is None:
            return DraftTree.of_roots(roots)
        return self._best(slots, expanded, choice)

    def _choose(
        self, slots: torch.Tensor, roots: torch.Tensor
    ) -> tuple[ExpandedTrees | None, TreeChoice]:
        """The expanded trees, and how much of them is drafted; None for nothing."""
        budget, num_draft_tokens = self._budget, self._limit
        if self._auto and budget is None:
            most = untimed_draft_tokens(len(roots), roots.device.type)
            num_draft_tokens = min(num_draft_tokens, most)
        choice = TreeChoice(num_draft_tokens)
        if budget is not None and budget.should_skip_drafting(slots):
            return None, TreeChoice(0)
        if self._auto and not num_draft_tokens:
            return None, choice
        expanded = self._expand(slots, roots)
        self._scores = expanded.scores if self._by_score else None
        if budget is not None:
            choice = budget.choose_best_first(slots, expanded.scores, num_draft_tokens)
            if not choice.drafts:
                return None, choice
        return expanded, choice

    def _best(
        self,
        slots: torch.Tensor,
        expanded: ExpandedTrees,
        choice: TreeChoice,
        *,
        by_score: bool = False,
    ) -> DraftTree:
        """The best nodes of expanded trees; their sources are kept until they are verified."""
        tokens, parents, _, tree_size = best_nodes(
            expanded,
            choice.num_draft_tokens,
            choice.spine,
            choice.min_score,
            by_score=by_score or self._by_score,
            into=(self._sources, slots),
        )
        return DraftTree(tokens, parents, tree_size)

    def propose_candidates(
        self, slots: torch.Tensor, roots: torch.Tensor, bound: torch.Tensor
    ) -> tuple[DraftTree, torch.Tensor]:
        """Draft as `propose` does, with more candidates for requests that a grammar binds."""
        expanded, choice = self._choose(slots, roots)
        if expanded is None:
            return DraftTree.of_roots(roots), torch.zeros_like(bound, dtype=torch.int32)
        trees = self._best(slots, expanded, choice)
        verified = trees.tree_size[bound] - 1
        most = min(self._sources.shape[1], expanded.tokens.shape[1]) - 1
        wanted = TreeChoice(min(_CANDIDATES * choice.num_draft_tokens + choice.spine, most))
        own = self._best(slots[bound], _of_requests(expanded, bound), wanted, by_score=True)
        missing = own.tokens.shape[1] - trees.tokens.shape[1]
        tokens, parents = (
            pad(each, (0, missing), value=-1) for each in (trees.tokens, trees.parents)
        )
        tokens[bound], parents[bound] = own.tokens, own.parents
        sizes = trees.tree_size.index_copy(0, bound, own.tree_size)
        return DraftTree(tokens, parents, sizes), verified

    def expected_tokens(self, sizes: Sequence[int]) -> torch.Tensor | None:
        """The sums of the best scores of the trees that were expanded last, `float32 [B, S]`."""
        if self._scores is None:
            return None
        return expected_tokens(self._scores[:, 1:], sizes)

    def observe(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        previous: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Write each row's top k tokens into the adjacency matrix and the bigram table."""
        return self.tables.learn(slots, tokens, previous, logits)

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Count acceptance by candidate source and append the emitted tokens to the texts."""
        if self._budget is not None:
            self._budget.verified(slots, trees, verified)
        if trees.drafted and not self._private:
            count(
                self.tables.source_stats,
                trees.tokens,
                trees.parents,
                self._sources,
                verified.path,
                slots,
            )
        self._append(slots, verified.emitted)

    def release(self, slots: Sequence[int]) -> None:
        """Release the requests' slots; the shared tables keep what they learned, and the memory
        their texts."""
        remembered = [slot for slot in slots if self.tables.is_remembered(slot)]
        self._remember(remembered)
        self.tables.end(slots)
        if remembered:
            self.tables.changed()

    def release_all(self) -> None:
        """Release all slots before the tables are saved for the last time: a host that takes no
        further step does not release the requests of the last one."""
        self.release(self.tables.remembered)

    def preserved(self) -> AbstractContextManager[None]:
        """A context after which the tables are as before."""
        return self.tables.preserved()

    def close(self) -> None:
        """Save what is not saved yet."""
        self.tables.close()

    def reset(self) -> None:
        """Forget everything learned; the step under way may last as long as new weights take."""
        self.tables.reset()
        if self._budget is not None:
            self._budget.discard()

    def explain(self) -> list[dict[str, Any]]:
        """With `auto`, predictions and measurements by size; see `StepReport.rows`."""
        return [] if self._budget is None else list(self._budget.explain())

    def acceptance(self) -> dict[str, Any]:
        """Acceptance statistics by candidate source, since the tables were last emptied."""
        return {"sources": by_source(self.tables.source_stats)}

    def sources(self, slots: torch.Tensor, width: int) -> list[list[str]]:
        """The source of each node, named as by `acceptance`."""
        return [[*map(source_name, row)] for row in self._sources[slots, :width].tolist()]
