"""Removes code for other GPUs from a CUDA library, so that it compresses well.

A CUDA library contains fat binaries. Each is a container of entries, machine code (a cubin) or PTX
for one architecture, of which the driver picks the one that fits. Entries that it would not pick
are overwritten with zeros, so no offset changes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_CONTAINER = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE = 28
"""Offset of the architecture in an entry's header; 90 is Hopper."""
_CUBIN = 2


@dataclass(frozen=True)
class Entry:
    """The code of one entry.

    Attributes:
        code: Position in the file.
        architecture: Architecture that the code is for; 90 is Hopper.
        cubin: Whether the code is machine code instead of PTX.
    """

    code: slice
    architecture: int
    cubin: bool


def containers(library: bytes | bytearray) -> Iterator[list[Entry]]:
    """The entries of each fat binary in a library."""
    at = -1
    while (at := library.find(_MAGIC.to_bytes(4, "little"), at + 1)) >= 0:
        if at + _CONTAINER.size > len(library):
            return
        _, version, header, size = _CONTAINER.unpack_from(library, at)
        if version != 1 or header != _CONTAINER.size or at + header + size > len(library):
            continue  # four bytes that look like one
        entries = []
        place, end = at + header, at + header + size
        while place + _ENTRY.size <= end:
            kind, _, entry_header, entry_size = _ENTRY.unpack_from(library, place)
            if kind not in (1, _CUBIN) or place + entry_header + entry_size > end:
                break
            (architecture,) = struct.unpack_from("<I", library, place + _ARCHITECTURE)
            code = slice(place + entry_header, place + entry_header + entry_size)
            entries.append(Entry(code, architecture, kind == _CUBIN))
            place = code.stop
        yield entries


def keep_architecture(library: bytes, architecture: int) -> bytes:
    """Zero the code that a GPU of this architecture does not run.

    A container without machine code for it keeps the newest PTX that the driver can compile for it.
    """
    slimmed = bytearray(library)
    for entries in containers(library):
        kept = [each for each in entries if each.cubin and each.architecture == architecture]
        if not kept:
            sources = [each for each in entries if not each.cubin]
            fitting = [each for each in sources if each.architecture <= architecture]
            kept = sorted(fitting, key=lambda each: each.architecture)[-1:]
        for each in entries:
            if each not in kept:
                slimmed[each.code] = bytes(each.code.stop - each.code.start)
    return bytes(slimmed)
