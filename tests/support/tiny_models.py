"""Tiny random Llamas for tests, with logits scaled up so that some drafts are accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def make_tiny_adapter(
    folder: Path, rank: int = 8, seed: int = 5, *, vocabulary: bool = False
) -> Path:
    """Save a random LoRA adapter for `make_tiny_llama`'s model, strong enough to change answers.

    It adapts two projections of each layer and, with `vocabulary`, the embeddings and the head too.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    size, tokens, outputs = 128, 512, {"q_proj": 128, "v_proj": 64}
    shapes = {}
    for layer in range(2):
        for name, output in outputs.items():
            prefix = f"model.layers.{layer}.self_attn.{name}"
            shapes[f"{prefix}.lora_A.weight"] = rank, size
            shapes[f"{prefix}.lora_B.weight"] = output, rank
    modules = [*outputs]
    if vocabulary:
        shapes["model.embed_tokens.lora_embedding_A"] = rank, tokens
        shapes["model.embed_tokens.lora_embedding_B"] = size, rank
        shapes["lm_head.lora_A.weight"] = rank, size
        shapes["lm_head.lora_B.weight"] = tokens, rank
        modules += ["embed_tokens", "lm_head"]
    weights = {
        f"base_model.model.{name}": torch.randn(shape, generator=generator) / 2
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge_adapter(model: Path, adapter: Path, folder: Path) -> Path:
    """Save the model that another one is with a LoRA adapter."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    config = json.loads((adapter / "adapter_config.json").read_text())
    parts = load_file(adapter / "adapter_model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(model)
    weights = merged.state_dict()
    for name, second in parts.items():
        if "lora_B" in name:
            first = parts[name.replace("lora_B", "lora_A")]
            adapted = name.removeprefix("base_model.model.").replace(".lora_B", "")
            weights[adapted] += config["lora_alpha"] / config["r"] * second @ first
    merged.save_pretrained(folder)
    return folder


def make_first_layers(model: Path, folder: Path, layers: int) -> Path:
    """Save a model that has the first layers of another, with its embeddings and its head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    AutoModelForCausalLM.from_pretrained(model, config=config).save_pretrained(folder)
    for file in model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
"""What the configurations of tiny models share."""


def make_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 512,
    sharpness: float = 12.0,
    heads: int = 4,
    head_size: int = 32,
    seed: int = 11,
) -> Path:
    """Save a random two-layer Llama; the same arguments give the same weights.

    `sharpness` scales the output head: at 1 the next token is nearly uniform. The embedding is
    scaled too, so that the next token depends on the last one about as much as on all before it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            num_attention_heads=heads,
            **{**SHAPE, "head_dim": head_size},
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


def make_tiny_chat_llama(folder: Path) -> Path:
    """Save a random Llama with the tokenizer and the chat template of SmolLM2."""
    from drafttree.bench.models import ensure

    model = ensure("smollm2-135m")
    make_tiny_llama(folder, vocab_size=49_152)
    for file in [*model.glob("*token*"), *model.glob("*.jinja")]:
        shutil.copy(file, folder)
    return folder


def add_byte_tokenizer(
    folder: Path,
    vocab_size: int = 512,
    special: dict[int, str] | None = None,
    merges: Sequence[tuple[str, str]] = (),
) -> Path:
    """Give a tiny model a tokenizer: beginning, end, one token for each byte, and unused tokens.

    Args:
        folder: The model's folder.
        vocab_size: Number of tokens.
        special: Names of some of the unused tokens.
        merges: Pairs of tokens that are joined to one, the last of the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    named = special or {}
    unused = range(len(names), vocab_size - len(merges))
    names += [named.get(number, f"<unused{number}>") for number in unused]
    names += ["".join(pair) for pair in merges]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.add_tokens([*named.values()], special_tokens=True)
    fast.save_pretrained(folder)
    return folder
