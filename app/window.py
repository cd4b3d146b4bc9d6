"""Which steps the charts show, kept in the address so that neither a refresh nor a colleague loses it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

FROM, TO = "from", "to"


@dataclass(frozen=True, slots=True)
class Window:
    """Steps ``low`` to ``high``, both included; ``follows`` the newest step where no end was chosen."""

    low: int
    high: int
    follows: bool = True


def limit(last: int) -> int:
    """A round number just above ``last``, so that a slider up to it keeps still while a run goes on.

    >>> [limit(n) for n in (0, 7, 99, 312, 4812, 100_000)]
    [10, 10, 100, 320, 5000, 100000]
    """
    unit = 10
    while last > 20 * unit:  # 10, 20, 50, 100, ...
        unit = unit * 5 // 2 if str(unit)[0] == "2" else unit * 2
    return max(unit, -(-last // unit) * unit)


def read(params: Mapping[str, str], first: int, last: int) -> Window:
    """The window that the address asks for, within ``first`` to ``last``; nonsense reads as everything."""
    low, high = _int(params.get(FROM)), _int(params.get(TO))
    low = first if low is None else min(max(first, low), last)
    if high is None or high >= last:
        return Window(low, last, follows=high is None)
    return Window(low, max(high, low), follows=False)


def write(params: MutableMapping[str, str], low: int, high: int, first: int, end: int) -> None:
    """Put a chosen range into the address; the slider's ends (``first``, ``end``) mean "no limit"."""
    for name, value, free in ((FROM, low, low <= first), (TO, high, high >= end)):
        if free:
            params.pop(name, None)
        else:
            params[name] = str(value)


def _int(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
