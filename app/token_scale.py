"""Colours for the numbers of tokens and layers: the scale of a response, its legend, and the bars of layers.

All colours are distinguishable for colour-blind readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import format as fmt
from .health import GREY
from .markup import Markup, el, joined
from .tokens import Response

ORANGE, GREEN = "#E69F00", "#009E73"
"""Okabe-Ito colours: orange and the theme's blue for signed quantities, green for all others."""

Level = float | str | None
"""A level from -1 to 1, or ``"nan"``, ``"inf"``, ``"-inf"``; None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class TokenMeasure:
    """A quantity measured for each token, with its unit and explanation.

    ``signed``: blue below 0, orange above. ``root``: colours follow the square root of the magnitude, so that one huge
    value does not hide all others.
    """

    name: str
    unit: str = ""
    meaning: str = ""
    signed: bool = True
    root: bool = True


CONTRIBUTION = TokenMeasure("contribution", "", "what the token adds to the gradient norm")
QUANTITIES = (
    CONTRIBUTION,
    TokenMeasure("log ratio", "nats", "logp now − logp old: change of the policy since sampling"),
    TokenMeasure("entropy", "nats", "entropy of the policy at the token", signed=False, root=False),
    TokenMeasure("mismatch", "nats", "logp old − logp rollout: mismatch between trainer and rollout engine"),
    TokenMeasure("advantage", "", "advantage of the token", root=False),
)
BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}


def values(name: str, response: Response) -> np.ndarray | None:
    """Return the quantity ``name`` for each token of the response, (N,), or None if it was not measured."""
    if name == "log ratio":
        difference = _difference(response, "logp", "old_logp")
        ratio = response.column("ratio")
        with np.errstate(all="ignore"):
            return difference if difference is not None or ratio is None else np.log(ratio)
    if name == "mismatch":
        difference = _difference(response, "old_logp", "rollout_logp")
        return _difference(response, "logp", "rollout_logp") if difference is None else difference
    return response.column(name)


def _difference(response: Response, one: str, other: str) -> np.ndarray | None:
    a, b = response.column(one), response.column(other)
    with np.errstate(invalid="ignore"):
        return None if a is None or b is None else a - b


def measured(response: Response) -> list[str]:
    """Return the names of the quantities that were measured for the tokens of this response."""
    return [quantity.name for quantity in QUANTITIES if values(quantity.name, response) is not None]


def scale_end(found: np.ndarray) -> float:
    """Return the end of the colour scale for the values ``found``: the largest finite magnitude, or 0."""
    finite = np.abs(found[np.isfinite(found)])
    return float(finite.max()) if len(finite) else 0.0


def levels(found: np.ndarray, end: float, quantity: TokenMeasure) -> list[Level]:
    """Return the position of each value in ``found`` on the colour scale of ``quantity`` that ends at ``end``."""
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.abs(found) / (end or 1.0), 1.0)
        places = np.sign(found) * (np.sqrt(size) if quantity.root else size)
    return [_level(value, place) for value, place in zip(found.tolist(), places.tolist(), strict=True)]


def _level(value: float, place: float) -> Level:
    if np.isfinite(value):
        return round(place, 2)
    return "nan" if np.isnan(value) else ("inf" if value > 0 else "-inf")


# The legend of a coloured response: the scale with its ends, and the styles of values off the scale.

DEEPEST = 62
"""Saturation in per cent at the end of the scale, as in ``response.js``."""

HATCHED = {"nan": (45, "NaN"), "inf": (90, "Inf or -Inf")}
"""Hatching angle (degrees) and name of values that are not finite, as in ``response.css``."""

_STOPS = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Colour stops of the bar, as parts of the scale's end."""


