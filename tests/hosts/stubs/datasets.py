"""In place of Hugging Face's `datasets`, which SGLang's test kits import for benchmarks."""

from __future__ import annotations

from typing import Any, NoReturn


def load_dataset(*arguments: Any, **options: Any) -> NoReturn:
    """There is no hub.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError("these tests load no data set from the hub")
