"""`drafttree doctor`: reports versions, what is supported and how to fix what is not."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafttree.cli.diagnosis import diagnose
from drafttree.cli.finding import Finding

MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("problem", "bold red")}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what is installed, what works and how to fix the rest."""
    with Console(stderr=True).status("Checking the environment"):
        findings = diagnose()
    if as_json:
        print(json.dumps([finding.model_dump() for finding in findings], indent=2))
    else:
        Console().print(_table(findings))


def _table(findings: list[Finding]) -> Table:
    table = Table(title="drafttree doctor")
    for header in ("", "", "found", "", "what to do"):
        table.add_column(header, overflow="fold")
    section = ""
    for finding in findings:
        if finding.section != section and section:
            table.add_section()
        mark, style = MARKS[finding.status]
        first = "" if finding.section == section else finding.section
        section = finding.section
        cells = (first, finding.name, finding.value)
        table.add_row(*map(Text, cells), Text(mark, style), Text(finding.advice))
    return table
