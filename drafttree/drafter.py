"""Base classes of drafters: what a method implements, and what a host engine calls.

There are three kinds. A `ModelFreeDrafter` drafts from tokens and target logits that it has seen; a
`DraftModelDrafter` samples trees from a draft model that the host runs; a `HiddenStateDrafter`
continues the target's hidden states with one layer whose KV the host stores. All three share the
vocabulary of `Drafter`. Drafters do not depend on an engine.

Shapes: B is the batch size, N the columns of a draft tree, V the vocabulary size, d the hidden
size. A slot is the index of a request's state: the host assigns it when the request starts, and it
stays the same until the request is released, whatever the request's row in the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafttree.ranks import Group
from drafttree.tree import DraftTree, Verified
from drafttree.tree_shape import TreeShape

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]`: attention over a layer's KV."""

DraftForward = Callable[[DraftTree, int], torch.Tensor]
"""`(trees, first) -> float32 [B, N - first, V]`: the draft model's next-token distributions after
the nodes from column `first` on, with the request's temperature and filters applied (without
filters for requests that are not sampled). The KV of earlier columns is cached; the KV of these
columns is written, in place of what was there. The result for the last columns of a complete tree
is not used."""

AcceptanceRule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(target float32 [B, V], nodes int32 [B]) -> tokens int32 [B]`: chooses the token after each node
from the target's distribution there. Called once per level, the roots' level first."""

PrimeForward = Callable[[int | None, torch.Tensor], torch.Tensor]
"""`(root, tokens int32 [n]) -> [n, V]`: the target's raw logits after `[root, t]` for each token t,
computed as one tree of depth 1 under the root; after `[t]` if the root is None. Cached prefixes
stay as they are."""


class TreeRule:
    """An acceptance rule that chooses from the target's distributions after all nodes of a tree.

    A host that can compute these beforehand calls `of_trees`. Where a distribution depends on the
    accepted path in a way that cannot be computed for other nodes, it calls the rule itself level
    by level, as an `AcceptanceRule`. Both must be lossless, and for no request may the choice
    between them depend on what is drawn in the step.
    """

    def __call__(self, target: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """Choose the token after one node of each tree, as an `AcceptanceRule`."""
        raise NotImplementedError

    def of_trees(self, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Choose all tokens of a step.

        Args:
            target: `float32 [R, V]`, contiguous: the target's distributions after all nodes,
                one-hot for requests that are not sampled. They may be overwritten.
            rows: `int64 [B, N]`, the row of each node of the trees, one of its own.

        Returns:
            `int32 [B, N]`: the tokens after the nodes of the accepted path, each of which but the
            last is that of a child; -1 for all other nodes.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Target:
    """A host's description of the target, from which a method makes its drafter.

    Attributes:
        model: Folder of the target in Hugging Face's layout, or the name under which the engine
            loaded it.
        vocab_size: Number of tokens of the target's logits.
        device: Device on which the target runs.
        dtype: Data type of the target's weights.
        logger: Logger below the engine's own, so that messages reach the engine's log.
        embed: `(int [N]) -> [N, d]`, the target's token embeddings; None unless the method's kind
            needs hidden states.
        bos: The token that texts begin with; None if there is none.
        folder: Folder of the target's files on this machine; None if it is not known.
        pads_trees: Whether a step verifies as many rows of each request as of the largest tree.
        late_steps: How many further steps the host proposes before it knows a step's outcome.
        sizes_trees: Whether the host chooses the number of draft tokens of each step, and announces
            it by `Drafter.limit_draft_tokens`. Trees should then hold their most probable nodes
            first.
        longest_chain: Greatest number of draft tokens where the host verifies chains alone: no
            node should have a second child, as only the path of first children is kept. None
            where it verifies trees.
        group: The ranks of tensor parallelism, each of which has a drafter of its own and verifies
            the first one's trees; None if there is one rank. Drafters with a model draft on all
            ranks at once: what may differ between them must come from the first one.
    """

    model: str
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    logger: logging.Logger
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    bos: int | None = None
    folder: Path | None = None
    pads_trees: bool = False
    late_steps: int = 0
    sizes_trees: bool = False
    longest_chain: int | None = None
    group: Group | None = None


class Drafter:
    """Base class of all kinds of drafter; every method here has a default.

    Attributes:
        max_depth: Greatest depth of a draft token; the root's depth is 0. It changes only if a
            drafter plans its trees.
        shares_texts: Whether what a request's text teaches may serve the requests after it.
        source: Where all its candidates come from, for `sources`.
    """

    max_depth: int
    shares_texts: bool = False
    source: str = "drafter"

    def allocate(self, max_requests: int, max_model_len: int) -> None:
        """Allocate per-request state; called once, before any other method.

        Args:
            max_requests: Number of slots.
            max_model_len: Greatest number of tokens of a request, prompt and output together.
        """

    def profile(self, measure_forward: Callable[[int], float], max_tokens: int) -> None:
        """Measure the target; called once at start-up, after `allocate`, before the first request.

        Nothing is measured unless the drafter calls `measure_forward`.

        Args:
            measure_forward: `measure_forward(n)` runs one target forward over n tokens and returns
                its latency in seconds.
            max_tokens: Greatest n that there is memory for.
        """

    def limit_draft_tokens(self, num_draft_tokens: int) -> None:
        """Called before `propose` by hosts that choose the number of draft tokens themselves.

        Args:
            num_draft_tokens: The host drops columns beyond that many draft tokens.
        """

    def expected_tokens(self, sizes: Sequence[int]) -> torch.Tensor | None:
        """What the trees proposed last are worth if they were cut to other sizes.

        Called after `propose` by hosts that choose the number of draft tokens themselves.

        Args:
            sizes: Numbers of draft tokens, ascending from 0.

        Returns:
            `float32 [B, S]`, the tokens that each request is expected to emit at each size, bonus
            token included; None if the drafter cannot tell.
        """
        return None

    def drafted(self, seconds: float, read_tokens: int = 0, read_seconds: float = 0.0) -> None:
        """Called between `propose` and `on_verified` by hosts in which a model drafts.

        Args:
            seconds: The host's time for the drafts; several calls of a step are to be added up.
            read_tokens: Tokens that the model had missed, and that it has read before.
            read_seconds: Further time, for reading them.
        """

    def on_verified(self, slots: torch.Tensor, trees: DraftTree, verified: Verified) -> None:
        """Called after each verification.

        The step that ends a prompt counts as one, with trees of roots alone, unless a model-free
        drafter gets its token through `extend`.

        Args:
            slots: `int64 [B]`, the requests' slots.
            trees: The trees as verified, which may be truncated against those proposed.
            verified: The outcome. Emitted tokens of -1 do not become part of the text.
        """

    def release(self, slots: Sequence[int]) -> None:
        """Requests finished, or were preempted: their state may be dropped."""

    def remember(self, tokens: torch.Tensor) -> None:
        """Learn texts that the target may repeat, such as the documents of a corpus.

        Args:
            tokens: Int32 `[n]` on the CPU, one text or several that are separated by -1.

        Raises:
            ValueError: The drafter remembers no texts.
        """
        raise ValueError(f"{type(self).__name__} remembers no texts")

    def step_bytes(self, requests: int) -> int:
        """Bytes that drafting for so many requests takes in a step, at most, beside the model's."""
        return 0

    def reset(self) -> None:
        """Forget everything learned, for instance because the target's weights changed."""

    def preserved(self) -> AbstractContextManager[None]:
        """A context in which the engine serves dummy requests and then calls `reset`.

        What was known before, such as tables from a file, must be known afterwards.
        """
        return nullcontext()

    def explain(self) -> list[dict[str, Any]]:
        """Explain how tree sizes were chosen: one row per case, ready for JSON."""
        return []

    def acceptance(self) -> dict[str, Any]:
        """How often drafts were accepted since the last reset, ready for JSON.

        `tried` counts draft tokens whose parent was accepted, `hit` those accepted themselves.

        Returns:
            For a static tree `{"paths", "tried", "hit"}`, lists with one entry per node, the root
            excluded. Otherwise `{"sources": [{"source", "tried", "hit", "share"}]}`, one row per
            candidate source. Empty if the drafter does not count.
        """
        return {}

    def sources(self, slots: torch.Tensor, width: int) -> list[list[str]]:
        """Name the candidate source of each node of the trees proposed last.

        Called only while steps are traced, after a verification and before `on_verified`.

        Args:
            slots: `int64 [B]`, the requests' slots.
            width: Number of columns to name, the root's included, whose name does not count.

        Returns:
            `width` names for each request, for the columns of the tree as it was proposed.
        """
        return [[self.source] * width for _ in slots]


class ModelFreeDrafter(Drafter):
    """Drafts from tokens and target logits it has seen, without a model of its own."""

    def prime(self, forward: PrimeForward, max_tokens: int, *, idle: bool) -> tuple[int, int]:
        """Compute beforehand what can be computed without a request.

        Called while no request is running: once at start-up, after `profile`, and then, with
        `idle`, again and again until nothing is left. Hosts that offer no such forwards never call
        it.

        Args:
            forward: Runs the target.
            max_tokens: Greatest number of tokens of one forward.
            idle: Whether a request may arrive meanwhile, which waits until this returns: about
                50 ms are short enough.

        Returns:
            How much is computed, and how much there is in all. They are equal if nothing is left.
        """
        return 0, 0

    def start(self, slot: int, text: Sequence[int]) -> None:
        """A request starts, or restarts after preemption, in `slot`.

        Args:
            text: All tokens of the request that are known so far.
        """

    def extend(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tokens were appended to the requests' texts without a verification.

        Args:
            slots: `int64 [B]`, the requests' slots.
            tokens: `int32 [B, E]`; -1 is padding.
        """

    def previous_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """The second-to-last token of each text, `int32 [B]`; -1 where it is not known.

        Only drafters whose `observe` uses `previous` need to override this.
        """
        return torch.full_like(slots, -1, dtype=torch.int32)

    def propose(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Draft one tree under each root.

        Args:
            slots: `int64 [B]`, the requests' slots.
            roots: `int32 [B]`, the texts' last tokens; -1 for requests that must not be drafted
                for. At least one is not -1.

        Returns:
            At most `num_draft_tokens` nodes per tree, as the method's options declare; hosts drop
            columns beyond that.
        """
        raise NotImplementedError

    def propose_candidates(
        self, slots: torch.Tensor, roots: torch.Tensor, bound: torch.Tensor
    ) -> tuple[DraftTree, torch.Tensor]:
        """Draft as `propose` does, with more candidates for requests that a grammar binds.

        Called in place of `propose` by hosts that drop the nodes which a grammar forbids before
        they verify a tree, and keep the most probable ones of the others.

        Args:
            slots: As in `propose`.
            roots: As in `propose`.
            bound: `int64 [G]`, the places of these requests among all; at least one.

        Returns:
            The trees, those of these requests from the most to the least probable node and with
            more nodes than are to be verified, if the drafter has them; and how many draft tokens
            of each of these requests are to be verified, `int32 [G]`.
        """
        trees = self.propose(slots, roots)
        return trees, trees.tree_size[bound] - 1

    def observe(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        previous: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor | None:
        """Learn from the target's raw logits, before any penalty, mask or temperature.

        A host may call it several times in a step, with some of its rows each time, in order.

        Args:
            slots: `int64 [R]`, the slot of each row's request.
            tokens: `int32 [R]`, the token that each row's logits come after; -1 to skip the row.
            previous: `int32 [R]`, the token before it; -1 where it is not known.
            logits: `[R, V]`.

        Returns:
            `int32 [R]`, the argmax of each row with ties broken towards the lowest id, if learning
            computes it anyway, which saves the host from reading the logits again; otherwise None.
        """
        return None


class ModelDrafter(Drafter):
    """Base class of drafters with a model of their own, which a host runs in a step.

    Attributes:
        tables: A model-free drafter whose candidates share the trees; None without one. Hosts
            call its `start`, `previous_tokens`, `observe` and `prime` as for its kind. All else
            this drafter passes on itself.
    """

    tables: ModelFreeDrafter | None = None

    @property
    def plans(self) -> bool:
        """Whether `plan` may choose smaller trees, and `max_depth` with them."""
        return False

    def propose_without_model(self, slots: torch.Tensor, roots: torch.Tensor) -> DraftTree:
        """Draft the trees of a step in which the model does not run; called only if `plans`.

        Args:
            slots: `int64 [B]`, the requests' slots.
            roots: `int32 [B]`, the texts' last tokens; -1 for requests that are not drafted for.

        Returns:
            The trees, in breadth-first order: roots alone, or what is known without the model.
        """
        return DraftTree.of_roots(roots)


class DraftModelDrafter(ModelDrafter):
    """Samples trees from a draft model that the host runs.

    Attributes:
        columns: Parent of each column of the largest tree that the model has a part in, level by
            level; -1 for the root. Each column of a proposed tree holds a node of the depth given
            here, or none. With `tables` only their number counts: there may be a node of any depth
            in each.
    """

    columns: tuple[int, ...]
    source = "draft model"

    def plan(self, slots: torch.Tensor, unread: Callable[[], int]) -> TreeShape:
        """Choose the shape of the next trees, for `follow_plan`; called only if `plans`.

        The choice may depend on earlier steps alone, so that it is not biased by what is drawn. Of
        several ranks only the first one chooses.

        Args:
            slots: `int64 [B]`, the requests' slots.
            unread: Counts the tokens that the draft model would have to read before it can draft.

        Returns:
            The shape; one without levels for `propose_without_model`.
        """
        raise NotImplementedError

    def follow_plan(self, shape: TreeShape) -> tuple[int, ...]:
        """Propose trees of a planned shape until the next call; called only if `plans`.

        Called if the model is to draft. Hosts that never call it are proposed the largest trees.

        Returns:
            Parent of each of their columns, as in `columns`.
        """
        raise NotImplementedError

    def propose(
        self,
        slots: torch.Tensor,
        roots: torch.Tensor,
        seeds: torch.Tensor,
        lengths: torch.Tensor,
        sampled: torch.Tensor,
        forward: DraftForward,
    ) -> tuple[DraftTree, Any]:
        """Draft one tree under each root.

        Args:
            slots: `int64 [B]`, the requests' slots.
            roots: `int32 [B]`, the texts' last tokens.
            seeds: `int64 [B]`, the seed of each request; a random one where the user gave none.
            lengths: Integers `[B]`, the number of tokens before each root.
            sampled: `bool [B]`; where it is false nothing is sampled, and the most likely tokens
                are drafted.
            forward: The draft model. It must be called for each column that is returned, the last
                level and the roots included, as it writes the KV of accepted tokens. With `tables`
                the last call reads all columns of the trees that are returned, but the roots.

        Returns:
            The trees, and whatever `acceptance_rule` needs about how they were sampled. A tree may
            have fewer columns than `columns`, down to the root alone.
        """
        raise NotImplementedError

    def acceptance_rule(
        self,
        trees: DraftTree,
        drawn: Any,
        requests: slice = slice(None),
        columns: torch.Tensor | None = None,
    ) -> AcceptanceRule | None:
        """The rule under which the output follows the target's distribution.

        Args:
            trees: The trees as verified, which may be truncated against those proposed, or cut to
                their paths of first children.
            drawn: The second value that `propose` returned.
            requests: Which of the requests given to `propose` the trees belong to.
            columns: `int64 [B, N]`, the column that each node has in the tree proposed; None if
                it is the same.

        Returns:
            None if the drafts were chosen deterministically: the host then samples each token from
            the target with its own sampler and accepts the drafts that match.
        """
        return None

    def undrafted_rule(
        self, roots: torch.Tensor, seeds: torch.Tensor, lengths: torch.Tensor
    ) -> AcceptanceRule | None:
        """The acceptance rule of a step in which the model drafts nothing.

        It is that of roots without drafts, such as the end of a prompt, and of trees that
        `propose_without_model` has proposed, whose nodes are chosen, not drawn.

        Args:
            roots: `int32 [B]`, the texts' last tokens; 0 where the host does not know them.
            seeds: `int64 [B]`, as in `propose`.
            lengths: Integers `[B]`, the number of tokens before each root.
        """
        return None


class HiddenStateDrafter(ModelDrafter):
    """Continues the target's hidden states with one layer, whose KV the host stores.

    On a GPU, hosts may capture `fuse`, `between` and `layer` in CUDA graphs when they start. So
    these are functions of their arguments alone, run the same kernels for all values, and read none
    on the host.

    Attributes:
        heads: The layer's query heads, KV heads and head size.
    """

    heads: tuple[int, int, int]
    source = "draft layer"

    @property
    def steps(self) -> int:
        """Steps of the layer, L. Trees are as deep, unless other candidates share them."""
        return self.max_depth

    @property
    def proposes_in_graphs(self) -> bool:
        """Whether hosts may capture `propose` too.

        Then the same holds for it, but for tensors that it reads and writes in place. A batch may
        be padded with requests of the slot -1, or 0 if that is no request's, which have no steps.
        """
        return False

    def plan(self, slots: torch.Tensor) -> TreeShape:
        """Choose the shape of the next trees, for `follow_plan`; called only if `plans`.

        The choice may depend on earlier steps alone, so that it is not biased by what is drawn. Of
        several ranks only the first one chooses.

        Args:
            slots: `int64 [B]`, the requests' slots.

        Returns:
            The shape; one without levels for `propose_without_model`.
        """
        raise NotImplementedError

    def follow_plan(self, shape: TreeShape) -> None:
        """Propose trees of a planned shape until the next call; called only if `plans`.

        Called before `max_draft_tokens`, if the layer is to draft. Hosts that never call it are
        proposed the largest trees.
        """
        raise NotImplementedError

    def fuse(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The layer's input `[N, d]` at known tokens.

        Args:
            hidden: `[N, d]`, the target's hidden states before the tokens.
            tokens: `int [N]`, the known tokens.
        """
        raise NotImplementedError

    def between(self, states: torch.Tensor) -> torch.Tensor:
        """The layer's input `[N, d]` at a draft step, from its previous output `[N, d]`."""
        return states

    def layer(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run the layer on `x [N, d]` at `positions [N]`; returns its output `[N, d]`."""
        raise NotImplementedError

    def max_draft_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """Greatest number of draft tokens of each request's next tree, `int64 [B]`."""
        raise NotImplementedError

    def propose(
        self, slots: torch.Tensor, roots: torch.Tensor, logits: torch.Tensor, steps: torch.Tensor
    ) -> DraftTree:
        """Draft one tree under each root.

        Args:
            slots: `int64 [B]`, the requests' slots.
            roots: `int32 [B]`, the texts' last tokens.
            logits: `[B, L, V]`, the target's output head applied to the layer's L steps.
            steps: `int64 [B]`, number of steps that are valid for each request; 0 for requests
                that must not be drafted for.
        """
        raise NotImplementedError
