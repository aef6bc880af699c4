"""A processor of images for Qwen2.5-VL, whose own needs torchvision, which CPUs' environments lack.

Images are resized to whole tokens and cut in patches by the same code; there are no videos.
"""

from __future__ import annotations

from typing import Any

import torchvision_stubs

VARIABLE = "TESTS_QWEN_IMAGES"

ENVIRONMENT = {VARIABLE: "1"} | torchvision_stubs.ENVIRONMENT

SIZE = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
"""The fewest and the most pixels of an image."""


def enable() -> None:
    """Let this process's engine use it."""
    from tiny_families import IMAGE
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessorKwargs
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLProcessingInfo

    class Processor:
        valid_processor_kwargs = Qwen2_5_VLProcessorKwargs
        image_processor = Qwen2VLImageProcessorPil(size=SIZE)

        def __init__(self, tokenizer: Any) -> None:
            self.image_token, self.video_token = tokenizer.convert_ids_to_tokens([IMAGE, IMAGE - 1])

        def __call__(self, images: Any = None, **ignored: Any) -> Any:
            return self.image_processor(images=images, return_tensors="pt")

    def get_hf_processor(info: Any, **kwargs: Any) -> Processor:
        return Processor(info.get_tokenizer())

    Qwen2_5_VLProcessingInfo.get_hf_processor = get_hf_processor
    Qwen2_5_VLProcessingInfo.get_supported_mm_limits = lambda info: {"image": None}
