"""The legend of a coloured response: the scale with its ends, and the looks that are not on it."""

from __future__ import annotations

from collections.abc import Sequence

from . import format as fmt
from .markup import Markup, el
from .token_scale import Level, Quantity

DEEPEST = 62
"""Per cent of the colour at the end of the scale, as in ``response.js``."""

HATCHED = {"nan": (45, "NaN"), "inf": (90, "Inf or −Inf")}
"""Direction of the hatching (degrees) and name of what is not finite, as in ``response.css``."""

_STOPS = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Places along the scale where the bar takes a colour, as parts of its end."""


def legend(quantity: Quantity | None, end: float, colours: tuple[str, str], levels: Sequence[Level]) -> Markup:
    """The scale, what it is of, and swatches of what is on no scale, if there is any; ``None``: nothing measured."""
    parts = [] if quantity is None else [_scale(quantity, end, colours), el("span", quantity.says, cls="label")]
    kinds = {level.removeprefix("-") for level in levels if isinstance(level, str)}
    parts += [_hatched(*HATCHED[kind]) for kind in HATCHED if kind in kinds]
    if any(level is None for level in levels):
        parts.append(el("span", el("span", "abc", cls="rl-missing"), "not measured"))
    parts.append(el("span", el("span", "abc", cls="rl-culprit"), "culprit"))
    return el("div", *parts, cls="rl-legend")


def _scale(quantity: Quantity, end: float, colours: tuple[str, str]) -> Markup:
    """``−3.2 ▓▒░▒▓ 3.2 nats``: the bar is linear in the quantity."""
    if not end:
        return el("span", f"{quantity.name}: no value other than 0")
    bar = el("span", cls="rl-scale", style=f"background:linear-gradient(to right,{_stops(quantity, colours)})")
    high = " ".join(filter(None, (fmt.number(end), quantity.unit)))
    return el("span", fmt.number(-end) if quantity.signed else "0", bar, high)


def _stops(quantity: Quantity, colours: tuple[str, str]) -> str:
    below, above = colours
    places = [(at, above) for at in _STOPS]
    if quantity.signed:
        places = [*((-at, below) for at in reversed(_STOPS)), *places]
    return ",".join(_stop(at, colour, quantity) for at, colour in places)


def _stop(at: float, colour: str, quantity: Quantity) -> str:
    depth = DEEPEST * (abs(at) ** 0.5 if quantity.root else abs(at))
    place = 50 * (1 + at) if quantity.signed else 100 * at
    return f"color-mix(in srgb,{colour} {depth:.0f}%,transparent) {place:.0f}%"


def _hatched(degrees: int, name: str) -> Markup:
    pattern = f"repeating-linear-gradient({degrees}deg,#D55E00 0 2px,transparent 2px 5px)"
    return el("span", el("span", cls="swatch", style=f"background:{pattern}"), name)
