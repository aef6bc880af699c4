"""M-RoPE positions of draft trees on vLLM's V2 model runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.mm.rope import RopeState

from drafttree.patches import check_first_parameters
from drafttree.vllm import patches
from drafttree.vllm.model_inputs import rope_state
from drafttree.vllm.versions import unknown


class TreeRope(RopeState):
    """The engine's state of M-RoPE positions, which it lays out along a chain in each step.

    It does so after the step's attention has been prepared, in the buffer that its graphs read.
    """

    _offsets: torch.Tensor | None = None

    def move(self, offsets: torch.Tensor) -> None:
        """Move the positions of the step that is prepared next.

        Args:
            offsets: From a chain's positions to those of the trees, `int64 [tokens]`. Drafts are
                text, along which all dimensions advance together.

        Raises:
            RuntimeError: The last step's positions have not been laid out.
        """
        if self._offsets is not None:
            raise unknown("it lays out M-RoPE positions before it prepares attention")
        self._offsets = offsets

    def prepare_positions(self, *args: Any, **kwargs: Any) -> None:
        """Lay out a step: along a chain, and then by depth."""
        super().prepare_positions(*args, **kwargs)
        offsets, self._offsets = self._offsets, None
        if offsets is not None:
            self.positions[:, : len(offsets)] += offsets


def adopt_rope(runner: Any) -> TreeRope | None:
    """Let a runner that has loaded its model move M-RoPE positions; None for models without them.

    Raises:
        RuntimeError: The engine lays them out in another way.
    """
    state = rope_state(runner)
    if state is None:
        return None
    parameters = "self idx_mapping query_start_loc prefill_lens num_computed_tokens"
    name, function = "RopeState.prepare_positions", RopeState.prepare_positions
    check_first_parameters(name, function, parameters.split(), unknown)
    return patches.adopt(state, RopeState, TreeRope)
