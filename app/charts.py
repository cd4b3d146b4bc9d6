"""Range of steps that a page shows, read from its address, and the colours of its charts."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

FROM, TO = "from", "to"
FARTHEST = 2**53 - 1
"""Largest integer that a browser represents exactly; no slider and no field takes more."""


@dataclass(frozen=True, slots=True)
class StepRange:
    """Range of steps from ``low`` to ``high``, both included; ``follows`` the newest step if no end was chosen."""

    low: int
    high: int
    follows: bool = True


def slider_end(last: int) -> int:
    """Return a round number just above ``last``, so that a slider up to it does not move while a run goes on.

    >>> [slider_end(n) for n in (0, 7, 99, 312, 4812, 100_000)]
    [10, 10, 100, 320, 5000, 100000]
    >>> slider_end(FARTHEST - 1) == FARTHEST
    True
    """
    unit = 10
    while last > 20 * unit:  # 10, 20, 50, 100, ...
        unit = unit * 5 // 2 if str(unit)[0] == "2" else unit * 2
    end = max(unit, -(-last // unit) * unit)
    return end if last > FARTHEST else min(end, FARTHEST)


def slider_key(run_id: str, end: int) -> str:
    """Return the widget key of a run's step slider up to ``end``; a new key makes Streamlit draw a new slider."""
    return f"steps-{run_id}-{end}"


def read_window(params: Mapping[str, str], first: int, last: int) -> StepRange:
    """Return the range of steps in ``params``, the query of the page's address, limited to ``first`` to ``last``.

    It is the whole range if the address has none or an invalid one.
    """
    low, high = _int(params.get(FROM)), _int(params.get(TO))
    low = first if low is None else min(max(first, low), last)
    if high is None or high >= last:
        return StepRange(low, last, follows=high is None)
    return StepRange(low, max(high, low), follows=False)


def write_window(params: MutableMapping[str, str], low: int, high: int, first: int, end: int) -> None:
    """Put the chosen range of steps, ``low`` to ``high``, into ``params``, the query of the page's address.

    The slider's ends (``first``, ``end``) mean "no limit".
    """
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


@dataclass(frozen=True, slots=True)
class Ink:
    """Colours (``#rrggbb``) of charts that are legible on the theme's background."""

    line: str
    quiet: str
    grid: str
    band: str
    text: str
    bad: str


LIGHT = Ink(line="#0072B2", quiet="#6E6E6E", grid="#EAEAEA", band="#0072B2", text="#31333F", bad="#C04000")
DARK = Ink(line="#56B4E9", quiet="#A6A6A6", grid="#333333", band="#56B4E9", text="#FAFAFA", bad="#FF7A33")
