"""MkDocs hooks: links from a page to files outside `docs/`.

Pages link to such files by relative paths (`../results/x.png`), as GitHub shows them. On the site,
such images are copied, and other files are linked in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

IMAGES = re.compile(r"!\[[^\]]*\]\(\.\./([^)]+)\)")
OUTSIDE = re.compile(r"\]\(\.\./([^)]+)\)")
ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Copy the images that pages show from outside `docs/`."""
    pages = [page.content_string for page in files.documentation_pages()]
    for name in sorted({name for page in pages for name in IMAGES.findall(page)}):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: Any) -> str:
    """Point links at the copied images, and at the repository for everything else."""
    markdown = IMAGES.sub(lambda image: image[0].replace("](../", "]("), markdown)
    return OUTSIDE.sub(lambda link: f"]({_in_repository(link[1], config)})", markdown)


def _in_repository(name: str, config: MkDocsConfig) -> str:
    path = name.partition("#")[0]
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to ../{name}, which does not exist")
    return f"{config.repo_url}/blob/main/{name}"
