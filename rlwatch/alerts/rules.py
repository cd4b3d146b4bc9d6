"""Alert rules: which findings become alerts, after how many steps, and who is told.

The words are those of Prometheus alerting rules (``for``, ``keep_firing_for``, labels), except that
durations are counted in step numbers: a rule says the same of a live run and of a replay, and of a log
with one row every ten steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlwatch.alerts import checks
from rlwatch.catalogue import kinds
from rlwatch.records import Finding, Severity

WARNING_STEPS = 10
"""By default a warning must last this many steps: one odd step is not news. A critical one is told at once."""

FORECAST_STEPS = 2
"""By default a forecast of a failure must last this many steps: each is smoothed over rows already."""

KEEP_STEPS = 20
"""By default an alert outlives its condition by this many steps: a flickering one is one episode."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Turns findings into at most one alert per kind at a time.

    Parameters
    ----------
    name
        Letters, digits, ``_``, ``.`` and ``-``; part of the alert's identity.
    kinds, detectors
        Which findings it is about; empty means all.
    except_kinds
        Kinds it leaves to other rules.
    min_severity
        Findings below it count as absent.
    for_steps
        How long the condition must hold without a gap before the alert fires: it fires at the first
        evaluated step s with ``s - since >= for_steps``, where ``since`` is the first step it held. 0 fires
        at once.
    for_critical
        The same for a finding that is critical, at most ``for_steps``; None: as ``for_steps``.
    keep_firing_for
        How long a firing alert outlives its condition: it resolves at the first evaluated step s with
        ``s - gone >= keep_firing_for``, where ``gone`` is the first step without the condition. If the
        condition returns before that, the alert simply goes on and nobody is told twice.
    severity
        Overrides the finding's severity in the alert.
    labels
        Free text for receivers to route by.
    channels
        Names of the notifiers to tell; empty records the alert and tells nobody.
    repeat_minutes
        Says again that it fires, so often, until it is over or somebody acknowledges it; 0: once is enough.
    escalate_after_minutes, escalate_after_steps
        When nobody acknowledged it for so long after it was told (minutes), or so many steps after it fired or got
        worse; whichever comes first. 0: never.
    escalate_to, escalate_severity
        What escalating does: tells these channels too, at this severity if it is higher.
    only_live
        Repeats, escalates and tells late only while the run is live: of a run that ended nobody is told again.

    Raises
    ------
    ConfigError
        If a value makes no sense.

    >>> Rule("entropy", kinds=("entropy_collapse",), for_steps=10, for_critical=0).wait(Severity.CRITICAL)
    0
    """

    name: str
    kinds: tuple[str, ...] = ()
    detectors: tuple[str, ...] = ()
    min_severity: Severity = Severity.WARNING
    for_steps: int = 0
    keep_firing_for: int = 0
    severity: Severity | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    channels: tuple[str, ...] = ("console", "webhook")
    for_critical: int | None = None
    except_kinds: tuple[str, ...] = ()
    repeat_minutes: float = 0.0
    escalate_after_minutes: float = 0.0
    escalate_after_steps: int = 0
    escalate_to: tuple[str, ...] = ()
    escalate_severity: Severity | None = None
    only_live: bool = True

    def __post_init__(self) -> None:
        checks.rule_name(self.name)
        for key in ("kinds", "detectors", "channels", "except_kinds", "escalate_to"):
            object.__setattr__(self, key, checks.names(self.name, key, getattr(self, key)))
        for key in ("min_severity", "severity", "escalate_severity"):
            object.__setattr__(self, key, checks.severity(self.name, key, getattr(self, key)))
        for key in ("for_steps", "keep_firing_for", "for_critical", "escalate_after_steps"):
            checks.steps(self.name, key, getattr(self, key))
        for key in ("repeat_minutes", "escalate_after_minutes"):
            object.__setattr__(self, key, checks.minutes(self.name, key, getattr(self, key)))
        checks.flag(self.name, "only_live", self.only_live)
        checks.patience(self.name, self.for_steps, self.for_critical)
        after = self.escalate_after_minutes or self.escalate_after_steps
        checks.escalation(self.name, after, self.escalate_to, self.escalate_severity)
        object.__setattr__(self, "labels", checks.labels(self.name, self.labels))

    def matches(self, finding: Finding) -> bool:
        """Whether the rule is about this finding."""
        return (
            (not self.kinds or finding.kind in self.kinds)
            and finding.kind not in self.except_kinds
            and (not self.detectors or finding.detector in self.detectors)
            and finding.severity.rank >= self.min_severity.rank
        )

    def wait(self, severity: Severity) -> int:
        """Steps a finding of this severity must hold before the alert fires."""
        if severity is Severity.CRITICAL and self.for_critical is not None:
            return self.for_critical
        return self.for_steps


REPEAT_MINUTES = 240.0
"""By default a firing alert that nobody acknowledged is told again every four hours."""


USUAL: Mapping[str, Any] = {
    "for_steps": WARNING_STEPS,
    "for_critical": 0,
    "keep_firing_for": KEEP_STEPS,
    "repeat_minutes": REPEAT_MINUTES,
}
"""A rule as most are: a warning must last, a critical one need not."""
USUALLY = "non-finite entropy mismatch gradients kl no-signal reward length text throughput logging"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(USUALLY.split(), USUAL),
    # Maintenance, not an emergency: twice the patience, and no reminders.
    "reset-due": {"for_steps": 2 * WARNING_STEPS, "keep_firing_for": 2 * KEEP_STEPS},
    # Something that happened, not a state that must last: told at once.
    "reference": {"keep_firing_for": KEEP_STEPS},
    # Time is what a forecast is for: three rows of each step, two of a coarser log.
    "forecast": {**USUAL, "for_steps": FORECAST_STEPS},
    # While the counter stands no step goes by, so there is nothing to wait for.
    "standstill": {"keep_firing_for": KEEP_STEPS, "repeat_minutes": REPEAT_MINUTES},
    # A run that fell silent is not live, and this is the news.
    "heartbeat": {"repeat_minutes": REPEAT_MINUTES, "only_live": False},
}
"""The default rules but ``other``, in order: how patient each is. Which kinds it is about stands in the catalogue."""


def default_rules() -> tuple[Rule, ...]:
    """One rule per failure, one for whatever else is found, one for the run itself; info tells nobody.

    >>> [rule.name for rule in default_rules()]  # doctest: +NORMALIZE_WHITESPACE
    ['non-finite', 'entropy', 'mismatch', 'gradients', 'kl', 'no-signal', 'reward', 'length', 'text', 'throughput',
     'logging', 'reset-due', 'reference', 'forecast', 'standstill', 'heartbeat', 'other']
    """
    about = {name: tuple(kind.name for kind in kinds().values() if kind.rule == name) for name in SHAPES}
    named = tuple(Rule(name, kinds=about[name], **shape) for name, shape in SHAPES.items())
    return (*named, Rule("other", except_kinds=tuple(kind for rule in named for kind in rule.kinds), **USUAL))
