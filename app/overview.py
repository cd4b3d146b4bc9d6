"""The list of runs as rows: most urgent first, each with the reason (nothing is read or drawn here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlwatch.records import Alert, AlertState, RunInfo

from . import format as fmt
from . import table
from .health import LOOKS, Health, Word, judge, since_words
from .queries import Fleet, Vitals

COLUMNS = (
    table.Column("state", "tight"),
    table.Column("run", "long"),
    table.Column("step", "right tight"),
    table.Column("reward", "right tight"),
    table.Column("", "tight wide"),
    table.Column("entropy", "right tight wide"),
    table.Column("risk, 50 steps", "right tight middling"),
    table.Column("why", "long middling"),
    table.Column("last step", "right tight"),
)


OVER = frozenset({Word.FINISHED, Word.CRASHED, Word.DEAD, Word.STALE})
"""Words of runs that go on no more: drawn fainter once nobody needs to look."""


ENDED = frozenset({Word.FINISHED, Word.CRASHED})
"""Words of runs about which nothing is to be forecast any more; a silent one may come back."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run and its health now."""

    run: RunInfo
    health: Health
    vitals: Vitals
    alerts: Sequence[Alert]


def entries(fleet: Fleet, now: float) -> list[Entry]:
    """All runs, those that need a person first; among equals the one heard of last first."""
    found = []
    for run in fleet.runs:
        vitals, alerts = fleet.vitals[run.run_id], fleet.alerts.get(run.run_id, ())
        health = judge(run, alerts, now, vitals.pace, fleet.pauses.get(run.run_id))
        found.append(Entry(run, health, vitals, alerts))
    return sorted(found, key=lambda entry: (*entry.health.order, -(entry.run.last_ts or entry.run.created_at)))


def matching(
    all_entries: Sequence[Entry], *, projects: Sequence[str] = (), states: Sequence[str] = (), text: str = ""
) -> list[Entry]:
    """Entries of the chosen projects and states (none chosen: all) that contain ``text`` somewhere."""
    return [
        entry
        for entry in all_entries
        if (not projects or entry.run.project in projects)
        and (not states or entry.health.word.value in states)
        and text.strip().casefold() in _searchable(entry)
    ]


def _searchable(entry: Entry) -> str:
    run = entry.run
    return " ".join((run.run_id, run.project, run.name, run.source, run.host, *run.tags, why(entry))).casefold()


def headline(all_entries: Sequence[Entry]) -> str:
    """``2 runs need you``."""
    count = sum(entry.health.needs_you for entry in all_entries)
    if count:
        return f"{fmt.plural(count, 'run')} {'needs' if count == 1 else 'need'} you"
    return "No run needs you"


def why(entry: Entry) -> str:
    """Why the run is in its state, else what its last alarm was."""
    if entry.health.why:
        return entry.health.why
    open_alerts = [alert for alert in entry.alerts if alert.state is AlertState.FIRING]
    if open_alerts:  # the run ended in them
        worst = max(open_alerts, key=lambda alert: (alert.severity.rank, -alert.onset_step))
        more = f", and {len(open_alerts) - 1} more" if len(open_alerts) > 1 else ""
        return f"unresolved: {since_words(worst, entry.run.last_step)}{more}"
    last = last_alarm(entry.alerts)
    return "" if last is None else f"resolved: {since_words(last, last.resolved_step)}"


def last_alarm(alerts: Sequence[Alert]) -> Alert | None:
    """The alarm told last that is over."""
    over = [alert for alert in alerts if alert.state is AlertState.RESOLVED and alert.fired_at is not None]
    return max(over, key=lambda alert: alert.onset_step, default=None)


def _risk(entry: Entry) -> table.Cell:
    """The chance of a failure within 50 steps, with a shape where it is an alarm; none of a run that is over."""
    forecast = entry.vitals.forecast
    if forecast is not None and forecast.limits_only and forecast.alarm and entry.health.word not in ENDED:
        return table.mark(LOOKS[Word.WATCH].shape, LOOKS[Word.WATCH].colour, "near a limit")
    if forecast is None or forecast.p50 is None or entry.health.word in ENDED:
        title = "" if forecast is None else forecast.absent or forecast.limits_only
        return table.text(fmt.NOTHING, quiet=True, title=title)
    chance = fmt.chance(forecast.p50)
    if not forecast.alarm:
        return table.text(chance, quiet=True)
    return table.mark(LOOKS[Word.WATCH].shape, LOOKS[Word.WATCH].colour, chance)


def row(entry: Entry, now: float) -> table.Row:
    """The entry as a row of :data:`COLUMNS`."""
    run, vitals = entry.run, entry.vitals
    return table.Row(
        cells=[
            table.word(entry.health.word),
            table.run_link(run.run_id, run.project, run.name),
            table.text(fmt.step(run.last_step)),
            table.text(fmt.number(vitals.reward.value), vitals.reward.trend),
            table.spark(vitals.reward.points, vitals.reward.bad),
            table.text(fmt.number(vitals.entropy.value)),
            _risk(entry),
            table.text(fmt.shorten(why(entry), 160), quiet=not entry.health.needs_you),
            table.text(fmt.age(run.last_ts, now)),
        ],
        opens=run.run_id,
        quiet=not entry.health.needs_you and entry.health.word in OVER,
    )
