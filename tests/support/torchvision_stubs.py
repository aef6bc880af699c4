"""Lets vLLM load models whose processors need torchvision, which environments for CPUs lack."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "TESTS_TORCHVISION_STUBS"

ENVIRONMENT = {VARIABLE: "1"}

FOLDER = Path(__file__).parent / "torchvision_stub"


def enable() -> None:
    """Put an empty module in its place, unless it is there, here and in vLLM's subprocesses."""
    if find_spec("torchvision") is None:
        _choose_pillow()
        sys.path.append(str(FOLDER))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (os.environ.get("PYTHONPATH"), str(FOLDER)))
        )


def _choose_pillow() -> None:
    """Let processors of images do without it; this is looked up once."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
