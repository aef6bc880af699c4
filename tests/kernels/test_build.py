"""Which of the libraries that a wheel ships is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tree_kernels import _build


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A kernel with a library for each instruction set; the libraries are never loaded here."""
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    folder = tmp_path / _build.SHIPPED
    folder.mkdir()
    for instructions in _build.INSTRUCTION_SETS:
        (folder / _build.shipped_name(source, instructions)).write_bytes(b"")
    return source


def with_flags(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str]) -> None:
    monkeypatch.setattr(_build, "processor_flags", lambda: flags)


@pytest.mark.parametrize(
    "instructions", _build.INSTRUCTION_SETS, ids=lambda instructions: instructions.march
)
def test_the_best_instruction_set_of_the_processor_is_chosen(
    instructions: _build.InstructionSet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_flags(monkeypatch, instructions.flags | {"fpu", "amx_tile"})
    library = _build.shipped_library(source)
    assert library is not None
    assert library.name == _build.shipped_name(source, instructions)


@pytest.mark.parametrize("missing", sorted(_build.INSTRUCTION_SETS[-1].flags))
def test_no_library_is_loaded_that_needs_a_missing_instruction(
    missing: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_flags(monkeypatch, _build.INSTRUCTION_SETS[0].flags - {missing})
    assert _build.shipped_library(source) is None


def test_a_library_of_older_sources_is_not_loaded(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_flags(monkeypatch, _build.INSTRUCTION_SETS[0].flags)
    source.write_text('extern "C" int one() { return 2; }\n')
    assert _build.shipped_library(source) is None


def test_a_library_of_older_headers_is_not_loaded(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_flags(monkeypatch, _build.INSTRUCTION_SETS[0].flags)
    source.with_name("one.h").write_text("// new\n")
    assert _build.shipped_library(source) is None


def test_a_file_that_does_not_compile_is_left_out_of_the_wheel(tmp_path: Path) -> None:
    if not _build.can_build_wheel_libraries():
        pytest.skip("needs a C++ compiler on x86-64 Linux")
    (tmp_path / "good.cpp").write_text('extern "C" int one() { return 1; }\n')
    (tmp_path / "bad.cpp").write_text("nonsense")
    folder = tmp_path / _build.SHIPPED
    failures = _build.build_wheel_libraries(tmp_path, folder)
    built = {library.name for library in folder.glob("good-*.so")}
    assert built == {
        _build.shipped_name(tmp_path / "good.cpp", instructions)
        for instructions in _build.INSTRUCTION_SETS
    }
    assert len(failures) == len(_build.INSTRUCTION_SETS)
    assert all(failure.startswith("bad.cpp for ") and "nonsense" in failure for failure in failures)
