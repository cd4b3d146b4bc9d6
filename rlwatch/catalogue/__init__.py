"""The catalogue of failures: everything that is known of a kind of finding, in one entry of ``kinds.toml``.

The detectors' registry, default alert rules and inhibitions, the veto of a reset, advice, labels and the tables in
``docs/`` derive from it; no other place may list kinds.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from rlwatch.errors import ConfigError
from rlwatch.patterns import lazy_pattern
from rlwatch.records import JSON, Severity

REACH = 300
"""Number of steps within which an effect follows its cause, unless a kind sets its own.

Published collapses by mismatch, entropy or likelihood took 40 to 300 steps from their first sign.
"""
ROOM = "rlwatch.detectors."
"""Package to which the names of detectors in entries are relative."""


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of finding (detected problem): an entry of ``kinds.toml``, whose head documents each field."""

    name: str
    title: str
    cause: str
    happened: str
    meaning: str = ""
    family: str = ""
    detector: str = ""
    severity: Severity = Severity.CRITICAL
    critical_when: str = ""
    rule: str = "other"
    collapse: bool = False
    outside: bool = False
    drifts: bool = False
    mute: bool = False
    symptom: bool = False
    hides: str = ""
    mechanism: bool = False
    side: str = ""
    inhibits: str = ""
    leads_to: tuple[str, ...] = ()
    reach: int = REACH
    source: str = ""
    do: tuple[Mapping[str, str], ...] = ()

    @property
    def label(self) -> str:
        """Title of the kind within a sentence: ``entropy collapse``, ``NaN or infinity``, ``KL to the reference
        saturated``.
        """
        first, _, rest = self.title.partition(" ")
        return f"{first.lower() if first.istitle() else first}{' ' if rest else ''}{rest}"

    @property
    def undone(self) -> bool:
        """Return whether the first action against this failure is to roll back: the policy itself is lost."""
        return bool(self.do) and self.do[0]["action"] == "roll-back"

    @property
    def accumulates(self) -> bool:
        """Return whether the kind is about a distance that grows in every run, such as KL to the reference.

        Its onset is the step at which the distance began to grow, not the step at which the run failed.
        """
        return self.side == "distance"


@cache
def kinds() -> Mapping[str, FindingKind]:
    """Return every kind of finding by name, in the order of the catalogue."""
    return {name: _kind(name, table) for name, table in _read("kinds.toml").items()}


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of a run (a hyperparameter or a part of its set-up): an entry of ``knobs.toml``, which documents each
    field.
    """

    name: str
    title: str
    metrics: tuple[str, ...] = ()
    options: tuple[re.Pattern[str], ...] = ()
    commands: tuple[str, ...] = ()
    hurts: str = "both"
    least: float = 1.5
    harm: float = 3.0
    shows: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    usually: tuple[str, ...] = ()
    outside: bool = False
    large: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    do: tuple[Mapping[str, str], ...] = ()

    @property
    def signs(self) -> tuple[int, ...]:
        """Directions of a change that hurt: 1 for up, -1 for down."""
        return {"up": (1,), "down": (-1,)}.get(self.hurts, (1, -1))

    @property
    def leads_to(self) -> tuple[str, ...]:
        """Kinds of findings that may follow a change of this setting: all but those that point to another setting."""
        others = {kind for knob in knobs().values() if knob.name != self.name for kind in knob.shows}
        return tuple(name for name in kinds() if name not in others or name in self.also)


@cache
def knobs() -> Mapping[str, Knob]:
    """Return every known setting (hyperparameter) by name, in the order of the catalogue."""
    return {name: _knob(name, table) for name, table in _read("knobs.toml").items()}


@cache
def actions() -> Mapping[str, Mapping[str, JSON]]:
    """Return id -> table of each action in the catalogue that can be recommended against a failure."""
    return _read("actions.toml")


def entry(name: str) -> FindingKind:
    """Return the catalogue's entry for a kind of finding; for an unknown kind, one made from its name.

    >>> entry("kl_drift").title, entry("my_kind").label
    ('Drift from the reference', 'my kind')
    """
    known = kinds().get(name)
    if known is not None:
        return known
    words = re.sub("[_-]", " ", name)
    return FindingKind(name, words.capitalize(), words.capitalize(), f"{words} was found")


@cache
def collapse_kinds() -> frozenset[str]:
    """Return the kinds of findings that, while critical, mean that the policy is unfit to become a reference."""
    return frozenset(name for name, kind in kinds().items() if kind.collapse)


def reported_by(detector: str) -> tuple[FindingKind, ...]:
    """Return the catalogue's entries that a detector reports; ``detector``: ``module.Class`` below
    ``rlwatch.detectors``.
    """
    return tuple(kind for kind in kinds().values() if kind.detector == detector)


def detector_class(kind: FindingKind) -> Any:
    """Return the class of the detector that reports a kind of finding. Raises ``ConfigError`` where there is no such
    class.
    """
    module, _, name = kind.detector.rpartition(".")
    try:
        return getattr(import_module(ROOM + module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"the catalogue's entry {kind.name} names the detector {kind.detector!r}: {error}") from error


def _kind(name: str, table: Mapping[str, Any]) -> FindingKind:
    fields = dict(table)
    fields["severity"] = Severity(fields["severity"])
    fields["leads_to"] = tuple(fields.get("leads_to", ()))
    fields["do"] = _uses(fields["do"])
    try:
        return FindingKind(name=name, **fields)
    except TypeError as error:
        raise ConfigError(f"the catalogue's entry {name} has a field that does not exist: {error}") from error


def _knob(name: str, table: Mapping[str, Any]) -> Knob:
    fields: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in table.items()}
    fields["options"] = tuple(map(lazy_pattern, fields.get("options", ())))
    fields["do"] = _uses(fields["do"])
    try:
        return Knob(name=name, **fields)
    except TypeError as error:
        raise ConfigError(f"the catalogue's hyperparameter {name} has a field that does not exist: {error}") from error


def _uses(table: Any) -> tuple[Mapping[str, str], ...]:
    """Return the actions that an entry names, with the texts that differ for it."""
    return tuple({"action": one} if isinstance(one, str) else one for one in table)


def _read(file: str) -> dict[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
