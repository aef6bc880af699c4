"""Checks a file that a command will write, before the command does its work."""

from __future__ import annotations

import os
from pathlib import Path

from drafttree.bench.errors import InputError


def check_output(option: str, file: Path) -> None:
    """Refuse a file that cannot be written.

    Args:
        option: The option that names it.
        file: The file.

    Raises:
        InputError: It cannot be written; the message gives the reason.
    """
    folder = file.resolve().parent
    if not folder.is_dir():
        raise InputError(f"the folder of {file} does not exist")
    if file.is_dir():
        raise InputError(f"{file} is a folder: name a file for {option}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{file} cannot be written: name another file for {option}")
