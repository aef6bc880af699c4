"""The source distribution, the wheel, the editable install, and names that must not clash."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata, parse_email
from tree_kernels import _build, machine

from drafttree import __version__

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
    python: Path = Path(sys.executable),
) -> str:
    """Run a program in a new interpreter that searches `path` first, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= variables or {}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [str(python), "-c", program, *arguments]
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
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution of a copy of the checkout, and the wheel built from
    that. Built once for a run: the processes of pytest-xdist share the folder above their own."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "packages"
    with (shared / "packages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build_packages(tmp_path_factory.mktemp("source"), shared / "packages.part")
            (shared / "packages.part").rename(folder)
    return folder


def build_packages(source: Path, folder: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("drafttree", "lyanna_plugin", "recycle_plugin", "rsd_plugin", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(packages: Path) -> Path:
    (wheel,) = packages.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(packages: Path) -> Path:
    (sdist,) = packages.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which the wheel alone is installed; its dependencies are those of this
    one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    result = subprocess.run([*command, str(wheel)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # The .pth files there are not read, so this checkout's editable install is not found.
    (site_packages(folder) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def site_packages(environment: Path) -> Path:
    (folder,) = environment.glob("lib/python3.*/site-packages")
    return folder


@pytest.fixture(scope="module")
def installed_wheel(environment: Path) -> Path:
    """The folder into which the wheel is installed."""
    return site_packages(environment)


def package_files() -> dict[str, Path]:
    """The files of all packages in the checkout, by their names in a wheel."""
    ours = dict.fromkeys(("drafttree", "lyanna_plugin", "recycle_plugin", "rsd_plugin"), ROOT)
    return {
        file.relative_to(root).as_posix(): file
        for package, root in {**ours, "tree_kernels": ROOT / "kernels"}.items()
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_source_distribution_has_all_that_the_wheel_is_built_from(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {file.relative_to(ROOT).as_posix() for file in package_files().values()}
    assert expected <= names
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "PKG-INFO"} <= names
    # What an editable installation leaves behind is made anew in each distribution.
    names = {name for name in names if not name.startswith("drafttree.egg-info/")}
    others = {name for name in names - expected if (ROOT / name).is_file()}
    assert others == {"pyproject.toml", "setup.py", "README.md", "LICENSE"}


def test_the_wheel_has_the_files_of_the_packages_and_no_others(wheel: Path) -> None:
    shipped, metadata = f"tree_kernels/{_build.SHIPPED}/", f"drafttree-{__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = {name for name in names if not name.startswith((shipped, metadata))}
    assert files == package_files().keys()
    assert f"{metadata}licenses/LICENSE" in names


def test_package_indexes_take_the_metadata(wheel: Path, sdist: Path) -> None:
    """What `twine check` checks, and that the description's links lead somewhere on an index."""
    with zipfile.ZipFile(wheel) as archive:
        written = archive.read(f"drafttree-{__version__}.dist-info/METADATA")
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"drafttree-{__version__}/PKG-INFO")
        assert member is not None
        assert parse_email(member.read()) == parse_email(written)
    metadata = Metadata.from_email(written, validate=True)
    assert str(metadata.version) == __version__
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description is not None
    links = re.findall(r"\]\(([^)]+)\)", metadata.description)
    ours = "https://github.com/drafttree/drafttree/blob/main/"
    assert all(link.startswith("https://") for link in links)
    named = [link.removeprefix(ours).partition("#")[0] for link in links if link.startswith(ours)]
    assert len(named) > 10
    assert all((ROOT / name).is_file() for name in named)


def test_the_wheel_has_all_packages_and_their_data(environment: Path, tmp_path: Path) -> None:
    places = "print(drafttree.__file__, recycle_plugin.__file__, tree_kernels.__file__)"
    python = environment / "bin" / "python"
    found = run_python(IMPORTS + places, cwd=tmp_path, python=python).split()
    assert all(Path(place).is_relative_to(environment) for place in found)


def test_the_installed_command_runs(environment: Path, tmp_path: Path) -> None:
    command = [environment / "bin" / "drafttree", "--version"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (printed.returncode, printed.stdout) == (0, f"drafttree {__version__}\n")


ENTRY_POINTS = """
from importlib.metadata import distribution
for entry in distribution("drafttree").entry_points:
    assert entry.load() is not None
    print(entry.group, entry.name)
"""


def test_every_entry_point_of_the_wheel_can_be_loaded(environment: Path, tmp_path: Path) -> None:
    printed = run_python(ENTRY_POINTS, cwd=tmp_path, python=environment / "bin" / "python")
    methods = ("lyanna", "rsd", "token_recycling")
    assert sorted(printed.splitlines()) == sorted(
        [
            *("console_scripts drafttree", "drafttree.trainers lyanna"),
            *(f"drafttree.methods {name}" for name in methods),
            *("vllm.general_plugins drafttree", "sglang.srt.plugins drafttree"),
        ]
    )


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
    """Their results are the references', and with AVX-512 bit for bit those of kernels built here.

    Compilers tune for some processors with AVX2 alone by not fusing products and sums.
    """
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
    assert digest == digest_of_native or usable()[0].march != "x86-64-v4"


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
