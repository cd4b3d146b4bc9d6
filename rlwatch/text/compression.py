"""How well text compresses: loops far better than prose."""

from __future__ import annotations

import zlib

SHORTEST = 200
"""Bytes below which the header of the format decides the ratio."""

LONG = 10_000
"""Characters of the end of a text that :func:`repeats` looks at, and above which it does."""

LOOPING = 10.0
"""Compression ratio above which a text repeats itself."""


def zlib_ratio(text: str) -> float | None:
    """Bytes of ``text`` in UTF-8 over those after zlib at level 9; None below :data:`SHORTEST` bytes.

    English prose has 2 to 3.

    >>> round(zlib_ratio("!" * 4096), 3)
    146.286
    """
    raw = text.encode(errors="surrogatepass")
    return len(raw) / len(zlib.compress(raw, 9)) if len(raw) >= SHORTEST else None


def repeats(text: str) -> bool:
    """Whether ``text`` has more than 10,000 characters, the last 10,000 of which compress more than tenfold.

    slime's rule (``slime/utils/metric_utils.py``, ``has_repetition``).
    """
    ratio = zlib_ratio(text[-LONG:]) if len(text) > LONG else None
    return ratio is not None and ratio > LOOPING
