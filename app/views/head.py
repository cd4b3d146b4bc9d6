"""The top of a run's page: who it is, how it is, why."""

from __future__ import annotations

import time

import streamlit as st

from rlwatch.records import Alert, RunInfo

from .. import control, pauses, queries, shell, story, window
from .. import format as fmt
from ..health import Health, judge
from ..markup import Markup, el, joined


def show(run_id: str) -> None:
    """Name, health, facts and the sentence why."""
    with shell.readable("This run"):
        run, now = queries.run(run_id), time.time()
        alerts, vitals = queries.alerts(run_id), queries.vitals(run)
        pause = pauses.pause_of(run, queries.commands(run_id), now)
        health = judge(run, alerts, now, vitals.pace, pause)
        ending = story.ending(run, health, now, vitals.pace)
        st.html(joined(_name(run), _facts(run, health, vitals.step_s, now), _why(alerts, ending)))
        _moved_on(run, due=control.reset_due(alerts), paused=pause is not None)


def _name(run: RunInfo) -> Markup:
    project = el("span", f"{fmt.shorten(run.project, 60)} / ", cls="rl-project")
    return el("div", project, fmt.shorten(run.name or run.run_id, 240), cls="rl-name")


def _facts(run: RunInfo, health: Health, step_s: float | None, now: float) -> Markup:
    facts = [
        _fact("step", fmt.step(run.last_step)),
        _fact("", f"{fmt.duration(step_s)}/step" if step_s is not None else ""),
        _fact("last step", fmt.age(run.last_ts, now)),
        _fact("attempt", str(run.attempt)),
        _fact("started", fmt.age(run.created_at, now)),
        _fact("source", fmt.shorten(run.source, 40)),
        _fact("host", fmt.shorten(run.host, 40)),
        _fact("tags", fmt.shorten(", ".join(run.tags), 80)),
        _fact("id", run.run_id if run.name else ""),
    ]
    return el("div", word(health), *facts, cls="rl-facts")


def word(health: Health) -> Markup:
    """Shape, in its colour, and word."""
    look = health.look
    return el("span", el("span", look.shape, style=f"color:{look.colour}"), f" {health.word.value}", cls="rl-word")


def _fact(label: str, value: str) -> Markup:
    if not value:
        return Markup()
    return el("span", el("span", f"{label} " if label else "", cls="label"), value)


def _why(alerts: list[Alert], ending: str) -> Markup:
    clauses = [*story.clauses(alerts), *filter(None, [ending])]
    label = "Why" if clauses else "Last alarm"
    clauses = clauses or [text for text in [story.past(alerts)] if text]
    if not clauses:
        return Markup()
    arrow = el("span", "→", cls="arrow")
    parts = [part for clause in clauses for part in (arrow, clause)][1:]
    return el("div", el("span", label, cls="label"), *parts, cls="rl-why")


def _moved_on(run: RunInfo, *, due: bool, paused: bool) -> None:
    """Redraw the page's controls when they no longer show the run's state, its length, what is due or a pause."""
    shows = (run.run_id, run.state.value, run.attempt, window.limit(queries.outline(run).last), due, paused)
    before = st.session_state.get("head-shows")
    st.session_state["head-shows"] = shows
    if before is not None and before[0] == run.run_id and before != shows:
        st.rerun()
