"""Tiny random multimodal models that take images, with processors made from code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_families import IMAGE, IMAGE_BEYOND, make_tiny_family
from tiny_models import add_byte_tokenizer

SIDE = 56
"""Pixels of the side of an image."""


def make_tiny_llava(folder: Path) -> Path:
    """Save a random LLaVA with a processor; an image has 16 tokens."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    _rename(make_tiny_family("llava", folder) / "model.safetensors")
    tokenizer = _tokenizer(folder, "<image>")
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE_BEYOND
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def _rename(file: Path) -> None:
    """Give the vision tower's weights the names that published models have."""
    from safetensors.torch import load_file, save_file

    tower, inner = "vision_tower.", "vision_tower.vision_model."
    renamed = {
        name if name.startswith(inner) else name.replace(tower, inner): weight
        for name, weight in load_file(file).items()
        if not name.startswith("vision_tower.head")  # which pools an image; no model here does
    }
    save_file(renamed, file, {"format": "pt"})


def make_tiny_qwen(folder: Path) -> Path:
    """Save a random Qwen2.5-VL with a tokenizer; `qwen_images` has its processor."""
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    special = {IMAGE - place: name for place, name in enumerate(names)}
    return add_byte_tokenizer(make_tiny_family("qwen2_5_vl", folder), special=special)


def make_tiny_gemma(folder: Path) -> Path:
    """Save a random Gemma 3 that sees, with a processor; an image has 4 tokens."""
    from transformers import AutoTokenizer, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    make_tiny_family("gemma3_vision", folder, embedding=2.0)
    _rename(folder / "model.safetensors")
    # SGLang loads no head of this family, but takes the embedding in its place.
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"tie_word_embeddings": True}
    config["text_config"]["tie_word_embeddings"] = True
    file.write_text(json.dumps(config))
    names = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    special = {IMAGE - place: name for place, name in enumerate(names.values())}
    tokenizer = AutoTokenizer.from_pretrained(
        add_byte_tokenizer(folder, special=special), extra_special_tokens=names
    )
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    return folder


def _tokenizer(folder: Path, *special: str) -> Any:
    """Give a model a tokenizer with special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(add_byte_tokenizer(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    return tokenizer


def random_image(seed: int) -> Any:
    """An image of random pixels, whose size varies too; the same seed gives the same image."""
    import numpy as np
    from PIL import Image

    shape = SIDE + 28 * (seed % 2), SIDE + 28 * (seed % 3), 3
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))
