"""Rules: which findings become alerts, after how many steps, and which channels are notified.

The terms are those of Prometheus alerting rules (``for``, ``keep_firing_for``, labels), except that durations are
counted in step numbers: so a rule means the same for a live run, a replay, and a log with one row every ten steps. An
:class:`AlertingConfig` adds what applies to all rules: which alerts share a message, which are held back because of
another (inhibition), and quiet hours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta, tzinfo
from enum import StrEnum
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

from rlwatch.catalogue import kinds
from rlwatch.errors import ConfigError
from rlwatch.records import CRASH_FORECAST, JSON, Alert, Finding, Severity
from rlwatch.wording import nearest

SILENT, CRASHED = "run_silent", "run_crashed"
HEARTBEAT_KINDS = (SILENT, CRASHED)
"""Kinds that no detector reports: the watchman judges them from the store (:mod:`rlwatch.monitor.watchman`)."""


def builtin_kinds() -> tuple[str, ...]:
    """Return the kinds of findings that exist without plugins."""
    return tuple(kinds())


def unknown_kinds(
    rules: Iterable[Rule],
    inhibitions: Iterable[Inhibition] = (),
    actions: Iterable[Mapping[str, JSON]] = (),
    known: Sequence[str] | None = None,
) -> list[str]:
    """Return one sentence for each kind of finding that a rule, inhibition or action names and no detector reports.

    ``actions``: tables of actions in the configuration. ``known``: kinds that exist; None: those without plugins.
    """
    known = builtin_kinds() if known is None else known
    named = [(f"rule {rule.name!r}", kind) for rule in rules for kind in (*rule.kinds, *rule.except_kinds)]
    named += [("inhibit", kind) for inhibition in inhibitions for kind in (*inhibition.when, *inhibition.mutes)]
    named += [
        (f"action {name!r}", kind) for name, about in ((a["name"], a["kinds"]) for a in actions) for kind in about
    ]
    problems = []
    for who, kind in named:
        if kind not in known:
            near = nearest(kind, known)
            hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(known)}"
            problems.append(f"{who} names the kind {kind!r}, which no detector reports; {hint}")
    return problems


# Checks of a rule's values; each raises ``ConfigError`` with the rule, the key and the value.

_RULE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_rule_name(value: object) -> None:
    """Check the name of a rule, which is part of an alert's id and of a TOML key. Raises ``ConfigError``."""
    if not isinstance(value, str) or not _RULE_NAME.fullmatch(value):
        raise ConfigError(
            "a rule's name is made of letters, digits, '_', '.' and '-' and begins with a letter or digit: "
            f"got {value!r}"
        )


def check_names(rule: str, key: str, value: object) -> tuple[str, ...]:
    """Return ``value``, the list of names under ``key`` of the rule called ``rule``, as a tuple.

    Raises ``ConfigError`` with the rule, the key and the value if it is no list, or a name is empty.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"rule {rule!r}: {key} must be a list of names, got {value!r}")
    given = tuple(value)
    for name in given:
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"rule {rule!r}: {key} must hold non-empty names, got {name!r}")
    return given


def check_severity(rule: str, key: str, value: object) -> Severity | None:
    """Return ``value`` as a severity; None is allowed for every ``key`` but ``min_severity``.

    Raises ``ConfigError``, with the names of the ``rule`` and the key, for any other value.
    """
    if value is None and key != "min_severity":
        return None
    try:
        return Severity(str(value))
    except ValueError:
        raise ConfigError(f"rule {rule!r}: {key} must be info, warning or critical, got {value!r}") from None


def check_steps(rule: str, key: str, value: object) -> None:
    """Check that ``value`` is a whole number of steps >= 0, or None where ``key`` is ``for_critical``.

    Raises ``ConfigError`` with the name of the ``rule``, the key and the value.
    """
    if value is None and key == "for_critical":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"rule {rule!r}: {key} must be a number of steps >= 0, got {value!r}")


def check_minutes(rule: str, key: str, value: object) -> float:
    """Return ``value`` as a time in minutes >= 0.

    Raises ``ConfigError`` with the name of the ``rule``, the ``key`` and the value for any other value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"rule {rule!r}: {key} must be a number of minutes >= 0, got {value!r}")
    return float(value)


