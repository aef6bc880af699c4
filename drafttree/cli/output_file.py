"""Files that commands write: checked before the work is done, and written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from drafttree.bench.errors import InputError


def check_output(option: str, file: Path, others: Mapping[str, Path | None]) -> None:
    """Refuse a file that cannot be written, or that the command reads or also writes otherwise.

    Args:
        option: The option that names it.
        file: The file.
        others: The command's other files, by the options that name them.

    Raises:
        InputError: It cannot be written; the message gives the reason.
    """
    folder = Path(os.path.realpath(file)).parent
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # It is to be made, in a folder that is checked below.
    except OSError as error:
        raise InputError(
            f"{file} cannot be written ({error.strerror}): name another file for {option}"
        ) from error
    if not folder.is_dir():
        raise InputError(f"the folder of {file} does not exist")
    if file.is_dir():
        raise InputError(f"{file} is a folder: name a file for {option}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{file} cannot be written: name another file for {option}")
    if file.exists() and not file.is_file():
        return  # Such as /dev/null.
    for name, other in others.items():
        if other is not None and _same(file, other):
            raise InputError(
                f"{option} and {name} are the same file, {file}: name another file for {option}"
            )


def _same(file: Path, other: Path) -> bool:
    try:
        return file.samefile(other)
    except OSError:
        # One of them does not exist.
        return os.path.realpath(file) == os.path.realpath(other)


def write_output(file: Path, content: str | bytes) -> None:
    """Write a file; if that fails, what was there before is kept.

    What is no regular file, such as `/dev/stdout`, and a file in a folder in which none can be
    made are written directly.

    Args:
        file: The file.
        content: Its content; text is written in UTF-8.

    Raises:
        OSError: It cannot be written; the message names it.
    """
    data = content.encode() if isinstance(content, str) else content
    # A symbolic link stays, and the file that it refers to is replaced.
    target = Path(os.path.realpath(file))
    try:
        if (file.exists() and not file.is_file()) or not os.access(target.parent, os.W_OK):
            file.write_bytes(data)
            return
        part = target.with_name(f".{uuid4().hex}.part")
        try:
            part.write_bytes(data)
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror}") from error
