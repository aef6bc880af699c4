"""Pages in a headless Chromium, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")

_WATCH = """<head><script>
window.blocked = [];
document.addEventListener("securitypolicyviolation", (event) => blocked.push(event.blockedURI));
window.addEventListener("error", (event) => blocked.push(event.message));
</script>"""

_REPORT = """<script>
{script}
document.body.dataset.loaded = performance.getEntriesByType("resource").map((each) => each.name);
document.body.dataset.wrong = blocked;
</script></body>"""


def rendered(page: Path, script: str = "") -> str:
    """The elements of a page as HTML after it has run, and then a script.

    It asserts that the page has loaded nothing, has tried to load nothing, and had no error; skips
    the test where there is no browser.
    """
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(_NAMES)}")
    text = page.read_text(encoding="utf-8")
    watched = text.replace("<head>", _WATCH, 1)
    watched = watched.replace("</body>", _REPORT.format(script=script), 1)
    assert watched.count("<script") == text.count("<script") + 2
    copy = page.with_name(f"watched-{page.name}")
    copy.write_text(watched, encoding="utf-8")
    profile = page.with_name("profile")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--disable-background-networking", f"--user-data-dir={profile}", copy.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    dom = unescape(run.stdout)
    (body,) = re.findall(r"<body[^>]*>", dom)
    assert 'data-loaded=""' in body, body
    assert 'data-wrong=""' in body, body
    return dom
