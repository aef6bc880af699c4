"""A processor of images for Qwen2.5-VL, whose own needs torchvision, which CPUs' environments lack.

Images are resized to whole tokens and cut in patches by the same code; there are no videos.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torchvision_stubs

VARIABLE = "TESTS_QWEN_IMAGES"

ENVIRONMENT = {VARIABLE: "1"} | torchvision_stubs.ENVIRONMENT

SIZE = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
"""The fewest and the most pixels of an image."""


def enable(engine: str) -> None:
    """Let this process's engine use it."""
    if engine == "vllm":
        _enable_in_vllm()
    else:
        _enable_in_sglang()


def _enable_in_vllm() -> None:
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


def _enable_in_sglang() -> None:
    """The front end alone reads images; the engine's other processes have no processor."""
    import torch
    from sglang.srt.managers import tokenizer_manager
    from transformers import AutoTokenizer

    # SGLang looks for these kernels, which need AMX, when it imports other models with the same
    # processor.
    for kernel in (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ):
        setattr(torch.ops.sgl_kernel, kernel, None)

    def get_processor(folder: str, **kwargs: Any) -> _SGLangProcessor:
        return _SGLangProcessor(AutoTokenizer.from_pretrained(folder))

    tokenizer_manager.get_processor = get_processor


class _SGLangProcessor:
    """What SGLang calls of a processor."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.tokenizer = tokenizer
        self.image_processor = Qwen2VLImageProcessorPil(size=SIZE)

    def __call__(self, text: list[str], images: list[Any], **ignored: Any) -> dict[str, Any]:
        """Tokens, in which each image has as many places as it takes, and the images' patches."""
        import torch
        from tiny_families import IMAGE

        made = self.image_processor(images=images, return_tensors="pt")
        counts = iter(made["image_grid_thw"].prod(1).tolist())
        ids = []
        for token in self.tokenizer(text[0])["input_ids"]:
            ids += [token] * (next(counts) // self._merged if token == IMAGE else 1)
        return {"input_ids": torch.tensor([ids]), **made}

    def _get_num_multimodal_tokens(self, image_sizes: list[tuple[int, int]]) -> SimpleNamespace:
        patches = [
            self.image_processor.get_number_of_image_patches(*size, {}) for size in image_sizes
        ]
        return SimpleNamespace(num_image_tokens=[each // self._merged for each in patches])

    @property
    def _merged(self) -> int:
        """Patches of one token."""
        return int(self.image_processor.merge_size**2)
