"""What a post-mortem tells, apart from how it looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlwatch.diagnosis import Diagnosis
from rlwatch.records import JSON, Alert, Command, Event, Finding
from rlwatch.report.curves import Curve


@dataclass(frozen=True, slots=True)
class Chart:
    """A metric to draw: its canonical name, unit, the source's own name, its line, and its level in health."""

    name: str
    unit: str
    known_as: str
    curve: Curve
    baseline: float | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A row of the timeline. ``number`` marks it in the charts (0: not drawn); ``level`` is a severity or ""."""

    step: int
    text: str
    level: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """A run's story.

    ``head`` maps labels to texts in the order to show them; ``culprits`` are rows of tokens blamed for a
    gradient; ``missing`` says what was not measured, and why that matters; ``config`` holds no secrets.
    """

    title: str
    status: str
    head: Mapping[str, str] = field(default_factory=dict)
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    timeline: tuple[Moment, ...] = ()
    charts: tuple[Chart, ...] = ()
    culprits: tuple[Mapping[str, JSON], ...] = ()
    findings: tuple[Finding, ...] = ()
    alerts: tuple[Alert, ...] = ()
    commands: tuple[Command, ...] = ()
    events: tuple[Event, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    made_at: str = ""