def check_flag(rule: str, key: str, value: object) -> None:
    """Check that ``value`` is True or False. Raises ``ConfigError`` with the name of the ``rule``, the ``key`` and the
    value.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"rule {rule!r}: {key} must be true or false, got {value!r}")


def check_escalation(rule: str, after: float, to: tuple[str, ...], level: Severity | None) -> None:
    """Check that the escalation of a rule has both a time and a target. Raises ``ConfigError``.

    ``after``: minutes or steps. ``to``: channels. ``level``: severity.
    """
    if after and not to and level is None:
        raise ConfigError(
            f"rule {rule!r}: it escalates, but to no channel and no severity: set escalate_to or escalate_severity"
        )
    if (to or level is not None) and not after:
        raise ConfigError(
            f"rule {rule!r}: it sets how to escalate, not when: set escalate_after_minutes or escalate_after_steps"
        )


def check_patience(rule: str, for_steps: int, for_critical: int | None) -> None:
    """Check that critical findings do not wait longer than others before an alert fires. Raises ``ConfigError``.

    ``for_steps``, ``for_critical``: steps for which a finding, or a critical finding, must hold; None: as others.
    """
    if for_critical is not None and for_critical > for_steps:
        raise ConfigError(f"rule {rule!r}: for_critical must not exceed for_steps ({for_steps}), got {for_critical!r}")


def check_labels(rule: str, value: object) -> dict[str, str]:
    """Return ``value``, the labels of the rule called ``rule``, as a table of text to text. Raises ``ConfigError`` for
    any other value.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"rule {rule!r}: labels must be a table of text, got {value!r}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ConfigError(f"rule {rule!r}: labels must be text to text, got {key!r}: {text!r}")
    return dict(value)


WARNING_STEPS = 10
"""Default number of steps that a warning must last: one odd step is no alert. A critical one is published at once."""

FORECAST_STEPS = 2
"""Default number of steps that a forecast of a failure must last: each is smoothed over rows already."""

