"""The example of docs/adding_a_method.md, installed and checked as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from example_method import EXAMPLE, install_example

PAGE = EXAMPLE.parents[1] / "adding_a_method.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_example(tmp_path_factory.mktemp("example"))


def run(installed: dict[str, str], *arguments: str) -> str:
    """Run Python with the example installed, and return its output."""
    process = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | installed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_the_tests_of_the_example_pass(installed: dict[str, str]) -> None:
    output = run(
        installed,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull),
        str(EXAMPLE / "test_prompt_lookup_tree.py"),
    )
    assert "3 passed" in output


def test_n_gram_matches_are_merged_into_a_tree(installed: dict[str, str]) -> None:
    """In `1 2 3 9 1 2 4 9 5 1` the token 1 was followed by `2 4 9` and, earlier, by `2 3 9`."""
    program = """
import torch
from drafttree import Target
from prompt_lookup_tree import METHOD
drafter = METHOD.make_drafter(METHOD.parse({"width": 2, "length": 3}), None)
drafter.start(0, [1, 2, 3, 9, 1, 2, 4, 9, 5, 1])
drafter.start(1, [7, 8])
trees = drafter.propose(torch.tensor([0, 1]), torch.tensor([1, 8], dtype=torch.int32))
print(trees.tokens.tolist(), trees.parents.tolist(), trees.tree_size.tolist())
"""
    tokens = [[1, 2, 4, 3, 9, 9], [8, -1, -1, -1, -1, -1]]
    parents = [[-1, 0, 1, 1, 2, 3], [-1] * 6]
    assert run(installed, "-c", program).strip() == f"{tokens} {parents} [6, 1]"


def test_the_demo_uses_token_recycling_although_the_example_is_installed(
    installed: dict[str, str],
) -> None:
    program = """
import importlib
from typer.testing import CliRunner
from drafttree import find_method
from drafttree.bench.errors import InputError
from drafttree.cli import app

def stop(name, options):
    raise InputError(f"the method is {name}")

importlib.import_module("drafttree.cli.demo").resolve_method = stop
print(find_method("prompt-lookup-tree").title)
print(CliRunner().invoke(app, ["demo"]).output)
"""
    output = run(installed, "-c", program)
    assert "Prompt-lookup trees" in output
    assert "the method is token-recycling" in output


def test_the_page_includes_all_of_the_example() -> None:
    """The page includes each marked part of the example's files, and no other part."""
    page = PAGE.read_text(encoding="utf-8")
    included = set(re.findall(r'--8<-- "(examples/[^"]+)"', page))
    marked = {
        f"{file.relative_to(PAGE.parent).as_posix()}:{part}"
        for file in EXAMPLE.glob("*.*")
        for part in re.findall(r"--8<-- \[start:([a-z-]+)\]", file.read_text(encoding="utf-8"))
    }
    assert included == marked
    assert len(marked) >= 6


def test_the_example_uses_the_public_api_alone() -> None:
    source = (EXAMPLE / "prompt_lookup_tree.py").read_text(encoding="utf-8")
    imports = re.findall(r"^(?:from|import) (\w+[\w.]*)", source, re.MULTILINE)
    assert "drafttree" in imports
    assert not [name for name in imports if name.startswith(("drafttree.", "tree_kernels"))]
