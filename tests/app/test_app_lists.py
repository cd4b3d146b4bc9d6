"""The rows of the list of runs and of the list of alerts."""

from dataclasses import replace

import pytest
from app_world import WEIRD, alert, cells, message
from rlwatch_app import alerts_page, fleet, fleet_rows, runs_page, table
from rlwatch_app.fleet import Fleet
from rlwatch_app.queries import Vitals

from rlwatch.alerts.incidents import IncidentRecord, incidents_of
from rlwatch.control.liveness import Pace
from rlwatch.records import AlertState, Finding, OutboxStatus, RunInfo, RunState, Severity
from rlwatch.state import ending_of, verdict_of

NOW = 1_000_000.0
LOST = ("entropy_collapse", Severity.CRITICAL)
VITALS = Vitals(Pace(5.0), {"reward/mean": 0.5, "policy/entropy": 0.9, "policy/kl_ref": 0.04})


def run(run_id, **more):
    fields = {"name": run_id, "created_at": NOW - 900, "last_step": 30, "last_ts": NOW - 5, **more}
    return RunInfo(run_id, **fields)


def vitals(one, found):
    told = [Finding("d", kind, severity, 20, 12, "") for kind, severity in found]
    return replace(VITALS, verdict=verdict_of(told, {1: (1, 30)}, ending=ending_of(one)))


def every(*runs, alerts=None, found=None):
    known = {one.run_id: vitals(one, (found or {}).get(one.run_id, ())) for one in runs}
    return Fleet(tuple(runs), known, alerts or {}, {})


def row_of(entry):
    return fleet_rows.FleetView(now=NOW).run_row(fleet_rows.FleetRow((entry,)))


def row_cells(row):
    return cells({"cells": row.cells})


def test_runs_in_danger_come_first_then_the_most_recent():
    """What a person should look at is at the top."""
    runs = [run("calm"), run("later", last_ts=NOW - 1), run("bad"), run("warned")]
    told = {"bad": [LOST], "warned": [("kl_drift", Severity.WARNING)]}
    found = fleet.run_entries(every(*runs, found=told), NOW)
    assert [entry.run.run_id for entry in found] == ["bad", "warned", "later", "calm"]
    assert runs_page.headline(found) == "2 runs need attention"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "No live run needs attention"), (1, "1 run needs attention"), (2, "2 runs need attention")],
)
def test_the_headline_counts(count, expected):
    """In words that agree in number."""
    runs = [run(f"r{i}") for i in range(3)]
    told = {f"r{i}": [LOST] for i in range(count)}
    assert runs_page.headline(fleet.run_entries(every(*runs, found=told), NOW)) == expected


def test_the_headline_counts_finished_runs_that_collapsed():
    """They need nobody now, and are no success."""
    runs = [run("live"), run("lost", state=RunState.FINISHED), run("good", state=RunState.FINISHED)]
    found = fleet.run_entries(every(*runs, found={"lost": [LOST]}), NOW)
    assert runs_page.headline(found) == "No live run needs attention · 1 of 2 finished runs collapsed"


def test_a_row_answers_who_how_and_why():
    """In the columns' order."""
    (entry,) = fleet.run_entries(every(run("bad"), found={"bad": [LOST]}), NOW)
    row = row_of(entry)
    assert row_cells(row) == [
        "collapsed@12", "bad", "30", "0.5", "", "0.9", "0.04", "-", "entropy fell; still running", "5\u202fs ago"
    ]  # fmt: skip
    assert len(row.cells) == len(fleet_rows.FleetView().heads())
    assert row.opens == "bad"


def test_a_run_that_ended_well_has_the_mark_of_its_own_page():
    """A live one has another; both are healthy."""
    runs = [run("over", state=RunState.FINISHED), run("live")]
    marks = {entry.run.run_id: row_of(entry).cells[0] for entry in fleet.run_entries(every(*runs), NOW)}
    assert {one: (cell["shape"], cell["text"]) for one, cell in marks.items()} == {
        "over": ("✓", "healthy"), "live": ("●", "healthy")}  # fmt: skip


def test_a_spread_has_the_places_of_its_mean():
    """Six digits of a deviation are no six digits of knowledge."""
    assert fleet.mean_words([0.0305, 0.0319]) == "0.0312 ± 0.001"
    assert fleet.mean_words([100.0, 103.0]) == "102 ± 2"
    assert fleet.mean_words([45_000.0, 45_400.0]) == "45.2k ± 300"
    assert fleet.mean_words([1.0, 1.0 + 1e-9]) == "1 ± 7e-10"
    assert fleet.mean_words([1.7e308, 1.7e308]) == "Inf"
    assert fleet.mean_words([1e308, -1e308]) == "0"


