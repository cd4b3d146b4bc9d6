"""The words of the list of alerts, of a run's health and of its marks: what decides them, case by case."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from app_world import alert, finding, message
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import alerts_page, fleet, health, incident_acts, marks
from rlwatch_app.principal import NotPermittedError, Principal

from rlwatch.alerts.incidents import QUIET, IncidentRecord, IncidentState, incidents_of, standing_of
from rlwatch.errors import ConfigError
from rlwatch.records import CRASH_FORECAST, AlertState, Event, OutboxStatus, RunInfo, RunState, Severity, Silence
from rlwatch.store.url import open_store

NOW = 1_000_000.0
LIVE = RunInfo("run-1", project="math", name="seed3", created_at=NOW - 5000, last_step=30, last_ts=NOW - 10)
STATES = tuple(AlertState)
THIN = "\u202f"


def record(state=AlertState.FIRING, run_state=RunState.RUNNING, standing=None, known=True, **more):
    run = replace(LIVE, state=run_state) if known else None
    made = IncidentRecord(incidents_of([alert(state=state, **more)])[0], run)
    return replace(made, standing=standing or standing_of(made.incident, {}, goes_on=made.goes_on))


@pytest.mark.parametrize(("state", "run_state", "known"), list(product(STATES, tuple(RunState), [True, False])))
def test_an_incident_fires_while_its_run_goes_on(state, run_state, known):
    """Of a run that cannot be read nobody knows that it ended; what ended firing is unresolved, for good."""
    one = record(state, run_state, known=known)
    goes_on = not known or run_state is RunState.RUNNING
    pending = state is AlertState.PENDING

    assert one.open == (goes_on and state is AlertState.FIRING)
    ended = {AlertState.FIRING: "unresolved", AlertState.PENDING: "resolved"}.get(state, state.value)
    assert one.standing == (state.value if goes_on and not (pending and not goes_on) else ended)


@pytest.mark.parametrize("standing", [IncidentState.FIRING, *QUIET])
def test_only_an_incident_that_somebody_took_on_needs_no_link_any_more(standing):
    """One that is silenced may be taken on, too."""
    taken = standing is IncidentState.ACKNOWLEDGED

    assert alerts_page.acknowledge_cell(record(standing=standing)).get("text") == ("" if taken else "acknowledge")


def test_what_does_not_fire_cannot_be_taken_on():
    """It says when it was over."""
    over = record(AlertState.RESOLVED, resolved_step=4900)

    assert alerts_page.acknowledge_cell(over)["text"] == ""
    assert alerts_page.resolved_words(over.incident.lead) == f"resolved at step 4{THIN}900"


@given(st.lists(st.tuples(st.sampled_from(STATES), st.sampled_from([None, *QUIET])), max_size=6))
def test_the_headline_counts_what_fires_and_what_was_done_about_it(parts):
    """In words that agree in number."""
    listed = [record(state, standing=standing) for state, standing in parts]
    firing = [standing for state, standing in parts if state is AlertState.FIRING]
    noun = "incident" if len(firing) == 1 else "incidents"
    counts = [(what, firing.count(what)) for what in QUIET[:3]]
    expected = ", ".join([f"{len(firing)} {noun} firing", *(f"{count} {what}" for what, count in counts if count)])

    assert alerts_page.headline(listed) == (expected if firing else "No firing incidents")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "kl_drift"}, f"kind kl_drift for 2{THIN}h more, by ann: new data"),
        ({}, f"everything for 2{THIN}h more, by ann: new data"),
        (
            {"run": "seed3", "rule": "kl", "labels": {"team": "rl"}},
            f"run seed3, rule kl, label team=rl for 2{THIN}h more, by ann: new data",
        ),
        ({"until": NOW - 5}, f"everything for 0{THIN}ms more, by ann: new data"),
    ],
)
def test_a_silence_in_words(fields, told):
    """What it is about, how long yet, whose and why; one that is over has no time left, never less."""
    silence = Silence("s1", "ann", "new data", NOW - 60, **{"until": NOW + 7200, **fields})

    assert alerts_page.silence_words(silence, NOW) == told


@pytest.mark.parametrize("order", list(permutations(OutboxStatus)))
def test_the_worst_message_is_shown_whatever_their_order(order):
    """Dead before pending before sent."""
    cell = alerts_page.delivery([message("a", status, attempts=3) for status in order])

    assert cell["text"] == "dead after 3 tries"
    assert len(cell["lines"]) == 3


def test_an_alert_that_was_not_published_says_so():
    """No channel is no success."""
    assert alerts_page.delivery([])["text"] == "not sent"
    assert alerts_page.delivery_words(message("a", OutboxStatus.DEAD, attempts=1)) == "dead after 1 try"


def test_taking_an_alert_on_is_kept_and_reported(tmp_path):
    """By whom; what does not exist or no longer fires is one clear error."""
    store, ann = open_store(str(tmp_path)), Principal("ann", "operator")
    writer = store.open_run(RunInfo("run-1"))
    store.put_alerts([alert(), alert(kind="kl_drift", state=AlertState.RESOLVED)], [])

    assert incident_acts.acknowledge_alert(store, "run-1-entropy_collapse", by=ann, why="mine").by == "ann"
    assert [kept.by for kept in store.acknowledgements()] == ["ann"]
    with pytest.raises(NotPermittedError, match="eve has read-only access"):
        incident_acts.acknowledge_alert(store, "run-1-entropy_collapse", by=Principal("eve", "viewer"), why="")
    with pytest.raises(ConfigError, match="nothing-like-it"):
        incident_acts.acknowledge_alert(store, "nothing-like-it", by=ann, why="")
    with pytest.raises(ConfigError):
        incident_acts.acknowledge_alert(store, "run-1-kl_drift", by=ann, why="")
    writer.close()


SEVERITIES = st.sampled_from(Severity)
ALERTS = st.lists(
    st.builds(
        lambda kind, severity, state, onset: alert(kind=kind, severity=severity, state=state, onset_step=onset),
        st.sampled_from(["entropy_collapse", "kl_drift", "grad_spike"]),
        SEVERITIES,
        st.sampled_from(STATES),
        st.integers(0, 40),
    ),
    max_size=5,
)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (30, "entropy collapse since step 12 (18 steps)"),
        (13, "entropy collapse since step 12 (1 step)"),
        (12, "entropy collapse since step 12"),
        (None, "entropy collapse since step 12"),
    ],
)
def test_how_long_it_has_lasted_is_reported_once_it_has(last, told):
    """A run whose last step is not known has lasted no steps."""
    assert health.since_words(alert(), last) == told


def test_words_of_silences():
    """What is usual is told where it is known."""
    assert health.silence_words(2460, 38.0) == f"no step for 41{THIN}min (usually 38{THIN}s)"
    assert health.silence_words(2460, None) == f"no step for 41{THIN}min"


@given(ALERTS)
def test_the_last_alarm_is_the_newest_that_was_published_and_is_over(alerts):
    """One that never fired was no alarm."""
    unheard = [replace(one, fired_at=None) for one in alerts]
    over = [one for one in alerts if one.state is AlertState.RESOLVED]
    last = fleet.last_alarm([*unheard, *alerts])

    assert fleet.last_alarm(unheard) is None
    assert (last is None) == (not over)
    assert last is None or last.onset_step == max(one.onset_step for one in over)


def test_an_alarm_is_marked_where_it_was_seen():
    """While it fires the alert knows; after that the last finding behind it; else its onset."""
    over = alert(state=AlertState.RESOLVED, step=40)
    seen = [finding(step=20), finding(step=35), finding(step=41), finding(step=38, kind="kl_drift")]

    assert marks.seen_at(alert(step=22), seen) == 22
    assert marks.seen_at(over, seen) == 35
    assert marks.seen_at(over, []) == over.onset_step


def test_marks_of_a_run_in_their_order():
    """Resumes, events that bend curves, then alarms: an inference dashed, a forecast once."""
    events = [
        Event("reference_reset", 9, {}),
        Event("command", 11, {"command": "lower-lr"}),
        Event("command", 12, {"command": "pause"}),
        Event("note", 13, {}),
        Event("exception", None, {}),
    ]
    alerts = [
        alert(),
        alert(kind=CRASH_FORECAST, onset_step=5),
        alert(kind="x", state=AlertState.PENDING, fired_at=None),
    ]
    found = marks.marks_of_run(alerts, [finding()], events, {1: 0, 2: 15})

    assert [(mark.step, mark.text, mark.dashed) for mark in found] == [
        (15, "attempt 2 began", False),
        (9, "reference reset", False),
        (11, "lower learning rate", False),
        (12, "pause", False),
        (5, "failure forecast", False),
        (12, "entropy collapse (onset)", True),
        (20, "entropy collapse (alarm)", False),
    ]
    assert "Exploration" in found[-1].families


def test_only_the_newest_alarms_are_marked():
    """More would hide the line."""
    many = [alert(kind=f"k{n}", onset_step=n) for n in range(marks.MOST_MARKS + 6)]
    found = marks.marks_of_run(many, [], [], {})

    assert sorted({mark.step for mark in found if mark.dashed}) == list(range(6, marks.MOST_MARKS + 6))
