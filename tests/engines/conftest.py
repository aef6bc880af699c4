"""Models and checks that the tests of the real engines share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import HOSTS, Host
from tiny_families import make_tiny_family
from tiny_models import make_tiny_adapter, make_tiny_llama, merge_adapter

HERE = Path(__file__).parent

ABSENT = [engine for engine in ("vllm", "sglang") if importlib.util.find_spec(engine) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for engine in ABSENT:
            if item.path.parent == HERE and item.path.name.startswith(f"test_{engine}_"):
                item.add_marker(pytest.mark.skip(reason=f"{engine} is not installed here"))


@pytest.fixture(scope="session", params=HOSTS, ids=lambda host: host.name)
def host(request: pytest.FixtureRequest) -> Host:
    """Each engine of this environment."""
    if not request.param.installed:
        pytest.skip(f"{request.param.name} is not installed here")
    assert isinstance(request.param, Host)
    return request.param


@pytest.fixture(scope="session")
def without_trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of a family without trees, which is made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_family(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with 512 tokens."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def first_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the tiny Llama."""
    return make_tiny_adapter(tmp_path_factory.mktemp("first"), 8, 5)


@pytest.fixture(scope="session")
def merged(tiny_llama: Path, first_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tiny Llama is with that adapter."""
    return merge_adapter(tiny_llama, first_adapter, tmp_path_factory.mktemp("merged"))


@pytest.fixture(scope="session")
def memorised(tiny_llama: Path, merged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lyanna's drafter for the tiny Llama, which knows the answers that the adapter gives."""
    from overfitted_drafter import make_overfitted_to_adapter

    return make_overfitted_to_adapter(tiny_llama, merged, tmp_path_factory.mktemp("memorised"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct."""
    from drafttree.bench.models import ensure

    return ensure("smollm2-135m")


@pytest.fixture(scope="session")
def proves_drafting() -> Callable[[Any], None]:
    """Checks that a case accepted drafts, that a tree was needed for it, and that KV rows moved."""

    def check(answer: Any) -> None:
        assert answer.counters["accepted_tokens"] > 0
        assert answer.counters["non_first_child_accepted"] > 0
        assert answer.counters["kv_rows_moved"] > 0

    return check