def test_a_healthy_run_remembers_its_last_alarm():
    """Quietly."""
    over = alert("r", state=AlertState.RESOLVED, resolved_step=25)
    (entry,) = fleet.run_entries(every(run("r"), alerts={"r": [over]}), NOW)
    assert fleet.why(entry) == "resolved: entropy collapse since step 12 (13 steps)"
    assert row_of(entry).cells[7]["quiet"]


def test_a_run_that_ended_in_a_collapse_says_so_rather_than_what_was_resolved():
    """Its state, before any alarm that is over."""
    alerts = [alert("r", kind="kl_drift", state=AlertState.RESOLVED, resolved_step=29)]
    one = run("r", state=RunState.FINISHED)
    (entry,) = fleet.run_entries(every(one, alerts={"r": alerts}, found={"r": [LOST]}), NOW)
    assert fleet.why(entry) == "entropy fell"


def test_filters_combine_and_search_everything_one_remembers():
    """Project, state, and any word of name, host, tag or reason."""
    runs = [run("a", project="math", host="node-7"), run("b", project="code", tags=("ablation",))]
    found = fleet.run_entries(every(*runs, found={"b": [("grad_spike", Severity.CRITICAL)]}), NOW)

    def ids(**filters):
        return [entry.run.run_id for entry in fleet.matching(found, **filters)]

    assert ids() == ["b", "a"]
    assert ids(projects=["math"]) == ["a"]
    assert ids(states=["failing"]) == ["b"]
    assert ids(text="NODE-7") == ["a"]
    assert ids(text="ablation") == ids(text="gradient norm spiked") == ["b"]
    assert ids(projects=["math"], states=["failing"]) == []


def test_a_long_name_is_cut_in_the_row_and_whole_in_its_tooltip():
    """Two hundred characters do not push the reason off the page."""
    cell = table.run_link("r", "p", WEIRD)
    assert len(cell["text"]) <= 80
    assert cell["title"] == WEIRD
    assert cell["href"] == "run?run=r"


def test_links_escape_what_an_address_cannot_hold():
    """Run ids come from users."""
    assert table.run_link("a b&c=ü", "p", "n")["href"] == "run?run=a+b%26c%3D%C3%BC"


def record(one=None, run_state=RunState.RUNNING, messages=()):
    one = one or alert()
    return IncidentRecord(incidents_of([one])[0], run("run-1", state=run_state), messages=tuple(messages))


def test_an_incident_of_a_run_that_ended_does_not_fire_for_ever():
    """It was never resolved, and concerns nobody now."""
    assert alerts_page.headline([record(run_state=RunState.FINISHED)]) == "No firing incidents"
    assert alerts_page.headline([record()]) == "1 incident firing"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (message("run-1-entropy_collapse"), "sent"),
        (message("run-1-entropy_collapse", OutboxStatus.PENDING), "pending"),
        (
            message("run-1-entropy_collapse", OutboxStatus.PENDING, attempts=2, last_error="HTTP 503"),
            "pending after 2 tries: HTTP 503",
        ),
        (
            message("run-1-entropy_collapse", OutboxStatus.DEAD, attempts=8, last_error="HTTP 410"),
            "dead after 8 tries: HTTP 410",
        ),
    ],
)
def test_delivery_says_what_became_of_the_message(sent, expected):
    """And why not, where not."""
    assert alerts_page.delivery([sent])["text"] == expected


def test_the_worst_delivery_is_shown_and_all_are_listed():
    """One dead channel is not hidden by one that works."""
    alert_id = "run-1-entropy_collapse"
    cell = alerts_page.delivery([message(alert_id), message(alert_id, OutboxStatus.DEAD, channel="pager", attempts=8)])
    assert cell["text"].startswith("dead")
    assert [channel for channel, _ in cell["lines"]] == ["slack", "pager"]


def test_choices_narrow_the_list():
    """All, firing, undelivered."""
    dead = record(alert(kind="x"), messages=[message("run-1-x", OutboxStatus.DEAD)])
    over = record(replace(alert(), state=AlertState.RESOLVED))
    silent = record(alert(kind="run_silent"))
    assert alerts_page.matching([dead, over, silent], "all") == [dead, over]
    assert alerts_page.matching([dead, over, silent], "silent or crashed") == [silent]
    assert alerts_page.matching([dead, over], "firing") == [dead]
    assert alerts_page.matching([dead, over], "undelivered") == [dead]


def test_a_message_is_not_told_twice():
    """Where it already names its kind."""
    assert (
        alerts_page.message_words(alert(kind="no_signal", message="no learning signal: 98%"))
        == "no learning signal: 98%"
    )
    assert alerts_page.message_words(alert()) == "entropy collapse: entropy fell from 1 to 0.1 nats/token"
