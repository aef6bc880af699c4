"""Tiny random multimodal models that take images, with processors made from code."""

from __future__ import annotations

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
    }
    save_file(renamed, file, {"format": "pt"})


def make_tiny_qwen(folder: Path) -> Path:
    """Save a random Qwen2.5-VL with a tokenizer; `qwen_images` has its processor."""
    make_tiny_family("qwen2_5_vl", folder)
    _tokenizer(folder, f"<unused{IMAGE}>", f"<unused{IMAGE - 1}>").save_pretrained(folder)
    return folder


def _tokenizer(folder: Path, *special: str) -> Any:
    """Give a model a tokenizer with special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(add_byte_tokenizer(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    return tokenizer


def random_image(seed: int, height: int = SIDE, width: int = SIDE) -> Any:
    """An image of random pixels; the same seed gives the same image."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)
