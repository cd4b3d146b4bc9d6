"""What applies to all rules: which alerts share a message, which are kept back, and when people sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta, tzinfo
from enum import StrEnum
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

from rlwatch.alerts.kinds import HEARTBEAT_KINDS
from rlwatch.alerts.rules import Rule, default_rules
from rlwatch.catalogue import kinds
from rlwatch.errors import ConfigError
from rlwatch.records import CRASH_FORECAST, Alert, Severity

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class GroupBy(StrEnum):
    """What alerts that begin together must share to be told in one message."""

    NONE = "none"
    RUN = "run"
    PROJECT = "project"


@dataclass(frozen=True, slots=True)
class Grouping:
    """``wait_s``: seconds a firing alert waits for others of its group. 0: those of one step share a message."""

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
    """From ``start`` to ``end`` (local times of ``time_zone``, over midnight if end <= start) only alerts of
    ``let_through`` and worse are told; the others when the hours are over, if they still hold then.

    ``days``: those on which the hours begin, of ``mon``...``sun``.
    """

    start: time
    end: time
    time_zone: str = "UTC"
    let_through: Severity = Severity.CRITICAL
    days: tuple[str, ...] = DAYS

    def __post_init__(self) -> None:
        self.zone()
        object.__setattr__(self, "let_through", _level("quiet_hours.let_through", self.let_through))
        wrong = [day for day in self.days if day not in DAYS]
        if wrong or not self.days:
            raise ConfigError(f"quiet_hours.days must be of {', '.join(DAYS)}, got {', '.join(wrong) or 'none'}")
        if self.start == self.end:
            raise ConfigError(f"quiet_hours: from and to are both {self.start:%H:%M}; leave the table out for none")

    def zone(self) -> tzinfo:
        """The time zone. Raises ``ConfigError`` for a name this machine does not know."""
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
        """When the hours end that ``now`` (Unix seconds) lies in; None outside of them.

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
    """While an alert of a kind in ``when`` fires at ``min_severity`` or worse, alerts of ``mutes`` on the same run
    (none named: of all other kinds) are kept back, up to the severity ``up_to``. They come when it is over and they
    went on without it (:mod:`rlwatch.alerts.settling`). What says that the run itself is gone is kept back only where
    its kind is named.
    """

    when: tuple[str, ...]
    mutes: tuple[str, ...] = ()
    min_severity: Severity = Severity.CRITICAL
    up_to: Severity = Severity.CRITICAL

    def __post_init__(self) -> None:
        for key in ("min_severity", "up_to"):
            object.__setattr__(self, key, _level(f"inhibit.{key}", getattr(self, key)))
        if not self.when:
            raise ConfigError("inhibit: when must name the kinds that keep others back, got none")
        both = [kind for kind in self.when if kind in self.mutes]
        if both:
            raise ConfigError(f"inhibit: {both[0]!r} cannot keep itself back; name it in when or in mutes")

    def inhibits(self, cause: Alert, symptom: Alert) -> bool:
        """Whether ``cause``, which fires, keeps ``symptom`` back."""
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
    """A crash keeps everything else back; a critical collapse what the catalogue says follows from it; a critical
    mismatch only the warnings among that; anything critical the forecast, for it has come true. A collapse itself is
    kept back by nothing but a crash.
    """
    book = tuple(kinds().values())
    heard = {kind.name for kind in book if kind.inhibits in ("all", "effects")}
    after = {kind.name: tuple(effect for effect in kind.leads_to if effect not in heard) for kind in book}
    collapses = [kind.name for kind in book if kind.inhibits == "effects" and after[kind.name]]
    return (
        # A process that died goes before a NaN: of two that keep each other back, the first is heard.
        *(Inhibition((kind.name,)) for kind in reversed(book) if kind.inhibits == "all"),
        *(Inhibition((name,), after[name]) for name in collapses),
        *(Inhibition((k.name,), after[k.name], up_to=Severity.WARNING) for k in book if k.inhibits == "warnings"),
        Inhibition(tuple(k for k in kinds() if k not in (CRASH_FORECAST, *HEARTBEAT_KINDS)), (CRASH_FORECAST,)),
    )


class _Usual(Sequence[Inhibition]):
    """:func:`default_inhibitions`, made at first use."""

    def __getitem__(self, at: Any) -> Any:
        return default_inhibitions()[at]

    def __len__(self) -> int:
        return len(default_inhibitions())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(other) == default_inhibitions()

    def __hash__(self) -> int:
        return hash(default_inhibitions())


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that decides who is told what and when."""

    rules: tuple[Rule, ...] = field(default_factory=default_rules)
    grouping: Grouping = Grouping()
    quiet_hours: tuple[QuietHours, ...] = ()
    inhibitions: Sequence[Inhibition] = _Usual()

    def rule(self, name: str) -> Rule | None:
        """The rule of that name; None if it is another process's."""
        return next((rule for rule in self.rules if rule.name == name), None)


def _level(key: str, value: object) -> Severity:
    try:
        return Severity(str(value))
    except ValueError:
        raise ConfigError(f"{key} must be info, warning or critical, got {value!r}") from None


def inhibitors(alerts: Sequence[Alert], firing: Sequence[Alert], inhibitions: Sequence[Inhibition]) -> dict[str, Alert]:
    """Alert id -> the alert that keeps it back.

    Inhibitions are taken in order, and what is itself kept back keeps nothing back: so of two that would
    silence each other one is heard.
    """
    kept: dict[str, Alert] = {}
    for inhibition in inhibitions:
        for cause in sorted(firing, key=lambda alert: (alert.onset_step, alert.alert_id)):
            if cause.alert_id not in kept:
                muted = [a for a in alerts if a.alert_id not in kept and inhibition.inhibits(cause, a)]
                kept |= {symptom.alert_id: cause for symptom in muted}
    return kept
