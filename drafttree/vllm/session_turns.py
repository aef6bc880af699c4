"""Sessions whose prompts come one after another, which vLLM's scheduler appends to the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

# A child of vLLM's logger: other loggers are not printed.
logger = init_logger(f"vllm.{__name__}")


class SessionTurns:
    """Mixin listed before one of vLLM's schedulers.

    A step may accept drafts behind a token that ends the answer. The scheduler drops them, but
    counts them as computed, and would keep as many tokens of the answer too many for the next turn.

    Recurrent layers keep a state for each draft token. After a step with drafts the engine would
    read the next turn from a state before the last token's, so sessions are not drafted for there.
    """

    has_mamba_layers: bool
    requests: dict[str, Request]

    def _handle_stopped_request(self, request: Request) -> bool:
        """As the engine's, for which all tokens but the last are computed."""
        # Placeholders are tokens of steps that run already; the engine subtracts them itself.
        computed = request.num_tokens - 1 + request.num_output_placeholders
        request.num_computed_tokens = min(request.num_computed_tokens, computed)
        stock: Any = super()
        finished: bool = stock._handle_stopped_request(request)
        return finished

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """As the engine's, but sessions of models with recurrent layers get no drafts."""
        stock: Any = super()
        stock.update_draft_token_ids(draft_token_ids)
        # Versions before 0.32, which serve no such models, do not have it.
        if not getattr(self, "has_mamba_layers", False):
            return
        for name in draft_token_ids.req_ids:
            request = self.requests.get(name)
            if request is not None and request.resumable and request.spec_token_ids:
                request.spec_token_ids = []
                logger.warning_once(
                    "Sessions are served without drafts, as the model has recurrent layers"
                )
