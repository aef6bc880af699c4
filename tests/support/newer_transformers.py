"""Lets older versions of SGLang run with the transformers of the tested one, which is newer."""

from __future__ import annotations

from typing import Any

VARIABLE = "TESTS_NEWER_TRANSFORMERS"

ENVIRONMENT = {VARIABLE: "1"}


def enable() -> None:
    """Let these versions name configurations that transformers has by now."""
    from transformers import AutoConfig
    from transformers.utils import import_utils

    # They import the stub for torchvision first, which transformers would take for the package.
    import_utils.is_torchvision_available()
    register = AutoConfig.register

    def replace(model_type: str, config: Any, exist_ok: bool = True) -> None:
        register(model_type, config, exist_ok=True)

    AutoConfig.register = replace
