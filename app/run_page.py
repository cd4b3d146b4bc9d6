"""Page of one run: its state, the likely cause and remedies, its commands and charts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import streamlit as st

from rlwatch.analysis.runs import StoredRun
from rlwatch.control.commands import ROLLBACK
from rlwatch.diagnosis import Action, Cause, Diagnosis
from rlwatch.error_boundary import call_or, described
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.plugins import usable
from rlwatch.records import Alert, AlertState, Command, RunInfo, RunState
from rlwatch.state import explained, headline_of
from rlwatch.step_notes import StepNote
from rlwatch.wording import code_in

from . import (
    board,
    charts,
    commands,
    incident_acts,
    layout,
    pinned,
    queries,
    rollouts_page,
    run_about,
    run_board,
    run_forecast,
    run_history,
    run_stages,
)
from . import format as fmt
from .health import StatusWord, Word, ending_words, firing_clauses, judge, last_alarm_words, pause_of
from .layout import GoToTokens
from .markup import Markup, el, joined

FIRST = 3
"""Most recommended actions named in a line."""


def cause_line(diagnosis: Diagnosis) -> Markup:
    """Return as HTML the likeliest cause, and below it since when and why it is likely; or why it is unknown."""
    label = el("span", "Likely", cls="label")
    if not diagnosis.enough:
        return el("div", label, diagnosis.why_not, cls="rl-why")
    first = diagnosis.causes[0]
    began = f"step {fmt.step(first.onset_step)}"
    since = [] if fmt.names_step(first.title, first.onset_step) else [f"since {began}"]
    reasons = " · ".join([*since, f"{first.sure.words}: {first.why}"])
    return el("div", label, el("b", first.title), el("div", reasons, cls="rl-quiet"), cls="rl-why")


def do_line(diagnosis: Diagnosis) -> Markup:
    """Return the recommended actions as HTML, one a line; empty if no cause is certain enough to act on."""
    if not diagnosis.enough or not diagnosis.causes[0].actions:
        return Markup()
    first = diagnosis.causes[0]
    named = [el("div", f"{place} {action.name}") for place, action in enumerate(first.actions[:FIRST], 1)]
    withheld = el("div", first.withheld, cls="rl-quiet") if first.withheld else Markup()
    return el("div", el("span", "Do", cls="label"), *named, withheld, cls="rl-why")


def remedies(diagnosis: Diagnosis) -> Markup:
    """Return as HTML the summary of the likeliest cause, each action with its options, and other possible causes."""
    first, *others = diagnosis.causes
    return joined(
        el("div", first.summary, cls="rl-step"),
        el("ol", *map(_action, first.actions), cls="rl-do"),
        *(el("div", _other(other), cls="rl-quiet") for other in others),
    )


def _other(cause: Cause) -> str:
    return f"or: {cause.title} ({cause.sure.words}): {cause.summary}; {cause.why}"


def _action(action: Action) -> Markup:
    options = [
        el("div", el("span", f"{trainer} ", cls="rl-project"), code_in(text))
        for trainer, text in action.options.items()
    ]
    return el(
        "li",
        el("b", action.name),
        f" ({action.strength.value}). {action.what}",
        *options,
        el("div", f"{action.evidence} Source: {action.source}.", cls="rl-quiet"),
    )


# The likely cause of the run's failure, its remedies, and the post-mortem as a file.


def show_cause(run_id: str) -> None:
    """Draw the likely cause of a run's failure and what to do; folded, the verdict in full and all remedies."""
    with layout.readable("This run"), queries.store().at_once(run_id):
        run = queries.run(run_id)
        verdict = queries.verdict(run)
        diagnosis = explained(queries.diagnosis(run), verdict)
        more = verdict.text.removeprefix(verdict.brief).lstrip("; ")  # the rest is the headline, which is on top
        line = el("div", more[:1].upper() + more[1:], cls="rl-quiet") if more else Markup()
        if not diagnosis.causes:
            if line:
                st.html(joined(line))
            return
        st.html(joined(cause_line(diagnosis), do_line(diagnosis)))
        with st.expander("Causes and actions", key="remedies"):
            st.html(joined(line, remedies(diagnosis)))


# The sticky bar: state, headline, onset, and the buttons.


