"""Regular expressions that are compiled when they are first used: a run uses few of those that rlwatch has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

__all__ = ["lazy_pattern"]

if TYPE_CHECKING:
    from re import compile as lazy_pattern
else:

    class lazy_pattern:  # noqa: N801  (it stands for re.compile)
        """The regular expression ``text`` with ``flags``, as ``re.compile`` returns it."""

        def __init__(self, text, flags=0):
            self._text, self._flags = text, flags

        def __getattr__(self, name):
            """Compile the expression, and keep the asked method for the next time."""
            found = getattr(re.compile(self._text, self._flags), name)
            setattr(self, name, found)
            return found
