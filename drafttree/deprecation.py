"""Names that still work and are about to go: one warning for each, with what replaces it."""

from __future__ import annotations

import logging
from dataclasses import dataclass


@dataclass(frozen=True)
class Deprecation:
    """A deprecated name. `docs/options.md` lists all of them.

    Attributes:
        name: What a user wrote, such as `drafting=grown`.
        of: What the name belongs to, such as `Token Recycling`.
        instead: What to write in its place.
        since: The version that deprecated it.
        gone_in: The version in which it no longer works.
    """

    name: str
    of: str
    instead: str
    since: str
    gone_in: str

    def warn(self, logger: logging.Logger) -> None:
        """Log the warning, once in a process."""
        if self not in _WARNED:
            _WARNED.add(self)
            logger.warning(
                "%s of %s is deprecated and will go in drafttree %s: use %s",
                *(self.name, self.of, self.gone_in, self.instead),
            )


_WARNED: set[Deprecation] = set()