def show_verdict(run_id: str) -> None:
    """Draw the state of a run with its headline and onset."""
    with layout.readable("This run"), queries.store().at_once(run_id):
        run, now = queries.run(run_id), time.time()
        verdict = queries.verdict(run)
        health = judge(run, verdict, now, queries.vitals(run).pace, pause_of(run, queries.commands(run_id), now))
        headline = headline_of(verdict, explained(queries.diagnosis(run), verdict))
        since, refused = since_fact(run, health, headline), commands.impossible(run, layout.principal())
        why_not = el("div", refused, cls="rl-quiet rl-narrow") if refused else Markup()  # a phone has no tooltips
        st.html(joined(el("div", _shape(health), el("span", headline), since, cls="rl-verdict"), why_not))


def _shape(health: StatusWord) -> Markup:
    """Return the shape of the state without its word, with which the headline begins."""
    return el("span", f"{health.look.shape} ", style=f"color:{health.look.colour}")


def since_fact(run: RunInfo, health: StatusWord, headline: str) -> Markup:
    """Return ``since step 4 690, 122 steps ago`` as HTML, without the step if ``headline`` names it; empty if the
    state refers to no step.
    """
    if health.since is None:
        return Markup()
    ago, began = (run.last_step or 0) - health.since, f"step {fmt.step(health.since)}"
    named = fmt.names_step(headline, health.since)
    parts = [*([] if named else [f"since {began}"]), *([f"{fmt.plural(ago, 'step')} ago"] if ago > 0 else [])]
    return el("span", ", ".join(parts), cls="rl-since") if parts else Markup()


def _bar(run: RunInfo, every: float | None, go_to_tokens: GoToTokens, *, paused: bool) -> None:
    """Draw the verdict and the command buttons; the tooltip of a disabled button gives the reason."""
    with st.container(key="verdict"):
        _part(show_verdict, every, run.run_id)
        with st.container(horizontal=True, gap="small", key="verdict-buttons"):
            _first_button(run, paused=paused)
            _rollback_button(run)
            _acknowledge_button(run)
            _report_button(run)
            _tokens_button(run, go_to_tokens)


def _tokens_button(run: RunInfo, go_to_tokens: GoToTokens) -> None:
    """Draw the way to the tokens of the newest gradient spike, if one was localised."""
    newest = run_history.newest_localised(run.run_id)
    if newest is not None and st.button("Tokens", key="tokens", width="content"):
        go_to_tokens(run.run_id, int(newest.step or 0))


def _report_button(run: RunInfo) -> None:
    st.download_button(
        "Report",
        data=lambda: queries.report(run.run_id),
        file_name=f"{run.run_id}-report.html",
        mime="text/html",
        key="report",
        help="Post-mortem as one self-contained file: causes, actions, charts, tokens, findings",
        on_click="ignore",
        width="content",
    )


def _rollback_button(run: RunInfo) -> None:
    reason = commands.impossible(run, layout.principal())
    st.button(
        commands.FORMS[ROLLBACK].menu,
        key="rollback-open",
        on_click=commands.open_dialog,
        args=(run.run_id, ROLLBACK),
        disabled=bool(reason),
        help=reason or None,
        width="content",
    )


def _acknowledge_button(run: RunInfo) -> None:
    firing = [alert for alert in queries.alerts(run.run_id) if alert.state is AlertState.FIRING]
    reason = "" if layout.principal().may_command else layout.LOOK_ONLY
    reason = reason or ("" if firing else "No alert of this run is firing")
    st.button(
        "Acknowledge",
        key="acknowledge",
        on_click=_acknowledge,
        args=(firing,),
        disabled=bool(reason),
        help=reason or "You take on every alert of this run that fires",
        width="content",
    )


def _acknowledge(firing: Sequence[Alert]) -> None:
    try:
        kept = incident_acts.acknowledge_all(queries.store(), firing, by=layout.principal(), why="on the run's page")
    except RLWatchError as error:
        st.toast(f"Not acknowledged: {fmt.shorten(str(error), 200)}", icon=":material/error:")
        return
    st.toast(f"Acknowledged by {fmt.shorten(kept.by, 60)}", icon=":material/done_all:")


# The top of a run's page: name, health, reason.


def show_head(run_id: str) -> None:
    """Draw the head of a run's page: name, state, facts, and the sentence with the reason."""
    with layout.readable("This run"), queries.store().at_once(run_id):
        run, now = queries.run(run_id), time.time()
        alerts, vitals = queries.alerts(run_id), queries.vitals(run)
        pause = pause_of(run, queries.commands(run_id), now)
        verdict = queries.verdict(run)
        health = judge(run, verdict, now, vitals.pace, pause)
        ending = ending_words(run, health, now, vitals.pace)
        clauses = alerts if verdict.ongoing and verdict.standing is not None else []  # for ended runs see below
        st.html(joined(_name(run), _facts(run, health, vitals.step_s, now), _why(clauses, ending)))
        if st.session_state.get(CONTROLS_SHOW) not in (None, _shown(run, alerts, paused=pause is not None)):
            st.rerun()


