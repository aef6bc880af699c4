"""Data types of SGLang's KV cache."""

from __future__ import annotations

from typing import Any

from drafttree.sglang.target_config import target_config

PLAIN_KV = ("auto", "bf16", "bfloat16")
"""Those of 16 bits, or the model's own."""

FP8_KV = ("fp8_e4m3", "fp8_e5m2")


def kv_cache_dtype(server_args: Any) -> str:
    """The data type of the KV cache, which the checkpoint may choose; "auto" for the model's own.

    Checkpoints of ModelOpt choose it in their configuration from Hugging Face.
    """
    dtype: str = server_args.kv_cache_dtype
    if dtype != "auto":
        return dtype
    quantised = getattr(target_config(server_args).hf_config, "quantization_config", None) or {}
    within = quantised.get("quantization") or {}
    chosen = quantised.get("kv_cache_quant_algo") or within.get("kv_cache_quant_algo")
    return FP8_KV[0] if str(chosen).upper() == "FP8" else dtype