def legend(quantity: TokenMeasure | None, end: float, colours: tuple[str, str], levels: Sequence[Level]) -> Markup:
    """Return the colour scale of a response as HTML, with the quantity's name and swatches of values off the scale.

    ``levels``: positions of the response's tokens on the scale, which ends at ``end``. ``quantity``: None if nothing
    was measured.
    """
    parts = [] if quantity is None else [_scale(quantity, end, colours), el("span", quantity.meaning, cls="label")]
    kinds = {level.removeprefix("-") for level in levels if isinstance(level, str)}
    parts += [_hatched(*HATCHED[kind]) for kind in HATCHED if kind in kinds]
    if any(level is None for level in levels):
        parts.append(el("span", el("span", "abc", cls="rl-missing"), "not measured"))
    parts.append(el("span", el("span", "abc", cls="rl-culprit"), "culprit"))
    return el("div", *parts, cls="rl-legend")


def _scale(quantity: TokenMeasure, end: float, colours: tuple[str, str]) -> Markup:
    """Return the scale, as ``−3.2 ▓▒░▒▓ 3.2 nats``; the bar is linear in the quantity."""
    if not end:
        return el("span", f"{quantity.name}: no value other than 0")
    bar = el("span", cls="rl-scale", style=f"background:linear-gradient(to right,{_stops(quantity, colours)})")
    high = " ".join(filter(None, (fmt.number(end), quantity.unit)))
    return el("span", fmt.number(-end) if quantity.signed else "0", bar, high)


def _stops(quantity: TokenMeasure, colours: tuple[str, str]) -> str:
    below, above = colours
    places = [(at, above) for at in _STOPS]
    if quantity.signed:
        places = [*((-at, below) for at in reversed(_STOPS)), *places]
    return ",".join(_stop(at, colour, quantity) for at, colour in places)


def _stop(at: float, colour: str, quantity: TokenMeasure) -> str:
    depth = DEEPEST * (abs(at) ** 0.5 if quantity.root else abs(at))
    place = 50 * (1 + at) if quantity.signed else 100 * at
    return f"color-mix(in srgb,{colour} {depth:.0f}%,transparent) {place:.0f}%"


def _hatched(degrees: int, name: str) -> Markup:
    pattern = f"repeating-linear-gradient({degrees}deg,#D55E00 0 2px,transparent 2px 5px)"
    return el("span", el("span", cls="swatch", style=f"background:{pattern}"), name)


# Shares of layers as one bar: the largest by name, the others together.

MOST = 4
"""Most layers shown by name in one bar."""

OTHERS = "others"
"""Label of the sum of the layers that are not shown by name."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D9CC2B", "#6A51A3", "#8C6D31")
"""Okabe-Ito colours without the colour of danger, the yellow darkened; two more for layers of a second bar."""


def largest(shares: Mapping[str, float]) -> list[str]:
    """Return at most :data:`MOST` layers, those with the largest shares first."""
    finite = [name for name, share in shares.items() if math.isfinite(share) and share > 0 and name != OTHERS]
    return sorted(finite, key=lambda name: -shares[name])[:MOST]


def bar(title: str, shares: Mapping[str, float], colours: Mapping[str, str]) -> Markup:
    """Return as HTML a bar that shows the shares of layers, in these colours, with its title and legend; empty if no
    share is known.
    """
    named = largest(shares)
    others = [share for name, share in shares.items() if name not in named and math.isfinite(share)]
    parts = [(name, shares[name], colours.get(name, GREY)) for name in named]
    if sum(others) > 0:
        parts.append(("all others", sum(others), GREY))
    if not parts:
        return Markup()
    pieces = [
        el("span", style=f"background:{colour};width:{100 * share:.2f}%", title=f"{name}: {fmt.percent(share)}")
        for name, share, colour in parts
    ]
    return joined(
        el("div", title, cls="rl-quiet"),
        el("div", *pieces, cls="rl-layers"),
        el("div", *(_entry(name, share, colour) for name, share, colour in parts), cls="rl-legend"),
    )


def _entry(name: str, share: float, colour: str) -> Markup:
    swatch = el("span", cls="swatch", style=f"background:{colour}")
    return el("span", swatch, f"{fmt.shorten(name, 60)} {fmt.percent(share)}", cls="entry")


def palette(*tables: Mapping[str, float]) -> dict[str, str]:
    """Return a colour for each layer shown by name in any of several bars, so that it has one colour in all of them."""
    names = dict.fromkeys(name for shares in tables for name in largest(shares))
    return dict(zip(names, COLOURS, strict=False))