def _name(run: RunInfo) -> Markup:
    project = el("span", f"{fmt.shorten(run.project, 60)} / ", cls="rl-project")
    name = run.name or run.run_id
    return el("div", project, fmt.shorten(name, 240), cls="rl-name", title=name)


def _facts(run: RunInfo, health: StatusWord, step_s: float | None, now: float) -> Markup:
    end, last = run_about.planned_steps(run), run.last_step or 0
    planned = end is not None and last <= end
    left = fmt.duration((end - last) * step_s) if planned and end is not None and step_s and not health.ended else ""
    facts = [
        _fact("", "" if run.state is RunState.RUNNING or health.word is Word.KILLED else run.state.value),
        _fact("step", fmt.step(run.last_step) + (f" of {fmt.step(end)}" if planned else "")),
        _fact("", f"{fmt.duration(step_s)}/step" if step_s is not None else ""),
        _fact("", f"about {left} left" if left else ""),
        _fact("last step", fmt.age(run.last_ts, now) if run.last_ts else ""),
        _fact("stage", run_stages.stage_fact(run, now)),
        _fact("attempt", str(run.attempt)),
        _fact("started", fmt.age(run.created_at, now)),
        _fact("source", fmt.shorten(run.source, 40)),
        _fact("host", fmt.shorten(run.host, 40)),
        _fact("tags", fmt.shorten(", ".join(run.tags), 80)),
        _fact("id", run.run_id if run.name else ""),
    ]
    return el("div", word(health), *facts, cls="rl-facts")


def word(health: StatusWord) -> Markup:
    """Return the coloured shape and the word of a run's state as HTML."""
    look = health.look
    return el("span", el("span", look.shape, style=f"color:{look.colour}"), f" {health.word.value}", cls="rl-word")


def _fact(label: str, value: str) -> Markup:
    if not value:
        return Markup()
    return el("span", el("span", f"{label} " if label else "", cls="label"), value)


def _why(alerts: list[Alert], ending: str) -> Markup:
    """Return the reasons in order of onset; a single one is the headline's, which follows."""
    fired = firing_clauses(alerts)
    if len(fired) == 1 and not ending:
        return Markup()
    clauses = [*fired, *filter(None, [ending])]
    label = "Why" if clauses else "Last alarm"
    clauses = clauses or [text for text in [last_alarm_words(alerts)] if text]
    if not clauses:
        return Markup()
    arrow = el("span", "→", cls="arrow")
    parts = [part for clause in clauses for part in (arrow, clause)][1:]
    return el("div", el("span", label, cls="label"), *parts, cls="rl-why")


CONTROLS_SHOW = "controls-show"
"""Session key of the facts for which the controls below the head were drawn; absent while the whole page is drawn. If
the head of a fast run caused a rerun in that time, the controls would never be drawn.
"""


def _shown(run: RunInfo, alerts: Sequence[Alert], *, paused: bool) -> tuple[object, ...]:
    """Return the facts that the controls depend on: the run's state, length, due reset and pause."""
    end = charts.slider_end(queries.outline(run).last)
    return (run.run_id, run.state.value, run.attempt, end, commands.reset_due(alerts), paused)


# The page: head, cause, controls, history, forecast, charts.

SLIDER_PX = 320
COMMAND_REFRESH_S = 1.0
"""Seconds between two refreshes while a command has no outcome."""


def page(go_to_tokens: GoToTokens) -> None:
    """Draw the page of the run in the browser's address; ``go_to_tokens`` opens the page with the tokens of a step."""
    run_id = st.query_params.get("run", "")
    if not run_id:
        st.info("No run selected. Open one from the list of runs.")
        return
    with layout.readable("This run"):
        _run(queries.run(run_id), go_to_tokens)


