"""What a model-free drafter is told in a step on the V1 model runner: texts, and logits."""

from __future__ import annotations

from typing import Any

import torch

from drafttree.drafter import ModelFreeDrafter
from drafttree.tree import NO_TOKEN, DraftTree
from drafttree.vllm.model_inputs import text_without_placeholders
from drafttree.vllm.sampling import Observe
from drafttree.vllm.step import StepTrees


def start_text(runner: Any, drafter: ModelFreeDrafter, name: str, slot: int) -> None:
    """Report to a drafter that a request starts or restarts in `slot`."""
    batch = runner.input_batch
    row = batch.req_id_to_index[name]
    text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
    drafter.start(slot, text_without_placeholders(runner, text))


def observer(
    drafter: ModelFreeDrafter,
    slots: torch.Tensor,
    trees: StepTrees,
    drafts: DraftTree,
    tokens: torch.Tensor,
    partial: torch.Tensor | None,
) -> Observe:
    """What lets a drafter observe the logits of a step.

    Args:
        drafter: The drafter.
        slots: The slots of the step's requests, `int64 [B]`.
        trees: Layout of the step's trees.
        drafts: The trees.
        tokens: The token that each row's logits come after, `int32 [R]`; -1 for none.
        partial: The requests with a partial prefill, `bool [B]`; None if there are none.
    """
    roots_previous = drafter.previous_tokens(slots)
    if partial is not None:
        # The drafter's text of a partially prefilled prompt goes beyond the root.
        roots_previous = roots_previous.masked_fill(partial, NO_TOKEN)
    previous = trees.by_row(drafts.previous_tokens(roots_previous))
    of_rows = slots[trees.tensors.request_of_row] if trees.drafted else slots

    def observe(rows: slice, logits: torch.Tensor) -> torch.Tensor | None:
        return drafter.observe(of_rows[rows], tokens[rows], previous[rows], logits)

    return observe
