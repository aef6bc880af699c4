"""Base classes of drafters: what a method implements, and what a host engine calls.

There are three kinds. A `ModelFreeDrafter` drafts from tokens and target logits that it has seen; a
`DraftModelDrafter` samples trees from a draft model that the host runs; a `HiddenStateDrafter`
continues the target's hidden states with one layer whose KV the host stores. The last two are in
`drafttree.model_drafters`. All three share the vocabulary of `Drafter`. Drafters do not depend on
an engine.

Shapes: B is the batch size, N the columns of a draft tree, V the vocabulary size, d the hidden
size. A slot is the index of a request's state: the host assigns it when the request starts, and it
stays the same until the request is released, whatever the request's row in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from drafttree.tree import DraftTree, Verified

PrimeForward = Callable[[int | None, torch.Tensor], torch.Tensor]
"""`(root, tokens int32 [n]) -> [n, V]`: the target's raw logits after `[root, t]` for each token t,
computed as one tree of depth 1 under the root; after `[t]` if the root is None. Cached prefixes
stay as they are."""


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
        """Called before `propose` by hosts that may verify fewer draft tokens than were asked for.

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

    def check_remembers(self) -> None:
        """Check that `remember` learns texts, and that they are kept for the requests that follow.

        Raises:
            ValueError: Texts would not be kept; the message says what to change.
        """
        raise ValueError(f"{type(self).__name__} remembers no texts")

    def remember(self, tokens: torch.Tensor) -> None:
        """Learn texts that the target may repeat, such as the documents of a corpus.

        Args:
            tokens: Int32 `[n]` on the CPU, one text or several that are separated by -1.

        Raises:
            ValueError: The drafter remembers no texts; see `check_remembers`.
        """
        self.check_remembers()

    def step_bytes(self, requests: int) -> int:
        """Bytes that drafting for so many requests takes in a step, at most, beside the model's."""
        return 0

    def on_new_weights(self) -> None:
        """The target's weights changed: compute again what was computed from them.

        CUDA graphs may read it, so it is written where it was. Hosts call `reset` too.
        """

    def reset(self) -> None:
        """Forget everything learned, for instance because the target's weights changed."""

    def close(self) -> None:
        """Called last, if an engine ends before its process does."""

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
