"""The list of runs, most urgent first: which of them is in danger, since when, and why."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from rlwatch.records import Alert, AlertState, RunInfo

from . import format as fmt
from . import layout, queries, table
from .health import ENDED as ENDED_WORDS
from .health import LOOKS, Health, Word, judge, since_words
from .layout import GoToCompare, GoToRun
from .markup import el
from .queries import Fleet, Vitals

RUN_COLUMNS = (
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


OVER = frozenset({Word.FINISHED, Word.CRASHED, Word.DEAD, Word.STALE, *ENDED_WORDS.values()})
"""Words of runs that go on no more: drawn fainter once nobody needs to look."""


ENDED = frozenset({Word.FINISHED, Word.CRASHED, *ENDED_WORDS.values()})
"""Words of runs about which nothing is to be forecast any more; a silent one may come back."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run and its health now."""

    run: RunInfo
    health: Health
    vitals: Vitals
    alerts: Sequence[Alert]


def run_entries(fleet: Fleet, now: float) -> list[RunEntry]:
    """All runs, those that need a person first; among equals the one heard of last first."""
    found = []
    for run in fleet.runs:
        vitals, alerts = fleet.vitals[run.run_id], fleet.alerts.get(run.run_id, ())
        health = judge(
            run, alerts, now, vitals.pace, fleet.pauses.get(run.run_id), verdict=fleet.verdicts.get(run.run_id)
        )
        found.append(RunEntry(run, health, vitals, alerts))
    return sorted(found, key=lambda entry: (*entry.health.order, -(entry.run.last_ts or entry.run.created_at)))


def matching(
    all_entries: Sequence[RunEntry], *, projects: Sequence[str] = (), states: Sequence[str] = (), text: str = ""
) -> list[RunEntry]:
    """Entries of the chosen projects and states (none chosen: all) that contain ``text`` somewhere."""
    return [
        entry
        for entry in all_entries
        if (not projects or entry.run.project in projects)
        and (not states or entry.health.word.value in states)
        and text.strip().casefold() in _searchable(entry)
    ]


def _searchable(entry: RunEntry) -> str:
    run = entry.run
    return " ".join((run.run_id, run.project, run.name, run.source, run.host, *run.tags, why(entry))).casefold()


def headline(all_entries: Sequence[RunEntry]) -> str:
    """``2 runs need you``."""
    count = sum(entry.health.needs_you for entry in all_entries)
    if count:
        return f"{fmt.plural(count, 'run')} {'needs' if count == 1 else 'need'} you"
    return "No run needs you"


def why(entry: RunEntry) -> str:
    """Reason for the run's state, else its last alarm."""
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


def _risk(entry: RunEntry) -> table.Cell:
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


def run_row(entry: RunEntry, now: float, picked: bool | None = None) -> table.Row:
    """The entry as a row of :data:`COLUMNS`, with a box if it can be ``picked`` for a comparison."""
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
        picked=picked,
        quiet=not entry.health.needs_you and entry.health.word in OVER,
    )


# Nothing recorded yet: what to add to a trainer, ready to copy.

TRL = """\
from rlwatch.integrations.trl import watch
watch(trainer, project="my-project")
trainer.train()"""

LOOP = """\
import rlwatch
run = rlwatch.init(project="my-project")
run.log({"reward": r, "entropy": h, "grad_norm": g}, step=step)"""


def show_no_runs() -> None:
    """The three lines, the store to write to, and other ways to begin."""
    url = queries.store_url()
    st.html(el("div", "No runs yet", cls="rl-head"))
    st.caption("This page fills by itself as soon as a run writes to the store below.")
    st.html(el("div", "Add three lines to a trainer", cls="rl-family"))
    trl, loop = st.columns(2, gap="large")
    with trl:
        st.caption("TRL")
        st.code(TRL, language="python")
    with loop:
        st.caption("A loop of your own")
        st.code(LOOP, language="python")
    st.caption("and start it where it finds this store")
    st.code(f"export RLWATCH_STORE={shlex.quote(_absolute(url))}", language="bash")
    st.html(el("div", "Or begin without a trainer", cls="rl-family"))
    scan, demo = st.columns(2, gap="large")
    with scan:
        st.caption("Look at a log you already have")
        st.code("rlwatch scan train.log", language="bash")
    with demo:
        st.caption("Watch a small training run collapse")
        st.code("rlwatch demo", language="bash")


