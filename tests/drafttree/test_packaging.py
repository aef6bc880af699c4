"""The wheel, the editable install, and names that must not clash with other packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tree_kernels import _build, machine

ROOT = Path(__file__).resolve().parents[2]


def usable() -> list[_build.InstructionSet]:
    """The levels that this processor supports, best first."""
    present = set(machine.processor_flags())
    return [
        instructions for instructions in _build.INSTRUCTION_SETS if instructions.flags <= present
    ]


compiled = pytest.mark.skipif(
    not (_build.can_build_wheel_libraries() and usable()),
    reason="wheels contain kernels for x86-64 processors with AVX2 only",
)
IMPORTS = """
import drafttree, drafttree.bench, drafttree.cli, drafttree.testing
import drafttree.sglang, drafttree.vllm
import lyanna_plugin, lyanna_plugin.training, recycle_plugin, rsd_plugin, tree_kernels
from importlib.resources import files
assert (files("recycle_plugin") / "token_recycling_80.json").is_file()
assert (files("drafttree.cli") / "pages" / "trace.js").is_file()
assert (files("tree_kernels") / "floats.h").is_file()
assert (files("lyanna_plugin") / "drafters" / "smollm2-135m" / "model.safetensors").is_file()
for package in ("drafttree", "lyanna_plugin", "recycle_plugin", "rsd_plugin", "tree_kernels"):
    assert (files(package) / "py.typed").is_file(), package
"""


# Runs every kernel case of the benchmarks on the CPU, compares each with its reference, and prints
# a hash of all results and the libraries that were loaded.
KERNELS = """
import hashlib, re, sys
from pathlib import Path
sys.path.append(sys.argv[1])
import bench_kernels, torch
digest = hashlib.sha256()
for name, case in bench_kernels.KERNELS.items():
    if "cpu" in case.devices:
        torch.manual_seed(0)
        work = case.make(**case.quick)
        bench_kernels.agree(name, work, case.tolerance)
        for result in work.ours():
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
maps = Path("/proc/self/maps").read_text()
print(*sorted(set(re.findall(r"/\\S+\\.so$", maps, re.M))), sep="\\n")
"""


def run_python(
    program: str,
    *arguments: str,
    cwd: Path = ROOT,
    path: Path | None = None,
    variables: dict[str, str] | None = None,
) -> str:
    """Run a program in a new interpreter that searches `path` first, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= variables or {}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def pip_install(target: Path, *what: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--target", str(target), *what], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution of a copy of the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("drafttree", "lyanna_plugin", "recycle_plugin", "rsd_plugin", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    wheels = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "build", "--outdir", str(wheels), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = wheels.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed."""
    target = tmp_path_factory.mktemp("target")
    pip_install(target, str(wheel))
    return target


def test_the_wheel_has_all_packages_and_their_data(installed_wheel: Path, tmp_path: Path) -> None:
    places = "print(drafttree.__file__, recycle_plugin.__file__, tree_kernels.__file__)"
    found = run_python(IMPORTS + places, cwd=tmp_path, path=installed_wheel).split()
    assert all(Path(place).is_relative_to(installed_wheel) for place in found)


def test_the_wheel_registers_command_methods_and_plugins(installed_wheel: Path) -> None:
    (metadata,) = installed_wheel.glob("drafttree-*.dist-info")
    registered = (metadata / "entry_points.txt").read_text()
    for group in (
        *("console_scripts", "drafttree.methods", "drafttree.trainers"),
        *("vllm.general_plugins", "sglang.srt.plugins"),
    ):
        assert f"[{group}]" in registered


def test_the_wheel_has_every_python_file_of_the_packages(installed_wheel: Path) -> None:
    ours = dict.fromkeys(("drafttree", "lyanna_plugin", "recycle_plugin", "rsd_plugin"), ROOT)
    sources = {**ours, "tree_kernels": ROOT / "kernels"}
    for package, root in sources.items():
        for file in (root / package).rglob("*.py"):
            assert (installed_wheel / file.relative_to(root)).is_file(), file


@compiled
def test_the_wheel_is_for_this_platform_and_any_python(wheel: Path) -> None:
    assert re.fullmatch(r"drafttree-[\d.]+-py3-none-linux_x86_64\.whl", wheel.name)


@compiled
def test_the_wheel_has_every_kernel_for_every_level(installed_wheel: Path) -> None:
    kernels = ROOT / "kernels" / "tree_kernels"
    expected = {
        _build.shipped_name(source, instructions)
        for source in kernels.glob("*.cpp")
        for instructions in _build.INSTRUCTION_SETS
    }
    shipped = installed_wheel / "tree_kernels" / _build.SHIPPED
    assert {library.name for library in shipped.iterdir()} == expected


@compiled
def test_shipped_kernels_serve_without_a_compiler(installed_wheel: Path, tmp_path: Path) -> None:
    """Their results are the references', and bit for bit those of kernels compiled here."""
    scripts = str(ROOT / "scripts" / "benchmarks")
    nothing = {"PATH": "", "CXX": "", "DRAFTTREE_CACHE": str(tmp_path)}
    digest, *libraries = run_python(
        KERNELS, scripts, cwd=tmp_path, path=installed_wheel, variables=nothing
    ).splitlines()
    shipped = installed_wheel / "tree_kernels" / _build.SHIPPED
    loaded = {Path(library).name for library in libraries if Path(library).parent == shipped}
    sources = (ROOT / "kernels" / "tree_kernels").glob("*.cpp")
    here = {
        _build.shipped_name(source, instructions)
        for source in sources
        for instructions in usable()[:1]
    }
    assert loaded == here
    assert list(tmp_path.iterdir()) == []
    digest_of_native, *libraries = run_python(KERNELS, scripts).splitlines()
    assert not any(_build.SHIPPED in library for library in libraries)
    assert digest == digest_of_native


@compiled
def test_a_wheel_built_without_a_compiler_is_pure(tmp_path: Path) -> None:
    program = """
import runpy, setuptools
setuptools.setup = lambda **arguments: print(arguments["distclass"]().has_ext_modules())
runpy.run_path("setup.py")
"""
    assert run_python(program) == "True"
    assert run_python(program, variables={"PATH": "", "CXX": ""}) == "False"


def test_this_install_has_all_packages_and_their_data(tmp_path: Path) -> None:
    run_python(IMPORTS, cwd=tmp_path)


def test_the_folder_of_the_kernels_is_not_a_package() -> None:
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_pypi_package_kernels_is_found_from_the_root(tmp_path: Path) -> None:
    pip_install(tmp_path, "kernels", "kernels-data")
    found = run_python("import kernels; print(kernels.__file__)", path=tmp_path)
    assert Path(found).is_relative_to(tmp_path)


def test_transformers_imports_from_the_root() -> None:
    run_python("from transformers import AutoTokenizer, LlamaForCausalLM")


def test_all_packages_import_without_triton_and_without_any_host() -> None:
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "vllm", "sglang", "transformers"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
import drafttree.cli, drafttree.drafter, drafttree.method, drafttree.tree, drafttree.verify
import drafttree.sglang.options, drafttree.sglang.versions
import lyanna_plugin.tree, lyanna_plugin.training.command
import pkgutil, importlib, recycle_plugin, rsd_plugin, tree_kernels
for package in (recycle_plugin, rsd_plugin, tree_kernels):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from drafttree.method import installed_methods
assert installed_methods()
"""
    run_python(program)
