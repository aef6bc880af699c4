"""The custom proposer that vLLM builds for drafttree methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class HostProposer:
    """Satisfies the engine's interface for custom proposers; the model runner drafts itself."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        pass

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Called by the engine; there is nothing to load."""

    def propose(self, *args: object, **kwargs: object) -> list[list[int]]:
        """Never called: `TreeModelRunner` overrides `propose_draft_token_ids`, its only caller."""
        raise NotImplementedError("draft trees are proposed by TreeModelRunner")
