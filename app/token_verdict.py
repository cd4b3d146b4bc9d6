"""Tables of a localised step: the shares of its units, and the effect of possible cures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import streamlit as st

from rlwatch.records import JSON

from . import format as fmt
from . import table
from .markup import el
from .token_steps import LocalisationReport, number_of

UNIT_COLUMNS = (
    table.TableColumn("contribution", "long"),
    table.TableColumn("share of the norm", "right tight"),
    table.TableColumn("along the gradient", "right tight middling"),
    table.TableColumn("against the gradient", "right tight middling"),
    table.TableColumn("tokens", "right tight"),
)
CURE_COLUMNS = (
    table.TableColumn("intervention", "long"),
    table.TableColumn("norm", "right tight"),
    table.TableColumn("resulting norm", "right tight"),
    table.TableColumn("times", "right tight middling"),
)


def show_rollup(report: LocalisationReport | None) -> None:
    """Draw both tables, as far as the step has them."""
    if report is None:
        return
    units = [unit_row(unit) for unit in report.units]
    cures = [cure_row(cure) for cure in report.cures]
    if units:
        table.show("units", UNIT_COLUMNS, units)
        st.html(el("div", rollup_words(report), cls="rl-soft"))
    if cures:
        table.show("cures", CURE_COLUMNS, cures)
        st.html(el("div", "Recomputed with the changed coefficients, not estimated.", cls="rl-soft"))


def rollup_words(report: LocalisationReport) -> str:
    """Describe the sum of the shares, and the part of the excess that the listed tokens hold."""
    words = ["Shares of the gradient norm; they add up to 100 % minus the gap. Negative shares cancel."]
    if report.count:
        known = report.explained
        held = "" if known is None else f"; those listed hold {fmt.percent(known)} of their excess"
        words.append(f"{fmt.plural(report.count, 'token')} stand out{held}.")
    return " ".join(words)


def unit_row(unit: Mapping[str, JSON]) -> table.TableRow:
    """Return a unit as a row of :data:`UNIT_COLUMNS`."""
    level, name = str(unit.get("level") or ""), str(unit.get("name") or "")
    tokens = number_of(unit.get("tokens"))
    known = [number_of(unit.get(part)) for part in ("share", "up", "down")]
    return table.TableRow(
        [
            table.text(fmt.shorten(name, 80), fmt.shorten(level, 20) if level not in name else ""),
            *(table.text("" if part is None else fmt.percent(part)) for part in known),
            table.text(fmt.step(int(tokens)) if tokens is not None and math.isfinite(tokens) else ""),
        ]
    )


def cure_row(cure: Mapping[str, JSON]) -> table.TableRow:
    """Return a cure as a row of :data:`CURE_COLUMNS`."""
    before, after = number_of(cure.get("before")), number_of(cure.get("after"))
    times = after / before if before and after is not None else None
    shown: Sequence[float | None] = (before, after, times)
    return table.TableRow(
        [
            table.text(fmt.shorten(str(cure.get("action") or cure.get("kind") or ""), 160)),
            *(table.text("" if number is None else fmt.number(number)) for number in shown),
        ]
    )
