"""Gated DeltaNet layers (arXiv 2412.06464) on a CPU: the convolution before chains of any length.

vLLM's own code for a CPU keeps the convolution's inputs so that the last one is at the end of its
buffer, but reads them from the beginning. That is the same if each step has as many rows of a
request as there are columns for drafts, as with a draft model. Here a step may have fewer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import conv1d, silu


def convolve(
    rows: torch.Tensor,
    starts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    *,
    activated: bool,
) -> torch.Tensor:
    """Convolve the rows of a step, and keep what the next step's convolution reads.

    Args:
        rows: The rows of all requests, `[R, d]`.
        starts: Where the rows of each request start, and the end of the last, `int [B + 1]`.
        weight: `[d, W]`.
        bias: `[d]`, or None.
        state: `[slots, d, n]`, n at least W - 2 and the rows of a request: a request's inputs, the
            oldest first. Column a - 1 is the first that matters if a rows were accepted.
        slots: Slot of each request in `state`, `int [B]`.
        accepted: Rows of each request that were accepted in its last step, `int [B]`.
        activated: Whether SiLU follows.

    Returns:
        `[R, d]`.
    """
    width = weight.shape[1]
    wide = weight[:, None].float()
    wide_bias = None if bias is None else bias.float()
    out = torch.empty_like(rows)
    bounds = starts.tolist()
    for request, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        first, end = bounds[request : request + 2]
        own = state[slot]
        before = own[:, count - 1 : count + width - 2]
        inputs = torch.cat((before, rows[first:end].T.to(own.dtype)), 1)
        result = conv1d(inputs[None].float(), wide, wide_bias, groups=len(weight))[0]
        out[first:end] = (silu(result) if activated else result).T.to(out.dtype)
        own[:, : inputs.shape[1] - 1] = inputs[:, 1:]
    return out


def spec_forward(
    layer: Any,
    metadata: Any,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_buf: torch.Tensor,
    ssm_state: torch.Tensor,
    width: int,
    state_len: int,
) -> torch.Tensor:
    """Replaces the engine's function for the rows of requests that decode; same parameters."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    count = metadata.num_spec_decodes
    starts = metadata.spec_query_start_loc[: count + 1]
    slots = metadata.spec_state_indices_tensor[:count]
    accepted = metadata.num_accepted_tokens[:count]
    mixed_qkv = convolve(
        mixed_qkv,
        starts,
        gdn_attention._unpacked_conv_weight(layer),
        layer.conv1d.bias,
        conv_buf,
        slots[:, 0],
        accepted,
        activated=layer.activation == "silu",
    )
    query, key, value = (each.squeeze(0) for each in layer.rearrange_mixed_qkv(mixed_qkv))
    result: torch.Tensor = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query,
        k=key,
        v=value,
        a=a,
        b=b,
        initial_state_source=ssm_state,
        spec_state_indices=slots.int().contiguous(),
        num_accepted_tokens=accepted.int().contiguous(),
        cu_seqlens=starts.int().contiguous(),
        use_qk_l2norm_in_kernel=True,
    )
    return result
