"""A trace as an HTML page in which to step through the answer."""

from __future__ import annotations

from drafttree.bench.trace import Trace
from drafttree.cli.page import data_and_script, html_page, part


def page(trace: Trace) -> str:
    """The page as HTML; it contains the trace as JSON, with the sums by source as `sources`."""
    data = trace.model_dump() | {"sources": trace.by_source()}
    body = f"{part('trace.html')}{data_and_script(data, part('trace.js'))}"
    return html_page(f"{trace.method}: {trace.prompt[-1][:60]}", body)
