"""Pinned charts of a project: their order, sizes and combinations, and named layouts of them, kept in the store."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import streamlit as st

from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.ports import Series, Store
from rlwatch.records import AuditEntry

from .principal import Principal
from .queries import store, store_url

PINS_ACT, LAYOUT_ACT = "pins", "layout"
"""Actions of audit entries whose text holds project, pins and a name; the newest one of a project or name counts."""
MOST_PINS, LONGEST_NAME = 24, 60
SEEN_S = 5.0
"""Seconds until another user's change is visible."""
TOGETHER, DIVIDED = " + ", " ÷ "
_PIN = re.compile(r"(?P<body>.*?)(?: @(?P<span>[23]))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PinnedChart:
    """A pinned chart of one or two ``metrics``: both as lines, or their ``ratio``; ``span``: width in columns;
    ``pin``: its text.

    >>> PinnedChart.parse("kl ÷ reward @2", {"kl", "reward"})
    PinnedChart(pin='kl ÷ reward @2', metrics=('kl', 'reward'), ratio=True, span=2)
    """

    pin: str
    metrics: tuple[str, ...]
    ratio: bool = False
    span: int = 1

    @classmethod
    def parse(cls, pin: str, names: Collection[str]) -> PinnedChart | None:
        """Read the text of a pin; None unless all of its metrics are in ``names``, those of the run."""
        if pin in names:
            return cls(pin, (pin,))
        found = _PIN.fullmatch(pin)
        body, span = (pin, 1) if found is None else (found["body"], int(found["span"] or 1))
        for sign in ("", TOGETHER, DIVIDED):
            metrics = tuple(body.split(sign)) if sign else (body,)
            if len(metrics) <= 2 and all(name in names for name in metrics):
                return cls(pin, metrics, sign == DIVIDED, span)
        return None


def ratio(name: str, above: Series, below: Series) -> Series:
    """Return the series ``above`` divided by the series ``below``, called ``name``, over the rows that both have.

    A division by zero is infinite, or NaN.
    """
    _, at, below_at = np.intersect1d(above.seqs, below.seqs, assume_unique=False, return_indices=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = above.values[at] / below.values[below_at]
    return Series(name, above.steps[at], values, above.attempts[at], above.seqs[at])


# What the store keeps.


def pins_of(project: str) -> tuple[str, ...]:
    """Return the texts of the pinned charts of a project; empty if there are none or they cannot be read."""
    try:
        return _kept(store_url())[0].get(project, ())
    except RLWatchError:
        return ()


def layouts_of(project: str) -> dict[str, tuple[str, ...]]:
    """Return the texts of the pinned charts in each named layout of a project."""
    try:
        return _kept(store_url())[1].get(project, {})
    except RLWatchError:
        return {}


@st.cache_data(show_spinner=False, ttl=SEEN_S, max_entries=4)
def _kept(url: str) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, tuple[str, ...]]]]:  # noqa: ARG001
    pins: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, dict[str, tuple[str, ...]]] = {}
    for entry in store().audit():
        if entry.act not in (PINS_ACT, LAYOUT_ACT):
            continue
        try:
            content = json.loads(entry.text)
            project, names = str(content["project"]), tuple(map(str, content["names"]))
            name = str(content["name"]) if entry.act == LAYOUT_ACT else ""
        except (ValueError, KeyError, TypeError):
            continue  # of another version
        if entry.act == PINS_ACT:
            pins[project] = names
        elif names:
            layouts.setdefault(project, {})[name] = names
        else:
            layouts.get(project, {}).pop(name, None)
    return pins, layouts


def keep_pins(place: Store, project: str, names: Sequence[str], by: Principal) -> None:
    """Store ``names`` as the pinned charts of a project, for all users.

    ``place``: the store. Raises ``NotPermittedError`` unless ``by`` is an operator, and ``StoreError``.
    """
    _put(place, by, PINS_ACT, {"project": project, "names": list(names)[:MOST_PINS]})


def keep_layout(place: Store, project: str, name: str, names: Sequence[str], by: Principal) -> None:
    """Store pinned charts as a named layout of a project, for all users; without pins, remove it.

    ``place``: the store. Raises ``ConfigError`` for an empty or a long name, ``NotPermittedError`` unless ``by`` is an
    operator, and ``StoreError``.
    """
    name = " ".join(name.split())
    if not 0 < len(name) <= LONGEST_NAME:
        raise ConfigError(f"a layout has a name of 1 to {LONGEST_NAME} characters, got {len(name)}")
    _put(place, by, LAYOUT_ACT, {"project": project, "name": name, "names": list(names)[:MOST_PINS]})


def _put(place: Store, by: Principal, act: str, content: dict[str, object]) -> None:
    by.require_command()
    place.put_entry(AuditEntry(uuid.uuid4().hex, time.time(), by.name, act, json.dumps(content)))
    _kept.clear()
