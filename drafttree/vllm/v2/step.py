"""The trees of one step of the V2 model runner, as the batch holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tree_kernels.mask import depths, tree_mask

from drafttree.tree import DraftTree
from drafttree.vllm.step_masks import StepMasks

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from drafttree.vllm.v2.kept_trees import KeptTrees

NO_TOKEN = -1


@dataclass(frozen=True)
class Step:
    """The trees of a step: R rows of the batch have logits, for B requests of up to N columns.

    Attributes:
        sizes: Number of each request's rows among the R, `int32 [B]`.
        begun: Whether the root is a token that was sampled, `bool [B]`. If it belongs to a prompt,
            the engine's draft tokens behind it are placeholders, and there is no tree.
        parents: Column of each node's parent, `int32 [B, N]`; -1 where there is no node.
        request_of_row: `int64 [R]`.
        row_of_node: `int64 [B, N]`; padding repeats a request's last row.
        real: Whether a column is a node, `bool [B, N]`.
    """

    sizes: torch.Tensor
    begun: torch.Tensor
    parents: torch.Tensor
    request_of_row: torch.Tensor
    row_of_node: torch.Tensor
    real: torch.Tensor

    @classmethod
    def of(cls, batch: InputBatch, kept: KeptTrees, prefill_lens: torch.Tensor) -> Step:
        """The trees of a batch; the host waits for nothing.

        Args:
            batch: The engine's batch.
            kept: The trees that were drafted.
            prefill_lens: Number of tokens of each request's prompt, by row of the engine's state.
        """
        rows, ends = batch.idx_mapping, batch.cu_num_logits
        sizes = ends[1:] - ends[:-1]
        begun = batch.seq_lens[: batch.num_reqs] - sizes >= prefill_lens[rows]
        # The host knows how many drafts each request has, as it has scheduled them.
        counts = batch.num_draft_tokens_per_req
        width = 1 if counts is None else 1 + int(counts.max())
        parents = kept.of(rows, torch.where(begun, sizes, 1), width)
        columns = torch.arange(width, device=rows.device)
        return cls(
            sizes=sizes,
            begun=begun,
            parents=parents.contiguous(),
            request_of_row=torch.repeat_interleave(
                torch.arange(batch.num_reqs, device=rows.device),
                sizes.long(),
                output_size=len(batch.logits_indices),
            ),
            row_of_node=ends[:-1, None].long() + torch.minimum(columns, sizes[:, None].long() - 1),
            real=(columns == 0) | (parents >= 0),
        )

    @property
    def width(self) -> int:
        """Number of columns N."""
        return self.parents.shape[1]

    def by_row(self, nodes: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Gather values of nodes, `[B, N]`, into `[R]`; `columns [R]` are the rows' columns."""
        return nodes[self.request_of_row, columns.long()]

    def trees(self, tokens: torch.Tensor) -> DraftTree:
        """The batch's trees, given the input token of each row, `int [R]`."""
        nodes = tokens[self.row_of_node].int().masked_fill(~self.real, NO_TOKEN)
        return DraftTree(nodes, self.parents, self.sizes)

    def move_positions(self, batch: InputBatch) -> None:
        """Replace the positions of a chain by those of the trees: the root's and the depth."""
        columns = batch.expanded_local_pos
        depth = self.by_row(depths(self.parents, self.sizes), columns)
        # In place: graphs and the sampler read this buffer.
        batch.positions.index_add_(0, batch.logits_indices, (depth - columns).long())

    def masks(self) -> StepMasks:
        """Attention masks of the trees. A column without a node sees the context and itself."""
        return StepMasks(
            requests=torch.arange(len(self.sizes), device=self.sizes.device),
            tree_sizes=self.sizes.long(),
            masks=tree_mask(self.parents, self.sizes),
        )