def _run(run: RunInfo, go_to_tokens: GoToTokens) -> None:
    live = run.state is RunState.RUNNING and run_board.live()
    every = layout.REFRESH_S if live else None
    board.library()
    st.session_state.pop(CONTROLS_SHOW, None)
    asked, alerts = queries.commands(run.run_id), queries.alerts(run.run_id)
    paused = pause_of(run, asked, time.time()) is not None
    commands.dialog_if_open(run)
    _part(show_head, every, run.run_id)
    _bar(run, every, go_to_tokens, paused=paused)
    _part(run_stages.show_stall, every, run.run_id)
    _part(run_stages.show_timeline, every, run.run_id)
    _part(run_history.show_culprits, None, run.run_id)
    _part(rollouts_page.show_newest, every, run.run_id)
    _controls(run)
    charts_at, drawer_at = st.columns([3.4, 1], gap="medium")
    with drawer_at, st.container(key="drawer"):
        _drawer(run, every, asked, paused=paused)
    with charts_at:
        _part(run_board.show_charts, None, run.run_id, go_to_tokens)
        _part(run_board.show_history, None, run.run_id, go_to_tokens)
    _part(run_board.watch, every, run.run_id)
    for name, panel in usable("rlwatch.panels").items():
        _part(show_panel, every, name, panel, run.run_id)
    st.session_state[CONTROLS_SHOW] = _shown(run, alerts, paused=paused)


def _drawer(run: RunInfo, every: float | None, asked: Sequence[Command], *, paused: bool) -> None:
    """Draw cause, remedies, commands, forecast and start of the run, next to the charts or, on a phone, above them."""
    _part(show_cause, every, run.run_id)
    _buttons(run, paused=paused)
    waiting = commands.waiting(asked, time.time())
    _part(run_history.show_commands, COMMAND_REFRESH_S if waiting else every, run.run_id)
    _part(run_forecast.show_forecast, every, run.run_id)
    if every is not None:
        _part(run_about.show_console, every, run.run_id)
    run_about.show_about(run)


def show_panel(name: str, panel: Callable[[StoredRun], str | None], run_id: str) -> None:
    """Draw a folded section with the HTML that a plugin's function ``panel`` returns for a run, or the error that it
    raised.

    ``name``: heading of the section.
    """
    run = StoredRun(queries.store(), run_id)
    given = call_or(lambda: panel(run), lambda error: el("p", f"The panel failed: {described(error)}"))
    if given:
        with st.expander(name, key=f"panel-{name}"):
            st.html(str(given))


def _part(show: Callable[..., None], every: float | None, *args: object) -> None:
    """Draw a fragment in a container of its own, so that later elements keep their places when its length changes."""
    with st.container():
        st.fragment(show, run_every=every)(*args)


def _controls(run: RunInfo) -> None:
    """Draw the controls of the whole page that the server handles; the browser's own are above the charts."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium", key="controls"):
        _range(run)
        if run.state is RunState.RUNNING:
            st.toggle("Live", value=True, key="live", bind="query-params", width="content")
        with st.popover("Layouts", icon=":material/dashboard:", width="content"):
            st.fragment(show_layouts)(run.project)
        with st.popover("Notes", icon=":material/edit_note:", width="content"):
            st.fragment(show_notes)(run.run_id)


LAYOUT_NAME = "layout-name"


def show_layouts(project: str) -> None:
    """Draw the named layouts of the project, and the form that saves the pinned charts as one."""
    with layout.readable("The layouts"):
        who, kept = layout.principal(), pinned.layouts_of(project)
        if not kept:
            hint = "No layout saved for this project. Pin charts (☆), arrange them (⋯), and save them."
            st.html(el("div", hint, cls="rl-quiet"))
        for name, pins in kept.items():
            use, remove = st.columns([8, 3], vertical_alignment="center")
            label = f"{name} · {fmt.plural(len(pins), 'chart')}"
            if use.button(label, key=f"layout-{name}", width="stretch"):
                run_board.keep(project, pins)
                st.rerun()
            if who.may_command:
                remove.button("Remove", key=f"layout-remove-{name}", on_click=_keep_layout, args=(project, name, ()))
        if not who.may_command:
            st.html(el("div", layout.LOOK_ONLY, cls="rl-quiet"))
            return
        name = st.text_input("Name", key=LAYOUT_NAME, max_chars=pinned.LONGEST_NAME)
        pins = run_board.chosen_pins(project)
        st.button(
            "Save the pinned charts",
            key="layout-save",
            on_click=_keep_layout,
            args=(project, name, pins),
            disabled=not pins,
            help=None if pins else "No chart is pinned",
        )


def _keep_layout(project: str, name: str, pins: Sequence[str]) -> None:
    try:
        pinned.keep_layout(queries.store(), project, name, pins, layout.principal())
    except RLWatchError as error:
        st.toast(f"Not saved: {fmt.shorten(str(error), 200)}", icon=":material/error:")


NOTE_TEXT, WRITTEN = "note-text", "note-written"


def show_notes(run_id: str) -> None:
    """Draw users' notes at steps of the run, and the form for a new one at the clicked step, else the last step."""
    if st.session_state.pop(WRITTEN, False):
        st.rerun()  # the charts show it, too
    with layout.readable("The notes"):
        run, who = queries.run(run_id), layout.principal()
        for note in queries.notes(run_id):
            line, button = st.columns([8, 2], vertical_alignment="center")
            head = el("b", f"step {fmt.step(note.step)} ")
            by = el("span", f" {fmt.shorten(note.by, 60)}, {fmt.age(note.at, time.time())}", cls="rl-quiet")
            line.html(joined(el("div", head, fmt.shorten(note.text, 2000), by)))
            if who.may_command:
                button.button("Remove", key=f"note-{note.note_id}", on_click=_remove_note, args=(note,))
        if not who.may_command:
            st.html(el("div", layout.LOOK_ONLY, cls="rl-quiet"))
            return
        at = board.at_step(st.query_params)
        step = st.text_input("Step", str(run.last_step or 0) if at is None else str(at), key=f"note-step-{at}")
        st.text_area("Note", key=NOTE_TEXT, max_chars=2000, placeholder="visible to everyone, and in the report")
        layout.signature()
        st.button("Add note", type="primary", key="note-add", on_click=_add_note, args=(run_id, step))


