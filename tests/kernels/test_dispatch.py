"""Which implementation of an operation runs, and the table of the operations."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import bench_kernels
import pytest
import torch
import tree_kernels
from tree_kernels import _dispatch
from tree_kernels._dispatch import TYPES, VARIABLE, CppFunction, Op
from tree_kernels._triton import jit

FOLDER = Path(tree_kernels.__file__).parent


def attributes() -> Iterator[tuple[str, object]]:
    """The module name and value of every attribute of the package's modules."""
    for module in pkgutil.iter_modules([str(FOLDER)]):
        for value in vars(importlib.import_module(f"tree_kernels.{module.name}")).values():
            yield module.name, value


def ops() -> dict[str, Op[..., object]]:
    return {value.name: value for _, value in attributes() if isinstance(value, Op)}


def functions() -> set[CppFunction]:
    found = set()
    for _, value in attributes():
        values = value.values() if isinstance(value, dict) else [value]
        found |= {each for each in values if isinstance(each, CppFunction)}
    return found


def op(**implementations: object) -> Op[..., object]:
    return Op("example.op", str, **implementations)  # type: ignore[arg-type]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "reference")
    _dispatch.is_reference_forced.cache_clear()
    yield
    _dispatch.is_reference_forced.cache_clear()


ON_GPU = SimpleNamespace(is_cuda=True)
ON_CPU = SimpleNamespace(is_cuda=False)
AVAILABLE, MISSING = SimpleNamespace(is_available=True), SimpleNamespace(is_available=False)


def test_each_device_runs_its_kernel_or_else_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_dispatch, "triton", object())
    assert op(triton=int, cpp=float, needs=AVAILABLE).on(ON_GPU) is int
    assert op(triton=int, cpp=float, needs=AVAILABLE).on(ON_CPU) is float
    assert op(cpp=float, needs=AVAILABLE).on(ON_GPU) is str
    assert op(triton=int).on(ON_CPU) is str


def test_without_triton_or_a_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "triton", None)
    without = op(triton=int, cpp=float, needs=MISSING)
    assert without.on(ON_GPU) is str
    assert without.on(ON_CPU) is str


def test_the_variable_forces_the_reference_of_every_operation(
    forced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_dispatch, "triton", object())
    for known in ops().values():
        fresh = Op(
            known.name, known.reference, triton=known.triton, cpp=known.cpp, needs=known._needs
        )
        assert fresh.on(ON_GPU) is known.reference
        assert fresh.on(ON_CPU) is known.reference
    assert caplog.text.count("DRAFTTREE_KERNELS=reference") == 1


def test_another_value_of_the_variable_is_an_error(
    forced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ValueError, match="DRAFTTREE_KERNELS='triton' is not known: set it to"):
        op(triton=int).on_gpu  # noqa: B018


@pytest.mark.parametrize("name", list(bench_kernels.KERNELS))
def test_references_create_tensors_on_the_device_of_their_inputs(name: str) -> None:
    """A tensor made without a device would be on "meta" and fail to combine with others."""
    case = bench_kernels.KERNELS[name]
    work = case.make(**case.quick)
    expected = work.ours()
    with torch.device("meta"):
        found = work.reference()
    for ours, other in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=2e-2, equal_nan=True)


def test_an_argument_that_a_kernel_does_not_have_is_an_error() -> None:
    def kernel(tokens: object) -> None: ...

    with pytest.raises(ValueError, match="kernel has no argument 'token'"):
        jit(do_not_specialize=["tokens", "token"])(kernel)


def test_the_table_lists_every_operation_with_its_implementations() -> None:
    documented = {}
    for line in (tree_kernels.__doc__ or "").splitlines():
        if match := re.match(r"\| `(.+)` \| (.+) \| (yes|-) \| (yes|-) \| (.+) \|$", line):
            name, _, triton, cpp, _ = match.groups()
            documented[name] = triton == "yes", cpp == "yes"
    assert documented == {
        name: (op.triton is not None, op.cpp is not None) for name, op in ops().items()
    }


def test_every_operation_is_a_public_function_or_class_of_its_module() -> None:
    for name in ops():
        module, attribute = name.split(".")
        assert callable(getattr(importlib.import_module(f"tree_kernels.{module}"), attribute))


def exported(source: Path) -> dict[str, str]:
    """The signature of each `extern "C"` function of a file, as `CppFunction` writes it."""
    text = re.sub(r"//[^\n]*", "", source.read_text()).replace("\\\n", " ")
    macros = re.findall(r'#define (\w+)\((.*?)\) +extern "C" (.*)', text)
    declared = re.sub(r"#define[^\n]*", "", text)
    for macro, parameters, body in macros:
        for given in re.findall(rf"^{macro}\((.*)\)", declared, re.MULTILINE):
            expanded = body
            for parameter, value in zip(parameters.split(","), given.split(","), strict=True):
                expanded = re.sub(rf"(##)?\b{parameter.strip()}\b(##)?", value.strip(), expanded)
            declared += f'\nextern "C" {expanded}'
    return {
        name: "".join(letter_of(parameter) for parameter in parameters.split(","))
        for name, parameters in re.findall(r'extern "C" void (\w+)\(([^)]*)\)', declared)
    }


C_TYPES = {"int64_t": "i", "float": "f"}


def letter_of(parameter: str) -> str:
    """The letter of a C parameter such as `const int32_t* tokens` or `int64_t requests`."""
    kind = parameter.strip().rpartition(" ")[0]
    if kind.endswith("*"):
        return "p"
    assert kind in C_TYPES, f"{parameter!r} is neither a pointer nor one of {[*C_TYPES]}"
    return C_TYPES[kind]


@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.cpp")), ids=lambda source: source.name)
def test_signatures_are_those_of_the_cpp_file(source: Path) -> None:
    known = {each.name: each.signature for each in functions() if each.source == source.name}
    assert known == exported(source)
    assert all(letter in TYPES for signature in known.values() for letter in signature)


def test_every_signature_belongs_to_a_cpp_file() -> None:
    assert {each.source for each in functions()} == {path.name for path in FOLDER.glob("*.cpp")}


def test_a_wrong_letter_would_be_found(tmp_path: Path) -> None:
    source = tmp_path / "example.cpp"
    source.write_text(
        'extern "C" void one(const int32_t* a,\n    int64_t b, Layout* c) {}\n'
        '#define MAKE(NAME, T) \\\n  extern "C" void do_##NAME(const T* x, int64_t n) {}\n'
        "MAKE(two, float)\nMAKE(three, double)\n"
    )
    assert exported(source) == {"one": "pip", "do_two": "pi", "do_three": "pi"}
    with pytest.raises(AssertionError, match="neither a pointer nor one of"):
        letter_of("int32_t count")
