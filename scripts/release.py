"""Check that a tag can be released, and print what changed in its version.

    python scripts/release.py v0.2.0

The tag is "v" and the package's version, and the changelog's newest section is that version's, with
nothing left under "Unreleased". Needs nothing but the standard library.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.M)


def package_version(root: Path = ROOT) -> str:
    """The version in `drafttree/__init__.py`, its only place."""
    text = (root / "drafttree" / "__init__.py").read_text(encoding="utf-8")
    found = re.findall(r'^__version__ = "(.+)"$', text, re.M)
    if len(found) != 1:
        raise ValueError('drafttree/__init__.py needs one line: __version__ = "X.Y.Z"')
    return str(found[0])


def notes(tag: str, root: Path = ROOT) -> str:
    """The changelog's section for a tag.

    Raises:
        ValueError: The tag, the package's version and the changelog do not agree; the message says
            what to change.
    """
    version = package_version(root)
    if tag != f"v{version}":
        raise ValueError(
            f"the tag {tag} is not v{version}: set __version__ in drafttree/__init__.py, or tag "
            f"v{version}"
        )
    sections = SECTION.findall((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if not sections or sections[0][0] != "Unreleased" or sections[0][1].strip():
        raise ValueError(
            "CHANGELOG.md must begin with an empty section Unreleased: move what it has to "
            f"{version}"
        )
    if len(sections) < 2 or not re.fullmatch(
        rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", sections[1][0]
    ):
        raise ValueError(
            f"the newest section of CHANGELOG.md must be {version}: head it '## {version} - "
            "YYYY-MM-DD'"
        )
    if not sections[1][1].strip():
        raise ValueError(f"CHANGELOG.md says nothing of {version}: write what changed")
    return str(sections[1][1]).strip() + "\n"


def main(arguments: list[str]) -> int:
    """Print the notes of a tag and return the exit status."""
    if len(arguments) != 1:
        print("usage: python scripts/release.py TAG", file=sys.stderr)
        return 2
    try:
        print(notes(arguments[0]), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
