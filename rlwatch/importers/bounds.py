"""What a log may cost: how long a line, a name, a list of runs may be, and what is said of more.

Logs come from anywhere. Whatever is in one, reading it takes time in proportion to its size and no more memory than
these bounds allow; what goes beyond is left out and counted, or refused by name where the rest would be meaningless.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import IO

from rlwatch.records import JSON

LONGEST_LINE = 8 << 20
"""Characters of a line: 100,000 metrics fit."""
LONGEST_RECORD = 64 << 20
"""Bytes of a record of TensorBoard's or wandb's files: pictures and tables fit, and hold no metric anyway."""
LARGEST_DOCUMENT = 256 << 20
"""Bytes of a file that can only be read as a whole."""
UNPACKED_FREELY = 256 << 20
MOST_UNPACKED = 200
"""A gzip file may unpack to so many bytes and, beyond that, to so many times its size: progress bars reach 100."""
LONGEST_NAME = 500
"""Characters of a metric's name."""
MOST_NAMES = 20_000
"""Metrics of a run."""
MOST_RUNS = 1000
"""Runs of a log that are read together."""
MOST_ATTEMPTS = 1000
"""Times that a trainer may have started anew in one log."""
LARGEST_STEP = 1 << 53
"""From there on a step, read as a number, is no longer exact."""
A_LOOK = 64 << 20
"""Bytes of a log that are read before other logs have their turn."""
SHOWN = 80


def shown(value: object) -> str:
    """``repr`` of what a log says, cut to what a message can hold.

    >>> len(shown("x" * 1_000_000)), shown(10**10_000)
    (80, 'a very large integer')
    """
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "a very large integer"
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def parsed(text: str) -> JSON:
    """The value of JSON ``text``. Raises ``ValueError`` with what is wrong with it.

    >>> parsed("[" * 200_000)
    Traceback (most recent call last):
        ...
    ValueError: a JSON line that is nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("a JSON line that is nested too deeply") from None
    except json.JSONDecodeError:
        raise ValueError("a half-written JSON line") from None
    except ValueError:
        raise ValueError("a JSON line with an integer of thousands of digits") from None


def open_regular(path: Path) -> IO[bytes]:
    """``path``, open for reading without a buffer. Raises ``OSError`` if it is no regular file.

    A pipe or a device in the place of a log would never be opened, or never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path}: is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)
