"""Pages of one HTML file each, which load nothing."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def part(name: str) -> str:
    """The text of a file of `pages`."""
    return (files("drafttree.cli") / "pages" / name).read_text(encoding="utf-8")


def html_page(title: str, body: str) -> str:
    """A page with the shared style, which the browser forbids to load anything.

    Args:
        title: Its title, as text.
        body: Its content, as HTML.
    """
    text = _PAGE.format(title=escape(title), style=part("page.css"), body=body)
    # Names of files need not be UTF-8: bytes that are not are lone surrogates here.
    return text.encode(errors="backslashreplace").decode()


def data_and_script(data: Any, script: str) -> str:
    """HTML elements for a script and what it reads, as JSON, from the element `data`."""
    # A tag within a string would end the element.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>\n<script>\n{script}</script>'
