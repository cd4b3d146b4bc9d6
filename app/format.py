"""Numbers, steps, ages, names and evidence as text: written the same on every page.

Three significant digits; thousands parted by a narrow no-break space; NaN and the infinities by name.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping

from rlwatch.records import JSON, Event
from rlwatch.wording import plural, words

__all__ = [
    "NOTHING", "THIN", "age", "chance", "duration", "event_words", "evidence_line", "evidence_lines", "evidence_value",
    "number", "percent", "plural", "shorten", "step", "words",
]  # fmt: skip

THIN = "\u202f"
"""Narrow no-break space: parts thousands, and a number from its unit."""

NOTHING = "–"
"""Shown where nothing was measured."""

_TURNS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_AGES = ((1.0, "s", 60.0), (60.0, "min", 3600.0), (3600.0, "h", 86400.0), (86400.0, "d", math.inf))
"""Seconds in a unit, its name, and the seconds that are one of the next."""


def number(value: float | None, digits: int = 3) -> str:
    r"""A measured value with ``digits`` significant digits.

    >>> number(0.4136), number(12483.0), number(-0.00002), number(0.0)
    ('0.414', '12\u202f500', '−2.00e−5', '0')
    >>> number(float("nan")), number(float("-inf")), number(None)
    ('NaN', '−Inf', '–')
    """
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "−Inf"
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    exponent = int(power)
    if not -4 <= exponent <= 5:
        return _signed(f"{mantissa}e{exponent}")
    return _signed(f"{float(f'{mantissa}e{power}'):,.{max(0, digits - 1 - exponent)}f}")


def _signed(text: str) -> str:
    return text.replace("-", "−").replace(",", THIN)


def percent(share: float | None) -> str:
    r"""A share in per cent, two significant digits.

    >>> percent(0.4136), percent(-0.0002), percent(1.0), percent(float("nan")), percent(None)
    ('41\u202f%', '−0.020\u202f%', '100\u202f%', 'NaN', '–')
    """
    if share is None or not math.isfinite(share):
        return number(share)
    return f"{number(100 * share, 3 if abs(share) >= 0.995 else 2)}{THIN}%"


def chance(value: float | None) -> str:
    r"""A forecast chance: whole per cents, and no more certainty than there can be.

    >>> chance(0.734), chance(0.002), chance(0.999), chance(None)
    ('73\u202f%', '<\u202f1\u202f%', '>\u202f99\u202f%', '–')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    if not 0.01 <= value <= 0.99:
        return f"{'<' if value < 0.5 else '>'}{THIN}{1 if value < 0.5 else 99}{THIN}%"
    return f"{100 * value:.0f}{THIN}%"


def step(value: int | None) -> str:
    r"""A step, exact.

    >>> step(12480)
    '12\u202f480'
    """
    return NOTHING if value is None else f"{value:,}".replace(",", THIN)


def duration(seconds: float | None) -> str:
    r"""A length of time, as short as it may be said.

    >>> duration(0.034), duration(38), duration(2460), duration(None)
    ('34\u202fms', '38\u202fs', '41\u202fmin', '–')
    """
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if round(seconds * 1000) < 1000:
        return f"{max(0.0, seconds) * 1000:.0f}{THIN}ms"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}{THIN}s"
    size, unit = next((size, unit) for size, unit, end in _AGES if round(seconds / size) * size < end)
    return f"{seconds / size:.0f}{THIN}{unit}"


def age(then: float | None, now: float) -> str:
    r"""Time since ``then`` (both Unix seconds); clocks that disagree read as "now".

    >>> age(1000.0, 1180.0), age(1000.0, 999.0), age(None, 5.0)
    ('3\u202fmin ago', 'now', '–')
    """
    if not then or not math.isfinite(then):
        return NOTHING
    elapsed = now - then
    return "now" if elapsed < 1 else f"{duration(round(elapsed) if elapsed < 10 else elapsed).replace('.0', '')} ago"


def shorten(text: str, limit: int) -> str:
    """At most ``limit`` characters, the cut shown; line ends, control characters and marks that turn the
    reading direction become spaces.

    >>> shorten("a very long name", 8)
    'a very …'
    """
    clean = "".join(" " if unicodedata.category(c) == "Cc" or c in _TURNS else c for c in text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


# The numbers a finding, an alert or an event carries, as text.


def evidence_lines(body: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Name and value of each entry."""
    return [(name.replace("_", " "), evidence_value(entry)) for name, entry in body.items()]


def evidence_line(body: Mapping[str, JSON], limit: int = 400) -> str:
    """``optimizer clear · kl 0.310``, at most ``limit`` characters."""
    return shorten(" · ".join(f"{name} {entry}" for name, entry in evidence_lines(body)), limit)


def event_words(event: Event) -> tuple[str, str]:
    """Name of an event and the words to it: of a command its result, by whom and why; else the entries."""
    report = event.body.get("report")
    if event.kind != "command" or not isinstance(report, Mapping):
        return words(event.kind), evidence_line(event.body)
    summary = report.get("summary") or evidence_line(report)
    by, why = str(event.body.get("by") or ""), str(event.body.get("why") or "")
    parts = [str(summary), f"by {by}" if by else "", why]
    return words(str(event.body.get("command", "command"))), shorten(" · ".join(filter(None, parts)), 400)


def evidence_value(entry: JSON) -> str:
    """One entry: numbers as everywhere, text as it is, the rest as JSON."""
    if isinstance(entry, bool) or entry is None:
        return {True: "yes", False: "no", None: "none"}[entry]
    if isinstance(entry, int):
        return step(entry)
    if isinstance(entry, float):
        return number(entry)
    return entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)
