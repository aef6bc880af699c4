"""What `config.json` of a drafter's folder holds beside the configuration of its layer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

ARCHITECTURE = "LyannaDrafter"
KEY = "lyanna"


class DrafterConfig(BaseModel):
    """How a drafter is built.

    Attributes:
        target: the name of the target's folder.
        fingerprint: of the target's weights.
        steps: that were unrolled in training.
        token_info_rank: of the token info's low-rank form.
        num_hot_tokens: tokens with rows and columns in the token info.
        embedding_scale: what embeddings are multiplied with before they are fused.
        between: whether a linear map stands before the steps after the first (beyond the paper).
        output_norm: whether an RMSNorm stands behind the layer (beyond the paper).
        token_info: whether there is token info; without it the drafter sees no token but the root.
        first_token: whether the root's embedding is fused.
        feeds_tokens: EAGLE's way instead: every step fuses the token before it. For comparison.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    fingerprint: str
    steps: int = Field(3, ge=1)
    token_info_rank: int = Field(128, ge=1)
    num_hot_tokens: int = Field(8192, ge=1)
    embedding_scale: float = 1.0
    between: bool = True
    output_norm: bool = True
    token_info: bool = True
    first_token: bool = True
    feeds_tokens: bool = False