def _absolute(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().absolute())


def page(go_to_run: GoToRun, go_to_compare: GoToCompare) -> None:
    """The list of runs, refreshed while somebody looks."""
    live = st.session_state.get("runs-live", True)
    st.fragment(_body, run_every=layout.REFRESH_S if live else None)(live, go_to_run, go_to_compare)


def _body(live: bool, go_to_run: GoToRun, go_to_compare: GoToCompare) -> None:
    with layout.readable():
        fleet, now = queries.fleet(), time.time()
        if fleet.runs:
            _runs_list(run_entries(fleet, now), now, go_to_run, go_to_compare)
            if st.session_state.get("runs-live", live) != live:
                st.rerun()  # how often to look is decided outside the part that is looked at again
        elif not fleet.unreadable:
            show_no_runs()
        _unreadable(fleet)


def _runs_list(entries: list[RunEntry], now: float, go_to_run: GoToRun, go_to_compare: GoToCompare) -> None:
    head, store = st.columns([3, 2], vertical_alignment="bottom")
    head.html(el("div", headline(entries), cls="rl-head"))
    with store:
        running = sum(entry.health.word in {Word.DANGER, Word.WATCH, Word.PAUSED, Word.HEALTHY} for entry in entries)
        layout.store_line(f"{fmt.plural(len(entries), 'run')}, {running} live")
    shown = _filtered(entries) if len(entries) > 1 else entries
    if not shown:
        st.caption("No run matches these filters.")
        return
    several = len(entries) > 1
    picked = _picked(entries, go_to_compare) if several else []
    rows = [run_row(entry, now, entry.run.run_id in picked if several else None) for entry in shown]
    opened = table.show("runs", RUN_COLUMNS, rows, on_pick=_pick)
    if opened is not None:
        go_to_run(opened)


PICKED = "picked-runs"


def _pick(run_id: str) -> None:
    """Tick a run's box, or clear it."""
    picked = list(st.session_state.get(PICKED, ()))
    st.session_state[PICKED] = [one for one in picked if one != run_id] if run_id in picked else [*picked, run_id]


def _picked(entries: Sequence[RunEntry], go_to_compare: GoToCompare) -> list[str]:
    """Runs whose boxes are ticked, in that order, also where a filter hides them; the button that compares them."""
    known = {entry.run.run_id for entry in entries}
    picked = [run_id for run_id in st.session_state.get(PICKED, ()) if run_id in known]
    if picked:
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            label = f"Compare {fmt.plural(len(picked), 'run')}" if len(picked) > 1 else "Compare: tick another run"
            if st.button(label, key="compare", type="primary", disabled=len(picked) < 2):
                go_to_compare(picked)
            st.button("Clear", key="compare-clear", type="tertiary", on_click=st.session_state.pop, args=(PICKED, None))
    return picked


def _filtered(entries: list[RunEntry]) -> list[RunEntry]:
    project, state, text, live = st.columns([3, 3, 4, 1], vertical_alignment="center")
    projects = project.multiselect(
        "Project",
        sorted({entry.run.project for entry in entries}),
        key="project",
        placeholder="project",
        label_visibility="collapsed",
        bind="query-params",
    )
    states = state.multiselect(
        "State",
        [word.value for word in Word],
        key="state",
        placeholder="state",
        label_visibility="collapsed",
        bind="query-params",
    )
    search = text.text_input(
        "Search", key="search", placeholder="search", label_visibility="collapsed", bind="query-params"
    )
    live.toggle("Live", value=True, key="runs-live")
    return matching(entries, projects=projects, states=states, text=search or "")


def _unreadable(fleet: queries.Fleet) -> None:
    if not fleet.unreadable:
        return
    with st.expander(f"{fmt.plural(len(fleet.unreadable), 'run')} cannot be read", icon=":material/error:"):
        rows = [
            table.Row([table.text(fmt.shorten(name, 80)), table.text(why)])
            for name, why in sorted(fleet.unreadable.items())
        ]
        table.show("unreadable", (table.Column("run", "long"), table.Column("why", "long")), rows)
