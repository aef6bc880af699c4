"""Where SGLang verifies chains of draft tokens in place of trees, and how long they may be.

The state of a recurrent layer follows one text alone. SGLang keeps it for each draft token of a
chain, and goes on from the one of the last token that was accepted.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import sglang

from drafttree.chains import ANNOUNCEMENT, LONGEST, LONGEST_RECURRENT, Chains
from drafttree.compatibility import is_in_chains
from drafttree.method import Method
from drafttree.sglang.target_config import (
    recurrent_config,
    target_config,
    uses_latent_attention,
)
from drafttree.sglang.versions import TESTED, is_tested

# A child of SGLang's logger: other loggers are not printed.
logger = logging.getLogger(f"sglang.{__name__}")


RECURRENT_DEVICES = ("cuda",)
"""Devices on which SGLang drops drafts from recurrent states; on a CPU it has no code for that."""

ROLLS_BACK = (
    "FalconH1Config",
    "GraniteMoeHybridConfig",
    "Lfm2Config",
    "Lfm2MoeConfig",
    "NemotronHConfig",
    "Qwen3NextConfig",
)
"""SGLang's configurations of models whose layers keep a state for each token of a chain: Mamba 2,
short convolutions and Gated DeltaNet."""


def choose_chains(method: Method[Any], server_args: Any) -> Chains | None:
    """The chains that a server verifies; None if it verifies trees.

    Args:
        method: The requested method.
        server_args: SGLang's arguments, which `check_server` has accepted.

    Raises:
        ValueError: This SGLang cannot verify drafts with the model's recurrent layers.
    """
    model = target_config(server_args)
    config = recurrent_config(model)
    recurrent = config is not None
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
    if recurrent:
        _check_recurrent_layers(method, server_args, type(config).__name__)
    return Chains(" and ".join(reasons), LONGEST_RECURRENT if recurrent else LONGEST)


def _check_recurrent_layers(method: Method[Any], server_args: Any, config: str) -> None:
    which = (
        f"{method.title} does not work with --model-path={server_args.model_path}, a hybrid with "
        "recurrent layers"
    )
    if server_args.device not in RECURRENT_DEVICES:
        raise ValueError(
            f"{which}, and --device={server_args.device}: leave --speculative-algorithm out. On "
            "this device SGLang cannot drop drafts from the layers' states"
        )
    if config not in ROLLS_BACK or not is_tested(sglang.__version__):
        raise ValueError(
            f"{which} ({config}), and SGLang {sglang.__version__}: leave --speculative-algorithm "
            f"out. Drafts are dropped from the states of {', '.join(ROLLS_BACK)} in {TESTED}"
        )


def drafts_chains(settings: Any) -> bool:
    """Whether chains were chosen for a server, by SGLang's own settings.

    To SGLang a chain is a tree in which each node has one child. drafttree's trees have more.

    Args:
        settings: SGLang's settings of speculation, as its processes read them.
    """
    return bool(settings.speculative_eagle_topk == 1)


@functools.cache
def announce(title: str, reason: str, num_draft_tokens: int) -> None:
    """Log, once in a process, that there are chains in place of trees."""
    logger.warning(ANNOUNCEMENT, title, num_draft_tokens, reason)
