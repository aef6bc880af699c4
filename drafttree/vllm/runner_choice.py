"""Which of vLLM's two model runners serves draft trees: V1, or V2 if it is asked for.

vLLM itself chooses V1 for the custom proposer that drafttree requests there. With V2 drafttree
requests a method that V2 knows. So the choice is made before vLLM's, when the engine's arguments
become a configuration, and the worker checks that vLLM has made the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drafttree.vllm.versions import serves_v2, window_v2

if TYPE_CHECKING:
    from drafttree.method import Method

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable: 1 for V2, 0 for V1. Where it is not set, draft trees are served by V1."""


def is_v2_requested() -> bool:
    """Whether the user asks for vLLM's V2 model runner."""
    from vllm import envs

    return bool(getattr(envs, VARIABLE, None))


def check_v2(method: Method[Any]) -> None:
    """Refuse a method that cannot be served with V2 here.

    Raises:
        ValueError: The message names the variable, and the fix.
    """
    import vllm
    from vllm.triton_utils import HAS_TRITON

    if method.kind.vllm.runs_v2 is None:
        reason = f"{method.title} is served by the V1 model runner only"
    elif not serves_v2(vllm.__version__):
        reason = (
            f"draft trees work with the V2 model runner of vLLM {window_v2()}, not with that of "
            f"{vllm.__version__}"
        )
    elif not HAS_TRITON:
        reason = "the V2 model runner needs Triton, which this build of vLLM does not have"
    else:
        return
    raise ValueError(f"{VARIABLE}=1: {reason}: unset it")
