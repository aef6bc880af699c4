"""The target that most tests of Lyanna share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random target."""
    return make_tiny_llama(tmp_path_factory.mktemp("target"))
