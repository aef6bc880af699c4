"""Where SGLang verifies chains of draft tokens in place of trees, and how long they may be.

The state of a recurrent layer follows one text alone. SGLang keeps it for each draft token of a
chain, and goes on from the one of the last token that was accepted.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from drafttree.chains import ANNOUNCEMENT, LONGEST, LONGEST_RECURRENT, Chains
from drafttree.compatibility import is_in_chains
from drafttree.method import Method
from drafttree.sglang.target_config import (
    recurrent_config,
    target_config,
    uses_latent_attention,
)

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")


def choose_chains(method: Method[Any], server_args: Any) -> Chains | None:
    """The chains that a server verifies; None if it verifies trees.

    Args:
        method: The requested method.
        server_args: SGLang's arguments, which `check_server` has accepted.
    """
    model = target_config(server_args)
    recurrent = recurrent_config(model) is not None
    reasons = [
        f"the model {trait}"
        for feature, found, trait in (
            ("latent-attention", uses_latent_attention(model), "uses latent attention (MLA)"),
            ("recurrent-layers", recurrent, "is a hybrid with recurrent layers"),
        )
        if found and is_in_chains("sglang", method.kind.name, feature)
    ]
    if not reasons:
        return None
    return Chains(" and ".join(reasons), LONGEST_RECURRENT if recurrent else LONGEST)


def drafts_chains(settings: Any) -> bool:
    """Whether chains were chosen for a server, by SGLang's own settings.

    To SGLang a chain is a tree in which each node has one child. drafttree's trees have more.

    Args:
        settings: SGLang's arguments, once `TreeAlgorithm.handle_server_args` has set them.
    """
    return bool(settings.speculative_eagle_topk == 1)


@functools.cache
def announce(title: str, reason: str, num_draft_tokens: int) -> None:
    """Log, once in a process, that there are chains in place of trees."""
    logger.warning(ANNOUNCEMENT, title, num_draft_tokens, reason)
