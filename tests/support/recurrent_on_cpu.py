"""Short convolutions in SGLang on a CPU, with its Triton kernels in Triton's interpreter.

SGLang's own code for CPUs has kernels of its own for them, which are on no package index, and it
refuses to drop drafts from their states.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

VARIABLE = "TESTS_RECURRENT_ON_CPU"

ENVIRONMENT = {VARIABLE: "1", "TRITON_INTERPRET": "1"}


def enable() -> None:
    """Let this process's engine run recurrent layers and drop drafts from their states."""
    _name_kernels()
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    from drafttree.sglang.chains import choice

    choice.RECURRENT_DEVICES = ("cuda", "cpu")
    # The engine's own function for states on other devices.
    move = HybridLinearAttnBackend._scatter_speculative_state_with_mask
    scatter.fused_mamba_state_scatter_with_mask = move
    scatter.fused_conv_window_scatter_with_mask = move


def _name_kernels() -> None:
    """Name the engine's kernels for CPUs, which it imports but does not call for these models."""
    import sgl_kernel
    import torch

    class Kernels(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(sgl_kernel, name)

    sys.modules["sgl_kernel.mamba"] = Kernels("sgl_kernel.mamba")
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        library.define(f"{name}() -> ()")
    globals()["_library"] = library  # it must stay
