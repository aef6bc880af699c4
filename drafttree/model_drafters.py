"""Base classes of drafters with a model of their own, which a host runs in a step.

Shapes and slots are those of `drafttree.drafter`; Hq and Hkv are numbers of heads, D their size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drafttree.acceptance_rules import AcceptanceRule
from drafttree.drafter import Drafter, ModelFreeDrafter
from drafttree.tree import DraftTree
from drafttree.tree_shape import TreeShape

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(q [M, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [M, Hq, D]`: attention over a layer's KV.

The keys and values of N rows are written first; M of these rows attend."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""`[N, d] -> [N, V]`: a model's logits of its last hidden states."""

DraftForward = Callable[[DraftTree, int], torch.Tensor]
"""`(trees, first) -> float32 [B, N - first, V]`: the draft model's next-token distributions after
the nodes from column `first` on, with the request's temperature and filters applied (without
filters for requests that are not sampled). The KV of earlier columns is cached; the KV of these
columns is written, in place of what was there. The result for the last columns of a complete tree
is not used."""


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

    def read_head(self, head: Head, width: int, dtype: torch.dtype) -> None:
        """Read what `logits` needs of the draft model's output head; called when it is loaded.

        Args:
            head: As in `logits`.
            width: Size of the model's hidden states, d.
            dtype: Their data type.

        Raises:
            ValueError: The options do not fit the head.
        """

    def logits(self, states: torch.Tensor, head: Head) -> torch.Tensor:
        """Logits of the draft model, from which hosts make the distributions of `DraftForward`.

        On a GPU, hosts may capture this function in CUDA graphs.

        Args:
            states: `[N, d]`, the model's last hidden states.
            head: Its output head, from `[N, d]` to `[N, V]`.

        Returns:
            `[N, V]`, finite where the head's are; very negative for tokens that are not drafted.
        """
        return head(states)

    def plan(self, slots: torch.Tensor, drafted: int, unread: Callable[[], int]) -> TreeShape:
        """Choose the shape of the next trees, for `follow_plan`; called only if `plans`.

        The choice may depend on earlier steps alone, so that it is not biased by what is drawn. Of
        several ranks only the first one chooses.

        Args:
            slots: `int64 [B]`, the requests' slots.
            drafted: How many of the requests are drafted for.
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
        """Whether hosts may capture `propose` too, where they do not plan.

        Then the same holds for it, but for tensors that it reads and writes in place. A batch may
        be padded with requests of the slot -1, or 0 if that is no request's, which have no steps.
        """
        return False

    def plan(self, slots: torch.Tensor, drafted: int) -> TreeShape:
        """Choose the shape of the next trees, for `follow_plan`; called only if `plans`.

        The choice may depend on earlier steps alone, so that it is not biased by what is drawn. Of
        several ranks only the first one chooses.

        Args:
            slots: `int64 [B]`, the requests' slots.
            drafted: How many of the requests are drafted for.

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

    def layer(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            x: Its input, `[N, d]`.
            positions: Positions of the rows, `[N]`.
            attend: Attention, to be called once with the keys and values of all rows.
            last: `int64 [M]`, the rows whose output is needed; only their queries are given to
                `attend`. None for all.

        Returns:
            The output of these rows, `[M, d]`.
        """
        raise NotImplementedError

    def read_head(self, head: Head) -> None:
        """Read what `logits` needs of the target's output head; called when the target is loaded.

        Args:
            head: As in `logits`. It may be kept, for `on_new_weights`.
        """

    def logits(self, states: torch.Tensor, head: Head) -> torch.Tensor:
        """Logits of the layer's outputs, for `propose`.

        Args:
            states: `[N, d]`, outputs of the layer.
            head: The target's output head, from `[N, d]` to `[N, V]`.

        Returns:
            `[N, C]`: one for each token, C = V, or as `propose` takes them.
        """
        return head(states)

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
            logits: `[B, L, C]`, the result of `logits` for the layer's L steps.
            steps: `int64 [B]`, number of steps that are valid for each request; 0 for requests
                that must not be drafted for.
        """
        raise NotImplementedError
