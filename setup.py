"""The build step that compiles the C++ kernels into the wheel where there is a compiler.

Everything else about the package is in `pyproject.toml`, except the description that package
indexes show: the README, whose relative links are dead there and so become absolute. Without a
compiler the wheel is pure Python, and the kernels are compiled on first use on the machine that
runs them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNELS = ROOT / "kernels" / "tree_kernels"
FILES = "https://github.com/drafttree/drafttree/blob/main/"
sys.path.insert(0, str(KERNELS.parent))
from tree_kernels import _build  # noqa: E402


class BuildWithKernels(build_py):
    """Copies the packages and compiles the kernels beside them.

    An editable install takes the sources as they are: its kernels are compiled on first use.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode or not _build.can_build_wheel_libraries():
            return
        folder = Path(self.build_lib) / "tree_kernels" / _build.SHIPPED
        for failure in _build.build_wheel_libraries(KERNELS, folder):
            self.warn(f"not compiled into the wheel: {failure}")


class DistributionWithKernels(Distribution):
    """Tells setuptools whether the wheel holds compiled files, and so is for one platform."""

    def has_ext_modules(self) -> bool:
        return bool(_build.can_build_wheel_libraries())


class PlatformWheel(bdist_wheel):
    """Tags the wheel for any Python 3: the libraries use no Python API."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform


readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"\]\((?!https?://)", f"]({FILES}", readme),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
    distclass=DistributionWithKernels,
)
