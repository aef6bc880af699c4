"""One line of the report of `drafttree doctor`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Status = Literal["ok", "note", "problem"]


class Finding(BaseModel):
    """One line of the report.

    Attributes:
        section: Heading of the line.
        name: What was checked.
        value: What was found.
        status: How serious it is.
        advice: What to do about it; empty if nothing needs to be done.
    """

    section: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""
