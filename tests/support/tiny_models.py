"""Tiny random Llamas for tests, their logits sharpened so that drafts are accepted now and then."""

from __future__ import annotations

from pathlib import Path


def make_tiny_llama(folder: Path, *, vocab_size: int = 512, sharpness: float = 12.0) -> Path:
    """Save a random two-layer Llama; the same arguments give the same weights.

    `sharpness` scales the output head: at 1 the next token is nearly uniform. The embedding is
    scaled too, so that the last token says about as much of the next one as all before it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight *= 3
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight *= 8
        model.lm_head.weight *= sharpness
    model.save_pretrained(folder)
    return folder
