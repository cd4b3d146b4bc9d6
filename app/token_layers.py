"""Shares of layers as one bar: the largest by name, the others together."""

from __future__ import annotations

import math
from collections.abc import Mapping

from . import format as fmt
from .health import GREY
from .markup import Markup, el, joined

MOST = 4
"""Layers shown by name in one bar."""

OTHERS = "others"
"""What the layers that were not recorded by name have together."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D9CC2B", "#6A51A3", "#8C6D31")
"""Okabe-Ito without the one that means danger, its yellow darkened a little; two more for layers of a second bar."""


def largest(shares: Mapping[str, float]) -> list[str]:
    """At most :data:`MOST` layers by share, the largest first."""
    finite = [name for name, share in shares.items() if math.isfinite(share) and share > 0 and name != OTHERS]
    return sorted(finite, key=lambda name: -shares[name])[:MOST]


def bar(title: str, shares: Mapping[str, float], colours: Mapping[str, str]) -> Markup:
    """A title, the bar, and its legend in numbers; empty where no share is known."""
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
    """A colour for each layer that any of two bars names: a layer in both has one colour."""
    names = dict.fromkeys(name for shares in tables for name in largest(shares))
    return dict(zip(names, COLOURS, strict=False))