def _add_note(run_id: str, step: str) -> None:
    text = str(st.session_state.get(NOTE_TEXT) or "")
    try:
        if not step.strip().lstrip("-").isdecimal():
            raise ConfigError(f"a note is at a step, a whole number, got {step!r}")
        incident_acts.note_at_step(queries.store(), run_id, int(step), by=layout.principal(), text=text)
    except RLWatchError as error:
        st.toast(f"Not saved: {fmt.shorten(str(error), 200)}", icon=":material/error:")
        return
    st.session_state.update({NOTE_TEXT: "", WRITTEN: True})
    st.toast(f"Note added at step {fmt.step(int(step))}", icon=":material/check:")


def _remove_note(note: StepNote) -> None:
    try:
        incident_acts.remove_note_at_step(queries.store(), note, by=layout.principal())
        st.session_state[WRITTEN] = True
    except RLWatchError as error:
        st.toast(f"Not removed: {fmt.shorten(str(error), 200)}", icon=":material/error:")


def _buttons(run: RunInfo, *, paused: bool) -> None:
    """Draw the buttons of commands to the run."""
    reason = commands.impossible(run, layout.principal())
    st.menu_button(
        "Commands",
        commands.menu_kinds(paused=paused),
        key="more",
        format_func=lambda kind: commands.FORMS[kind].menu,
        on_click=commands.open_chosen,
        args=(run.run_id, "more"),
        disabled=bool(reason),
        help=reason or None,
        width="stretch",
    )


def _first_button(run: RunInfo, *, paused: bool) -> None:
    """Draw the most likely command: reset or, for a paused run, resume."""
    may, reason = layout.principal().may_command, commands.impossible(run, layout.principal())
    kind = "resume" if paused else commands.RESET
    due = paused or commands.reset_due(queries.alerts(run.run_id))
    st.button(
        commands.FORMS[kind].menu,
        key="resume-open" if paused else "reset-open",
        on_click=commands.open_dialog,
        args=(run.run_id, kind),
        disabled=bool(reason),
        help=reason or None,
        type="primary" if due and may else "secondary",
        width="content",
    )


def _range(run: RunInfo) -> None:
    last = queries.outline(run).last
    end = charts.slider_end(last)
    key = charts.slider_key(run.run_id, end)
    chosen = charts.read_window(st.query_params, 0, last)
    if end > charts.FARTHEST:
        st.caption(f"Steps shown: drag over a chart. Axes count from step {fmt.step(queries.outline(run).first)}.")
        return
    st.slider(
        "Steps shown",
        0,
        end,
        (chosen.low, end if chosen.follows else chosen.high),
        key=key,
        on_change=_range_changed,
        args=(key, end),
        width=SLIDER_PX,
    )


def _range_changed(key: str, end: int) -> None:
    low, high = st.session_state[key]
    charts.write_window(st.query_params, low, high, 0, end)
