"""The documentation builds and is up to date, and its links are valid."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.main import get_command

import drafttree
from drafttree.budget.constants import BudgetConstants
from drafttree.cli import app
from drafttree.method import find_method, installed_methods
from scripts.docs import generate

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted(DOCS.glob("*.md"))
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built documentation."""
    folder = tmp_path_factory.mktemp("site")
    built = run("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in DOCS.glob("*.md"):
        if page.stem != "index":
            assert f'href="{page.stem}/"' in home, page.name


@pytest.mark.parametrize(
    "start", [ROOT / "README.md", DOCS / "index.md"], ids=lambda file: file.name
)
def test_every_page_is_linked_from_the_start(start: Path) -> None:
    linked = {(start.parent / link).resolve() for link in LINK.findall(start.read_text())}
    pages = {page for page in DOCS.rglob("*.md") if page != DOCS / "index.md"}
    assert len(pages) > 15
    assert pages <= linked


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"?https?://")
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text()), page


def test_images_outside_docs_are_part_of_the_site(site: Path) -> None:
    shown = re.findall(r'src="([^"]+\.png)"', (site / "benchmarks" / "index.html").read_text())
    assert len(shown) == len(list((ROOT / "results").glob("*.png")))
    assert all((site / "benchmarks" / image).is_file() for image in shown)


def test_the_public_api_is_documented(site: Path) -> None:
    page = (site / "api" / "index.html").read_text()
    for name in drafttree.__all__:
        assert name in page, name
    assert "check_drafter" in page


def test_generated_parts_are_up_to_date() -> None:
    checked = run("-m", "scripts.docs.generate", "--check")
    assert checked.returncode == 0, (
        f"{checked.stdout}{checked.stderr}: run python -m scripts.docs.generate"
    )


def test_a_stale_page_is_named_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- generated: options rsd -->\nstale text\n<!-- end -->\nz\n")
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/page.md is out of date\n"
    assert generate.main([]) == 0
    text = page.read_text()
    assert "stale text" not in text
    assert "| `model` | required |" in text
    assert text.startswith("a\n")
    assert text.endswith("<!-- end -->\nz\n")
    assert generate.main(["--check"]) == 0


def test_every_option_is_described() -> None:
    options = (DOCS / "options.md").read_text()
    ours = {entry.name for entry in entry_points(group="drafttree.methods")} & {
        "lyanna",
        "rsd",
        "token_recycling",
    }
    assert len(ours) == 3
    for method in ours:
        for name, field in installed_methods()[method].options.model_fields.items():
            assert field.description, f"{method}: {name}"
            assert f"| `{name}` |" in options


def test_every_constant_of_the_node_budget_is_described() -> None:
    page = (DOCS / "node_budget.md").read_text()
    for name, field in BudgetConstants.model_fields.items():
        assert field.description, name
        assert re.search(rf"^\| `{name}` \| [\d./]+ \| {re.escape(field.description)}", page, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_numbers_in_the_readme_are_measured() -> None:
    """The speedup of the first wave and of the second, which asks the same."""
    run = json.loads((ROOT / "results/record/vllm-token-recycling-batch-1.json").read_text())
    readme = (ROOT / "README.md").read_text().replace("\n", " ")
    for wave in run["waves"]:
        assert f"**{wave['speedup']:.2f} times" in readme


def test_every_subcommand_is_documented() -> None:
    page = (DOCS / "command.md").read_text()
    for name in get_command(app).commands:
        assert f"`drafttree {name}`" in page, name


def shown_commands(page: Path) -> list[list[str]]:
    """The calls of `drafttree` in a page's blocks of code, each as its arguments."""
    calls = []
    for block in re.findall(r"^```.*?\n(.*?)^```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r'"\$\(.*?\)"', "MODEL", line).partition("  # ")[0]
            call = re.match(r"(?:[A-Z_]+=\S+ )*(?:\S+/bin/)?drafttree (.*)", words)
            if call:
                calls.append(shlex.split(call[1]))
    return calls


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_that_a_page_shows_can_be_called(page: Path) -> None:
    """Every subcommand and option exists, and no required one is left out."""
    command = get_command(app)
    for name, *arguments in shown_commands(page):
        with command.make_context("drafttree", [name]) as context:
            command.commands[name].make_context(name, arguments, parent=context)


def test_the_pages_show_commands() -> None:
    calls = [call for page in PAGES for call in shown_commands(page)]
    shown = {call[0] for call in calls}
    assert {"bench", "budget", "prepare", "trace", "train", "tree"} <= shown
    assert len(calls) >= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_options_that_a_page_shows_are_accepted(page: Path) -> None:
    """In vLLM's configurations and in the command's `--option` and `--vary`."""
    text = page.read_text()
    for shown in re.findall(r'\{"method": "[^}]*\}', text):
        given = json.loads(shown)
        method = given.pop("method")
        # The example that the page itself builds, and vLLM's own methods.
        if method not in ("prompt_lookup_tree", "ngram", "suffix"):
            find_method(method).parse(given)
    methods = installed_methods().values()
    known = {option for method in methods for option in method.options.model_fields} | {"width"}
    assert set(re.findall(r"--(?:option|vary) ([a-z_]+)=", text)) <= known


def test_every_environment_variable_is_documented() -> None:
    page = (DOCS / "command.md").read_text()
    packages = ("drafttree", "kernels", "lyanna_plugin", "recycle_plugin", "rsd_plugin")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    used = {name for file in files for name in re.findall(r"DRAFTTREE_[A-Z_]+", file.read_text())}
    assert "DRAFTTREE_CACHE" in used
    assert used == set(re.findall(r"^\| `(DRAFTTREE_[A-Z_]+)` \|", page, re.M))


def test_the_tests_that_the_page_on_testing_names_exist() -> None:
    current, former = (DOCS / "testing.md").read_text().split("| in 0.1.0 | now |")
    rows = [line.split("|") for line in former.splitlines() if line.startswith("|")]
    current += "".join(row[2] for row in rows)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = [path.read_text() for path in files]
    named = set(re.findall(r"test_\w+\.py", current))
    assert named <= {path.name for path in files}
    for test in set(re.findall(r"::(test_\w+)", current)):
        assert any(f"def {test}(" in text for text in texts), test
    assert len(named) > 10
