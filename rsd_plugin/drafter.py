"""The RSD drafter (arXiv 2402.14160, section 3): samples a tree from a draft model without
replacement, and provides the acceptance rule for it.

With tables, nodes of Token Recycling's stand in the trees too. Those of requests that are sampled
begin with the whole tree that the draft model gave, as choosing among tokens that were drawn would
change the distribution of the output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from tree_kernels.gumbel_top import BYTES_BEYOND, MOST

from drafttree.budget import TreeShape
from drafttree.budget.draft_times import ReadTimes
from drafttree.hot_head import HotHead
from drafttree.model_drafters import DraftForward, DraftModelDrafter, Head
from drafttree.ranks import Group
from drafttree.tree import DraftTree
from drafttree.tree_union import Candidates
from recycle_plugin.shared_trees import RankTables
from recycle_plugin.sharing import SharingDrafter
from rsd_plugin.config import RsdOptions, Shape
from rsd_plugin.noise import StepNoise
from rsd_plugin.rules import RecursiveRejection, Traversal
from rsd_plugin.sampling import Level, beam, branch

_LOGGER = logging.getLogger(__name__)

_NOT_DRAFTED = -1e20
"""Logit of tokens that are never drafted. It is finite, so that requests which allow no other token
still have a distribution."""


@dataclass(frozen=True)
class Drawn:
    """How the trees of one step were sampled, for the acceptance rule.

    Attributes:
        probs: `float32 [B, I, V]`, the distributions from which the children of each inner node
            were sampled; zeros where nothing was sampled.
        noise: The random numbers of the step.
        most_children: The greatest number of sampled children of a node in each level.
        columns: `int64 [B, N]`, the column that each node of the trees had when it was sampled, -1
            for nodes that were not; None if it is the same.
    """

    probs: Tensor
    noise: StepNoise
    most_children: tuple[int, ...] = ()
    columns: Tensor | None = None


class RsdDrafter(SharingDrafter, DraftModelDrafter):
    """Samples trees from a draft model: of one shape, or of one that is chosen for each step.

    The shape of a step is fixed before anything is drawn in it, see `budget.shape_planner`, so
    that each step is RSD with the widths of that shape.

    Args:
        options: The method's options.
        vocab_size: Vocabulary size of the draft model and the target.
        hot: `int64 [H]`, the tokens that are drafted, on the models' device; None for all.
        logger: Logger of the host.
    """

    _options: RsdOptions

    def __init__(
        self,
        options: RsdOptions,
        vocab_size: int,
        hot: Tensor | None = None,
        logger: logging.Logger = _LOGGER,
    ) -> None:
        self._options = options
        self._shape = options.shape
        self._vocab_size = vocab_size
        self.max_depth = len(self._shape.widths)
        self.columns = _columns(self._shape.widths)
        self._read_times = ReadTimes()
        self._max_children = max(self._shape.factors or self._shape.widths)
        self._traverses = options.verify == "traversal"
        self._hot = hot
        self._hot_head: HotHead | None = None
        self._logger = logger

    def read_head(self, head: Head, width: int, dtype: torch.dtype) -> None:
        """Copy the hot tokens' part of the draft model's output head, if it is used.

        Raises:
            ValueError: The logits are not a product with the head alone.
        """
        if self._hot is None:
            return
        hot_head = HotHead(self._hot, width, dtype)
        with torch.inference_mode():
            try:
                hot_head.check(head)
            except ValueError as error:
                raise ValueError(
                    f"head={self._options.head} does not work with "
                    f"model={self._options.model!r}: {error}. Choose head=whole"
                ) from error
            hot_head.read(head)
        self._hot_head = hot_head
        self._logger.info(
            "RSD drafts the %d most frequent of %d tokens", len(self._hot), self._vocab_size
        )

    def logits(self, states: Tensor, head: Head) -> Tensor:
        """Logits `[N, V]` of the draft model's states `[N, d]`."""
        if self._hot_head is None:
            return head(states)
        hot = self._hot_head.logits(states).float()
        logits = hot.new_full((len(states), self._vocab_size), _NOT_DRAFTED)
        return logits.index_copy_(1, self._hot_head.tokens, hot)

    def share_trees(self, tables: RankTables, group: Group | None = None) -> None:
        """Let the candidates of Token Recycling's tables share the trees; called before `allocate`.

        Args:
            tables: Its drafter, with the options `of_tables`.
            group: The tensor-parallel ranks; None if there is one.
        """
        super().share_trees(tables, group)
        options = self._options
        self.columns = self._shared_columns(
            options.shapes[-1].nodes if options.auto else options.num_draft_tokens
        )

    def _shared_columns(self, nodes: int) -> tuple[int, ...]:
        """Propose trees of so many draft tokens, those of tables included."""
        self._num_draft_tokens = nodes
        return (-1, *[0] * nodes)

    def plan(self, slots: Tensor, drafted: int, unread: Callable[[], int]) -> TreeShape:
        """Choose the shape of the next trees, with `tree=auto`."""
        if self._budget is None:
            return self._options.shapes[-1]
        return self._budget.choose(slots, lambda: self._read_times.usual(unread()), drafted=drafted)

    def follow_plan(self, shape: TreeShape) -> tuple[int, ...]:
        """Propose trees of this shape, with `tree=auto`."""
        self._shape = Shape((shape.width,) * shape.depth, None)
        if self._shared is not None:
            return self._shared_columns(shape.nodes)
        return _columns(self._shape.widths)

    def drafted(self, seconds: float, read_tokens: int = 0, read_seconds: float = 0.0) -> None:
        """Note the times of a step's drafts."""
        super().drafted(seconds, read_tokens, read_seconds)
        self._read_times.add(read_tokens, read_seconds)

    def step_bytes(self, requests: int) -> int:
        """Bytes of the distributions from which the largest trees are sampled.

        Those of the inner nodes are kept until the trees are verified, and exist twice while they
        are put together. Those of one level are made from its logits, and many children of a node
        are found by sorting them.
        """
        shape = self._options.shape
        levels = (1, *shape.widths[:-1])
        drawn = max(
            nodes * (8 + (BYTES_BEYOND if count > MOST else 0))
            for nodes, count in zip(levels, shape.factors or shape.widths, strict=True)
        )
        return requests * self._vocab_size * (8 * sum(levels) + drawn)

    def propose(
        self,
        slots: Tensor,
        roots: Tensor,
        seeds: Tensor,
        lengths: Tensor,
        sampled: Tensor,
        forward: DraftForward,
    ) -> tuple[DraftTree, Drawn]:
        """Sample one tree under each root.

        If sampling filters leave fewer tokens than a node has children, the last columns of the
        level are empty.
        """
        levels = self.levels(slots, roots, seeds, lengths, sampled)
        request = next(levels)
        while True:
            try:
                request = levels.send(forward(*request))
            except StopIteration as done:
                return cast("tuple[DraftTree, Drawn]", done.value)

    def levels(
        self,
        slots: Tensor,
        roots: Tensor,
        seeds: Tensor,
        lengths: Tensor,
        sampled: Tensor,
    ) -> Generator[tuple[DraftTree, int], Tensor, tuple[DraftTree, Drawn]]:
        """Sample as `propose` does, but let the caller run the draft model.

        Yields:
            The arguments of each forward; its result must be sent back.
        """
        noise = StepNoise(seeds, lengths)
        level, first = Level.root(roots), 0
        trees = DraftTree.of_roots(roots)
        all_probs: list[Tensor] = []
        most_children: list[int] = []
        chances: list[Tensor] = []
        for depth, width in enumerate(self._shape.widths):
            probs = yield trees, first
            all_probs.append(probs)
            above, factors = level, self._shape.factors
            children = noise.children(probs, sampled, factors[depth] if factors else width)
            most_children.append(children.tokens.shape[2])
            level = branch(level, children) if factors else beam(level, children, width, sampled)
            if self._shared is not None:
                chances.append(level.chances(above))
            parents = (first + level.parents).int().masked_fill(level.tokens < 0, -1)
            first = trees.tokens.shape[1]
            trees = _append_level(trees, level.tokens, parents)
        columns = None
        if self._shared is not None:
            own = Candidates(trees.tokens, trees.parents, pad(torch.cat(chances, 1), (1, 0)))
            trees, columns = self._shared.choose_first(slots, own, sampled, self._num_draft_tokens)
            # The KV of nodes must be in the columns in which they are verified.
            first = 1
        # This forward writes the KV of the leaves, which may be accepted.
        yield trees, first
        probs = torch.cat(all_probs, 1).masked_fill_(~sampled[:, None, None], 0.0)
        return trees, Drawn(probs, noise, tuple(most_children), columns)

    def acceptance_rule(
        self,
        trees: DraftTree,
        drawn: Drawn,
        requests: slice = slice(None),
        columns: Tensor | None = None,
    ) -> RecursiveRejection | Traversal:
        """The rule that the options ask for, for trees that were sampled by `propose`."""
        probs, coins = drawn.probs[requests], self._coins(drawn.noise)[requests]
        if drawn.columns is not None:
            assert columns is None, "hosts that move nodes to other columns serve no tables"
            columns = _as_wide(drawn.columns[requests], trees.tokens.shape[1])
        most = drawn.most_children
        if not self._traverses:
            return RecursiveRejection(trees, probs, coins, most, columns)
        node_coins = self._node_coins(drawn.noise)[requests]
        return Traversal(trees, probs, coins, node_coins, most, columns)

    def undrafted_rule(self, roots: Tensor, seeds: Tensor, lengths: Tensor) -> RecursiveRejection:
        """Plain sampling from the target, with the requests' own random numbers.

        Whichever nodes are below, a token that is drawn may be theirs.
        """
        trees = DraftTree.of_roots(roots)
        probs = torch.zeros(len(roots), 0, self._vocab_size, device=roots.device)
        coins = self._coins(StepNoise(seeds, lengths))
        return RecursiveRejection(trees, probs, coins, ())

    def _coins(self, noise: StepNoise) -> Tensor:
        # The number of coins does not depend on the draft, so a seed gives the same tokens with and
        # without a draft.
        return noise.uniform(self.max_depth + 1, self._max_children + 1)

    def _node_coins(self, noise: StepNoise) -> Tensor:
        # A root without a draft gets its token from the same coin as in `_coins`.
        last = self._max_children
        flat = noise.uniform(max(last + 1, len(self.columns)))
        return torch.cat([flat[:, last:], flat[:, :last]], 1)


def _columns(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Parent of each column of trees with these levels: the first node of the level above."""
    above = (1, *widths)
    starts = [sum(above[:level]) for level in range(len(above))]
    return (-1, *(starts[level] for level, width in enumerate(widths) for _ in range(width)))


def _as_wide(columns: Tensor, width: int) -> Tensor:
    """`Drawn.columns` for trees of another width: cut, or padded."""
    return pad(columns, (0, max(width - columns.shape[1], 0)), value=-1)[:, :width]


def _append_level(trees: DraftTree, tokens: Tensor, parents: Tensor) -> DraftTree:
    """Append a level to the trees."""
    all_tokens = torch.cat([trees.tokens, tokens], 1)
    tree_size = torch.full_like(all_tokens[:, 0], all_tokens.shape[1])
    return DraftTree(all_tokens, torch.cat([trees.parents, parents], 1), tree_size)