KEEP_STEPS = 20
"""Default number of steps by which an alert outlives its condition: a flickering one is one alert."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert rule: turns findings into at most one alert for each kind of finding at a time.

    Parameters
    ----------
    name
        Letters, digits, ``_``, ``.`` and ``-``; part of the alert's id.
    kinds, detectors
        Findings of this rule; empty means all.
    except_kinds
        Kinds that other rules handle.
    min_severity
        Findings below it count as absent.
    for_steps
        Number of steps for which the condition must hold without a gap before the alert fires: it fires at the first
        evaluated step s with ``s - since >= for_steps``, where ``since`` is the first step it held. 0 fires at once.
    for_critical
        Number of steps for a finding that is critical, at most ``for_steps``; None: as ``for_steps``.
    keep_firing_for
        Number of steps by which a firing alert outlives its condition: it resolves at the first evaluated step s with
        ``s - gone >= keep_firing_for``, where ``gone`` is the first step without the condition. If the condition
        returns before that, the alert continues and no channel is notified twice.
    severity
        Overrides the finding's severity in the alert.
    labels
        Free text for receivers to route by.
    channels
        Names of the channels to notify; empty records the alert without a notification.
    repeat_minutes
        Interval of repeats until the alert is over or acknowledged; 0: none.
    escalate_after_minutes, escalate_after_steps
        Time without acknowledgement after which the alert escalates: minutes after it was published, or steps after it
        fired or got worse, whichever comes first. 0: never.
    escalate_to, escalate_severity
        Effect of escalating: these channels are notified too, at this severity if it is higher.
    only_live
        Repeat, escalate and publish late only while the run is live.

    Raises
    ------
    ConfigError
        If a value is not valid.

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
        check_rule_name(self.name)
        for key in ("kinds", "detectors", "channels", "except_kinds", "escalate_to"):
            object.__setattr__(self, key, check_names(self.name, key, getattr(self, key)))
        for key in ("min_severity", "severity", "escalate_severity"):
            object.__setattr__(self, key, check_severity(self.name, key, getattr(self, key)))
        for key in ("for_steps", "keep_firing_for", "for_critical", "escalate_after_steps"):
            check_steps(self.name, key, getattr(self, key))
        for key in ("repeat_minutes", "escalate_after_minutes"):
            object.__setattr__(self, key, check_minutes(self.name, key, getattr(self, key)))
        check_flag(self.name, "only_live", self.only_live)
        check_patience(self.name, self.for_steps, self.for_critical)
        after = self.escalate_after_minutes or self.escalate_after_steps
        check_escalation(self.name, after, self.escalate_to, self.escalate_severity)
        object.__setattr__(self, "labels", check_labels(self.name, self.labels))

    def matches(self, finding: Finding) -> bool:
        """Return whether the alert rule covers ``finding``, by its kind, detector and severity."""
        return (
            (not self.kinds or finding.kind in self.kinds)
            and finding.kind not in self.except_kinds
            and (not self.detectors or finding.detector in self.detectors)
            and finding.severity.rank >= self.min_severity.rank
        )

    def wait(self, severity: Severity) -> int:
        """Return the number of steps for which a finding of this severity must hold before the alert fires."""
        if severity is Severity.CRITICAL and self.for_critical is not None:
            return self.for_critical
        return self.for_steps


REPEAT_MINUTES = 240.0
"""Default interval in minutes at which a firing alert that was not acknowledged is published again: four hours."""


USUAL: Mapping[str, Any] = {
    "for_steps": WARNING_STEPS,
    "for_critical": 0,
    "keep_firing_for": KEEP_STEPS,
    "repeat_minutes": REPEAT_MINUTES,
}
"""A typical rule: a warning must last, a critical finding need not."""
USUALLY = "non-finite entropy mismatch gradients kl no-signal reward length text throughput logging machine"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(USUALLY.split(), USUAL),
    # Maintenance, not an emergency: twice the patience, and no reminders.
    "reset-due": {"for_steps": 2 * WARNING_STEPS, "keep_firing_for": 2 * KEEP_STEPS},
    # An event, not a state that must last: published at once.
    "reference": {"keep_firing_for": KEEP_STEPS},
    # A forecast is useful only early: three rows of each step, two of a coarser log.
    "forecast": {**USUAL, "for_steps": FORECAST_STEPS},
    # No step passes while the counter is stalled, so there is nothing to wait for.
    "standstill": {"keep_firing_for": KEEP_STEPS, "repeat_minutes": REPEAT_MINUTES},
    # A silent run is not live, and exactly that is to be published.
    "heartbeat": {"repeat_minutes": REPEAT_MINUTES, "only_live": False},
}
"""The default rules except ``other``, in order, with their delays. The catalogue lists the kinds of each."""


@cache
def default_rules() -> tuple[Rule, ...]:
    """Return the default alert rules: one for each failure, one for all other findings, and one for heartbeats.

    Findings of severity info raise no alert.

    >>> [rule.name for rule in default_rules()]  # doctest: +NORMALIZE_WHITESPACE
    ['non-finite', 'entropy', 'mismatch', 'gradients', 'kl', 'no-signal', 'reward', 'length', 'text', 'throughput',
     'logging', 'machine', 'reset-due', 'reference', 'forecast', 'standstill', 'heartbeat', 'other']
    """
    about = {name: tuple(kind.name for kind in kinds().values() if kind.rule == name) for name in SHAPES}
    named = tuple(Rule(name, kinds=about[name], **shape) for name, shape in SHAPES.items())
    return (*named, Rule("other", except_kinds=tuple(kind for rule in named for kind in rule.kinds), **USUAL))


# What applies to all rules: which alerts share a message, which are held back, and quiet hours.

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class GroupBy(StrEnum):
    """The property that alerts which begin together must have in common to share a message: none, run or project."""

    NONE = "none"
    RUN = "run"
    PROJECT = "project"


@dataclass(frozen=True, slots=True)
class AlertGrouping:
    """Settings for sharing messages between alerts.

    ``by``: property that they must have in common. ``wait_s``: seconds for which a firing alert waits for others; 0:
    alerts of one step share a message. Raises ``ConfigError`` for an invalid value.
    """

    by: GroupBy = GroupBy.RUN
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.by not in set(GroupBy):
            raise ConfigError(f"grouping.by must be one of {', '.join(GroupBy)}, got {self.by!r}")
        object.__setattr__(self, "by", GroupBy(self.by))
        if isinstance(self.wait_s, bool) or not 0 <= self.wait_s <= 3600:
            raise ConfigError(f"grouping.wait_s must be 0 to 3600 seconds, got {self.wait_s!r}")


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Hours from ``start`` to ``end`` in which only alerts of ``let_through`` and worse are published.

    Times are local to ``time_zone``, over midnight if end <= start. Other alerts follow afterwards, if they still hold.
    ``days``: days of ``mon``...``sun`` on which the hours begin. Raises ``ConfigError`` for an invalid value.
    """

    start: time
    end: time
    time_zone: str = "UTC"
    let_through: Severity = Severity.CRITICAL
    days: tuple[str, ...] = DAYS

    def __post_init__(self) -> None:
        self.zone()
        object.__setattr__(self, "let_through", _severity_of("quiet_hours.let_through", self.let_through))
        wrong = [day for day in self.days if day not in DAYS]
        if wrong or not self.days:
            raise ConfigError(f"quiet_hours.days must be of {', '.join(DAYS)}, got {', '.join(wrong) or 'none'}")
        if self.start == self.end:
            raise ConfigError(f"quiet_hours: from and to are both {self.start:%H:%M}; leave the table out for none")

    def zone(self) -> tzinfo:
        """Return the time zone of the quiet hours. Raises ``ConfigError`` for a name this machine does not know."""
        if self.time_zone == "UTC":
            return UTC
        try:
            return ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError):
            raise ConfigError(
                f"quiet_hours.time_zone: no time zone {self.time_zone!r} on this machine; give a name as in "
                "'Europe/Berlin' (pip install tzdata where none is known)"
            ) from None

    def until(self, now: float) -> float | None:
        """Return the end (Unix seconds) of the quiet hours that are active at ``now`` (Unix seconds); None outside of
        them.

        >>> night = QuietHours(time(22), time(7))
        >>> night.until(23 * 3600.0) / 3600, night.until(12 * 3600.0)
        (31.0, None)
        """
        zone = self.zone()
        local = datetime.fromtimestamp(now, zone)
        for begins in (local.date() - timedelta(days=1), local.date()):
            ends = begins + timedelta(days=0 if self.start < self.end else 1)
            first, last = (datetime.combine(day, at, zone) for day, at in ((begins, self.start), (ends, self.end)))
            if DAYS[begins.weekday()] in self.days and first.timestamp() <= now < last.timestamp():
                return last.timestamp()
        return None


