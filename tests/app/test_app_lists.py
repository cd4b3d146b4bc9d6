"""The rows of the list of runs and of the list of alerts."""

from dataclasses import replace

import pytest
from app_world import WEIRD, alert, cells, message
from rlwatch_app import alerts_page, fleet, fleet_rows, incident_dialog, runs_page, table
from rlwatch_app.fleet import Fleet
from rlwatch_app.queries import Vitals

from rlwatch.alerts.incidents import Docket, incidents_of
from rlwatch.control.liveness import Pace
from rlwatch.records import AlertState, OutboxStatus, RunInfo, RunState, Severity

NOW = 1_000_000.0
VITALS = Vitals(Pace(5.0), {"reward/mean": 0.5, "policy/entropy": 0.9, "policy/kl_ref": 0.04})


def run(run_id, **more):
    fields = {"name": run_id, "created_at": NOW - 900, "last_step": 30, "last_ts": NOW - 5, **more}
    return RunInfo(run_id, **fields)


def every(*runs, alerts=None):
    return Fleet(tuple(runs), {one.run_id: VITALS for one in runs}, alerts or {}, {})


def row_of(entry):
    return fleet_rows.Shown(now=NOW).run_row(fleet_rows.Line((entry,)))


def row_cells(row):
    return cells({"cells": row.cells})


def test_runs_in_danger_come_first_then_the_most_recent():
    """What a person should look at is at the top."""
    runs = [run("calm"), run("later", last_ts=NOW - 1), run("bad"), run("warned")]
    alerts = {"bad": [alert("bad")], "warned": [alert("warned", severity=Severity.WARNING)]}
    found = fleet.run_entries(every(*runs, alerts=alerts), NOW)
    assert [entry.run.run_id for entry in found] == ["bad", "warned", "later", "calm"]
    assert runs_page.headline(found) == "2 runs need you"


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "No run needs you"), (1, "1 run needs you"), (2, "2 runs need you")]
)
def test_the_headline_counts(count, expected):
    """In words that agree in number."""
    runs = [run(f"r{i}") for i in range(3)]
    alerts = {f"r{i}": [alert(f"r{i}")] for i in range(count)}
    assert runs_page.headline(fleet.run_entries(every(*runs, alerts=alerts), NOW)) == expected


def test_a_row_answers_who_how_and_why():
    """In the columns' order."""
    (entry,) = fleet.run_entries(every(run("bad"), alerts={"bad": [alert("bad")]}), NOW)
    row = row_of(entry)
    assert row_cells(row) == [
        "danger", "bad", "30", "0.5", "", "0.9", "0.04", "-", "entropy collapse since step 12 (18 steps)", "5\u202fs ago"
    ]  # fmt: skip
    assert len(row.cells) == len(fleet_rows.Shown().heads())
    assert row.opens == "bad"


def test_a_healthy_run_remembers_its_last_alarm():
    """Quietly."""
    over = alert("r", state=AlertState.RESOLVED, resolved_step=25)
    (entry,) = fleet.run_entries(every(run("r"), alerts={"r": [over]}), NOW)
    assert fleet.why(entry) == "resolved: entropy collapse since step 12 (13 steps)"
    assert row_of(entry).cells[7]["quiet"]


def test_a_run_that_ended_in_a_collapse_says_so_rather_than_what_was_resolved():
    """The worst, oldest first, before anything that is over."""
    alerts = [
        alert("r", kind="kl_drift", state=AlertState.RESOLVED, resolved_step=29),
        alert("r", kind="reward_drop", onset_step=9),
        alert("r", kind="grad_spike", severity=Severity.WARNING, onset_step=3),
    ]
    (entry,) = fleet.run_entries(every(run("r", state=RunState.FINISHED), alerts={"r": alerts}), NOW)
    assert fleet.why(entry) == "unresolved: the reward fell since step 9 (21 steps), and 1 more"


def test_filters_combine_and_search_everything_one_remembers():
    """Project, state, and any word of name, host, tag or reason."""
    runs = [run("a", project="math", host="node-7"), run("b", project="code", tags=("ablation",))]
    found = fleet.run_entries(every(*runs, alerts={"b": [alert("b")]}), NOW)

    def ids(**filters):
        return [entry.run.run_id for entry in fleet.matching(found, **filters)]

    assert ids() == ["b", "a"]
    assert ids(projects=["math"]) == ["a"]
    assert ids(states=["danger"]) == ["b"]
    assert ids(text="NODE-7") == ["a"]
    assert ids(text="ablation") == ids(text="entropy collapse") == ["b"]
    assert ids(projects=["math"], states=["danger"]) == []


def test_a_long_name_is_cut_in_the_row_and_whole_in_its_tooltip():
    """Two hundred characters do not push the reason off the page."""
    cell = table.run_link("r", "p", WEIRD)
    assert len(cell["text"]) <= 80
    assert cell["title"] == WEIRD
    assert cell["href"] == "run?run=r"


def test_links_escape_what_an_address_cannot_hold():
    """Run ids come from users."""
    assert table.run_link("a b&c=ü", "p", "n")["href"] == "run?run=a+b%26c%3D%C3%BC"


def docket(one=None, run_state=RunState.RUNNING, messages=()):
    one = one or alert()
    return Docket(incidents_of([one])[0], run("run-1", state=run_state), messages=tuple(messages))


def test_an_incident_of_a_run_that_ended_does_not_fire_for_ever():
    """It was never resolved, and concerns nobody now."""
    assert alerts_page.headline([docket(run_state=RunState.FINISHED)]) == "No incident is firing"
    assert alerts_page.headline([docket()]) == "1 incident firing"


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
    dead = docket(alert(kind="x"), messages=[message("run-1-x", OutboxStatus.DEAD)])
    over = docket(replace(alert(), state=AlertState.RESOLVED))
    silent = docket(alert(kind="run_silent"))
    assert alerts_page.matching([dead, over, silent], "all") == [dead, over]
    assert alerts_page.matching([dead, over, silent], "silent or crashed") == [silent]
    assert alerts_page.matching([dead, over], "firing") == [dead]
    assert alerts_page.matching([dead, over], "undelivered") == [dead]


def test_a_message_is_not_told_twice():
    """Where it already names its kind."""
    assert (
        incident_dialog.message_words(alert(kind="no_signal", message="no learning signal: 98%"))
        == "no learning signal: 98%"
    )
    assert incident_dialog.message_words(alert()) == "entropy collapse: entropy fell from 1 to 0.1 nats/token"
