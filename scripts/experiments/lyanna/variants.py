"""Variants of Lyanna's draft model for ablations; none of them is served.

Each variant has its own architecture in `config.json`, from which `load_variant` finds the class.
Hosts refuse these architectures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lyanna_plugin.checkpoint import load
from lyanna_plugin.model import LyannaConfig, LyannaModel
from lyanna_plugin.token_info import TokenInfo


class ZeroTokenInfo(TokenInfo):
    """Token info that adds nothing to any logit, and is not trained."""

    def __init__(self, hidden_size: int, rank: int, hot_tokens: Tensor, vocab_size: int) -> None:
        super().__init__(hidden_size, rank, hot_tokens, vocab_size)
        self.requires_grad_(False)

    def codes(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Zeros, `[N, rank]`."""
        return embedded.new_zeros(len(tokens), self.w1.shape[1])


class WithoutTokenInfo(LyannaModel):
    """Lyanna without token info: after the root, drafting does not depend on tokens."""

    architecture = "LyannaWithoutTokenInfo"

    def __init__(self, layer: Any, config: LyannaConfig, hot_tokens: Tensor) -> None:
        super().__init__(layer, config, hot_tokens)
        self.token_info = ZeroTokenInfo(
            layer.hidden_size, config.token_info_rank, hot_tokens, layer.vocab_size
        )


class WithoutFirstToken(LyannaModel):
    """Lyanna without the root's embedding in the fusion."""

    architecture = "LyannaWithoutFirstToken"

    def fusion_input(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Hidden states and zeros, `[..., 2 d]`."""
        return super().fusion_input(hidden, embedded.new_zeros(embedded.shape))


class EagleStyle(WithoutTokenInfo):
    """EAGLE with the same layer: every token is fed back, and there is no token info."""

    architecture = "LyannaEagleStyle"

    def __init__(self, layer: Any, config: LyannaConfig, hot_tokens: Tensor) -> None:
        super().__init__(layer, config, hot_tokens)
        self.between = nn.Identity()

    def step_input(self, states: Tensor, embedded: Tensor) -> Tensor:
        """The states fused with the embeddings of the tokens that they predict."""
        return self.fuse(states, embedded)


VARIANTS: dict[str, tuple[type[LyannaModel], dict[str, Any]]] = {
    "lyanna": (LyannaModel, {}),
    "no-token-info": (WithoutTokenInfo, {}),
    "no-first-token": (WithoutFirstToken, {}),
    "dense-token-info": (LyannaModel, {"num_hot_tokens": 49_152}),
    "eagle": (EagleStyle, {}),
}
"""The class of each variant, and the fields of its configuration that differ from the defaults."""


def load_variant(folder: Path, target: Path) -> LyannaModel:
    """Load a drafter of any variant.

    Raises:
        ValueError: The drafter was trained for another target, or is damaged.
    """
    classes = {model.architecture: model for model, _ in VARIANTS.values()}
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    return load(folder, target, classes[architecture])