@dataclass(frozen=True, slots=True)
class Inhibition:
    """Rule that holds back alerts of some kinds while an alert of a kind in ``when`` fires on the same run.

    They are published later if they persist without the cause (:mod:`rlwatch.alerts.dispatch`). Alerts of the heartbeat
    are held back only where their kind is named.

    Parameters
    ----------
    when
        Kinds of the causes.
    mutes
        Kinds that are held back; empty: all other kinds.
    min_severity
        Lowest severity of the cause.
    up_to
        Highest severity that is held back.

    Raises
    ------
    ConfigError
        If a value is not valid, or a kind would hold itself back.
    """

    when: tuple[str, ...]
    mutes: tuple[str, ...] = ()
    min_severity: Severity = Severity.CRITICAL
    up_to: Severity = Severity.CRITICAL

    def __post_init__(self) -> None:
        for key in ("min_severity", "up_to"):
            object.__setattr__(self, key, _severity_of(f"inhibit.{key}", getattr(self, key)))
        if not self.when:
            raise ConfigError("inhibit: when must name the kinds that keep others back, got none")
        both = [kind for kind in self.when if kind in self.mutes]
        if both:
            raise ConfigError(f"inhibit: {both[0]!r} cannot keep itself back; name it in when or in mutes")

    def inhibits(self, cause: Alert, symptom: Alert) -> bool:
        """Return whether the alert ``cause``, which fires, holds back the alert ``symptom``."""
        return (
            cause.run_id == symptom.run_id
            and cause.kind in self.when
            and cause.severity.rank >= self.min_severity.rank
            and symptom.kind not in self.when
            and symptom.severity.rank <= self.up_to.rank
            and (symptom.kind in self.mutes if self.mutes else symptom.kind not in HEARTBEAT_KINDS)
        )


