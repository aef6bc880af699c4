"""The end of a turn in a session, to which vLLM's scheduler appends the next prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SessionTurns:
    """Mixin listed before one of vLLM's schedulers.

    A step may accept drafts behind a token that ends the answer. The scheduler drops them, but
    counts them as computed, and would keep as many tokens of the answer too many for the next turn.
    """

    def _handle_stopped_request(self, request: Request) -> bool:
        """As the engine's, for which all tokens but the last are computed."""
        # Placeholders are tokens of steps that run already; the engine subtracts them itself.
        computed = request.num_tokens - 1 + request.num_output_placeholders
        request.num_computed_tokens = min(request.num_computed_tokens, computed)
        stock: Any = super()
        finished: bool = stock._handle_stopped_request(request)
        return finished