@cache
def default_inhibitions() -> tuple[Inhibition, ...]:
    """Return the default rules by which some alerts hold back others.

    A crash holds back everything else; a critical collapse its effects in the catalogue; a critical mismatch only the
    warnings among its effects; any critical alert the forecast, which has come true. Only a crash holds back a
    collapse.
    """
    book = tuple(kinds().values())
    causes = {kind.name for kind in book if kind.inhibits in ("all", "effects")}
    after = {kind.name: tuple(effect for effect in kind.leads_to if effect not in causes) for kind in book}
    collapses = [kind.name for kind in book if kind.inhibits == "effects" and after[kind.name]]
    return (
        # A dead process goes before a NaN: of two alerts that hold each other back, the first is published.
        *(Inhibition((kind.name,)) for kind in reversed(book) if kind.inhibits == "all"),
        *(Inhibition((name,), after[name]) for name in collapses),
        *(Inhibition((k.name,), after[k.name], up_to=Severity.WARNING) for k in book if k.inhibits == "warnings"),
        Inhibition(tuple(k for k in kinds() if k not in (CRASH_FORECAST, *HEARTBEAT_KINDS)), (CRASH_FORECAST,)),
    )


class _DefaultInhibitions(Sequence[Inhibition]):
    """:func:`default_inhibitions`, computed at first use."""

    def __getitem__(self, at: Any) -> Any:
        return default_inhibitions()[at]

    def __len__(self) -> int:
        return len(default_inhibitions())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(other) == default_inhibitions()

    def __hash__(self) -> int:
        return hash(default_inhibitions())


@dataclass(frozen=True, slots=True)
class AlertingConfig:
    """All settings that decide which alerts are published, where and when; ``forecast``: whether runs are forecast at
    all.
    """

    rules: tuple[Rule, ...] = field(default_factory=default_rules)
    grouping: AlertGrouping = AlertGrouping()
    quiet_hours: tuple[QuietHours, ...] = ()
    inhibitions: Sequence[Inhibition] = _DefaultInhibitions()
    forecast: bool = True

    def rule(self, name: str) -> Rule | None:
        """Return the alert rule called ``name``; None if no rule of this process has that name."""
        return next((rule for rule in self.rules if rule.name == name), None)


def _severity_of(key: str, value: object) -> Severity:
    try:
        return Severity(str(value))
    except ValueError:
        raise ConfigError(f"{key} must be info, warning or critical, got {value!r}") from None


def inhibitors(alerts: Sequence[Alert], firing: Sequence[Alert], inhibitions: Sequence[Inhibition]) -> dict[str, Alert]:
    """Return alert id -> firing alert that holds back the notifications of this alert; other ``alerts`` are left out.

    ``firing``: alerts that fire. ``inhibitions``: rules by which some alerts hold back others; they apply in order. An
    alert that is held back holds back no other, so of two that would hold back each other one is published.
    """
    kept: dict[str, Alert] = {}
    for inhibition in inhibitions:
        for cause in sorted(firing, key=lambda alert: (alert.onset_step, alert.alert_id)):
            if cause.alert_id not in kept:
                muted = [a for a in alerts if a.alert_id not in kept and inhibition.inhibits(cause, a)]
                kept |= {symptom.alert_id: cause for symptom in muted}
    return kept
