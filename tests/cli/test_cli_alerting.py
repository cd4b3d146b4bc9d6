"""ack, silence, silences, unsilence; and what the list of alerts says of them."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cli_helpers import NOW, Invoke, record_run, strict

from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, OutboxMessage, OutboxStatus, Severity
from rlwatch.store.url import open_store


def _alert(alert_id: str, kind: str, state: AlertState = AlertState.FIRING, **more: object) -> Alert:
    return Alert(alert_id, "r", "kl", kind, Severity.WARNING, state, 3, 4, f"{kind} is bad", fired_at=NOW, **more)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with a run on which two alerts fire and one is over."""
    store = open_store(tmp_path / "runs")
    record_run(store, "r", name="seed1")
    over = _alert("aa30", "grad_spike", AlertState.RESOLVED)
    told = {"event": "firing", "alert": {"id": "aa10"}, "also": [{"id": "aa20"}]}
    sent = OutboxMessage("m", "r", "aa10", "hook", told, OutboxStatus.SENT, attempts=1)
    store.put_alerts([_alert("aa10", "kl_drift"), _alert("aa20", "no_signal"), over], [sent])
    return tmp_path / "runs"


@pytest.fixture
def store(place: Path) -> Store:
    """The same, open."""
    return open_store(place)


def test_an_alert_is_acknowledged_by_the_beginning_of_its_id(place: Path, store: Store, invoke: Invoke) -> None:
    """Who and why are kept, and shown."""
    result = invoke("alerts", "ack", "aa1", "--by", "ann", "--why", "rolled back", "--store", place)

    assert result.stdout.strip() == "aa10: kl_drift on r since step 3: acknowledged by ann"
    [kept] = store.acknowledgements()
    assert (kept.alert_id, kept.by, kept.why, kept.severity) == ("aa10", "ann", "rolled back", Severity.WARNING)
    rows = strict(invoke("alerts", "--format", "json", "--store", place).stdout)
    assert {row["alert_id"]: row["quiet"] for row in rows} == {
        "aa10": "acknowledged by ann: rolled back",
        "aa20": "",
        "aa30": "",
    }


def test_the_second_to_acknowledge_learns_who_was_first(place: Path, invoke: Invoke) -> None:
    """Nobody takes it away from them."""
    invoke("alerts", "ack", "aa10", "--by", "ann", "--store", place)

    assert (
        "acknowledged by ann, previously acknowledged"
        in invoke("alerts", "ack", "aa10", "--by", "bob", "--store", place).stdout
    )


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("zz", "there is no alert 'zz'; firing: aa20 (no_signal on r), aa10 (kl_drift on r)"),
        ("aa", "'aa' fits 3 alerts: aa30, aa20, aa10; give more of the id"),
        ("aa30", "alert aa30 is resolved: only what fires can be acknowledged"),
    ],
)
def test_what_cannot_be_acknowledged_is_said(place: Path, invoke: Invoke, reference: str, said: str) -> None:
    """With what could be."""
    result = invoke("alerts", "ack", reference, "--store", place)

    assert result.exit_code == 2
    assert said in result.stderr


def test_a_silence_is_kept_listed_and_ended(place: Path, store: Store, invoke: Invoke) -> None:
    """With what it is about, by whom and why."""
    made = invoke(
        *("alerts", "silence", "--run", "seed1", "--kind", "kl_drift", "--label", "team=rl", "--for", "2h"),
        *("--by", "ann", "--why", "new data", "--store", place),
    )
    [kept] = store.silences()
    listed = invoke("alerts", "silences", "--store", place).stdout

    assert made.stdout.startswith(f"{kept.silence_id}: run seed1, kind kl_drift, label team=rl silenced until ")
    assert (kept.run, kept.kind, kept.labels, kept.by, kept.why) == (
        "seed1",
        "kl_drift",
        {"team": "rl"},
        "ann",
        "new data",
    )
    assert kept.until - kept.created_at == 7200.0
    assert re.search(r"run seed1, kind kl_drift, label team=rl .* 2\u202fh +ann +new data", listed)

    ended = invoke("alerts", "unsilence", kept.silence_id[:4], "--store", place)
    assert "no longer silenced" in ended.stdout
    assert invoke("alerts", "silences", "--store", place).stdout.strip() == "no silences"
    [old] = strict(invoke("alerts", "silences", "--over", "--format", "json", "--store", place).stdout)
    assert (old["over"], old["kind"]) == (True, "kl_drift")


def test_a_silenced_alert_says_so_in_the_list(place: Path, invoke: Invoke) -> None:
    """By the run's name, too."""
    invoke("alerts", "silence", "--run", "seed1", "--for", "1d", "--by", "ann", "--why", "new data", "--store", place)

    assert "kl_drift is bad (silenced by ann: new data)" in invoke("alerts", "--store", place).stdout


def test_a_silence_may_end_at_a_time(place: Path, store: Store, invoke: Invoke) -> None:
    """Of the clock on the wall."""
    end = (datetime.now().astimezone() + timedelta(days=2)).replace(microsecond=0, tzinfo=None)
    invoke("alerts", "silence", "--all", "--until", end.isoformat(), "--why", "x", "--store", place)

    assert store.silences()[0].until == pytest.approx(end.timestamp(), abs=1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--for", "2h", "--why", "x"], "name a run, project, kind, rule or label, or --all"),
        (["--all", "--why", "x"], "either --for 2h or --until 2026-12-24T18:00"),
        (["--all", "--why", "x", "--for", "2h", "--until", "2026-12-24"], "either --for 2h or --until"),
        (["--all", "--why", "x", "--for", "2 hours"], "'2 hours' is no duration; give numbers with m, h, d or w"),
        (["--all", "--why", "x", "--for", "0h"], "lasts more than nothing and at most a year, got 0 s"),
        (["--all", "--why", "x", "--for", "99w"], "at most a year"),
        (
            ["--all", "--why", "x", "--until", "soon"],
            "--until 'soon' is not a time; give local time as in 2026-12-24T18:00",
        ),
        (["--all", "--why", "x", "--until", "2020-01-01"], "--until 2020-01-01 is in the past"),
        (["--all", "--for", "2h"], "a silence needs a name and a reason"),
        (["--label", "team", "--for", "2h", "--why", "x"], "--label 'team' is not KEY=VALUE"),
    ],
)
def test_a_silence_that_makes_no_sense_is_refused(
    place: Path, store: Store, invoke: Invoke, options: list[str], said: str
) -> None:
    """With what would."""
    result = invoke("alerts", "silence", *options, "--store", place)

    assert result.exit_code == 2
    assert said in result.stderr
    assert store.silences() == []


def test_a_kind_nothing_reports_is_silenced_with_a_word_of_doubt(place: Path, invoke: Invoke) -> None:
    """It may be a detector of one's own."""
    result = invoke("alerts", "silence", "--kind", "kl_drifft", "--for", "2h", "--why", "x", "--store", place)

    assert "no shipped detector reports the kind 'kl_drifft'" in result.stdout


def test_ending_a_silence_that_is_not_there_names_those_that_are(place: Path, store: Store, invoke: Invoke) -> None:
    """Or says that there is none."""
    assert (
        "no silence 'zz' lasts; those that do: there is none"
        in invoke("alerts", "unsilence", "zz", "--store", place).stderr
    )
    invoke("alerts", "silence", "--all", "--for", "2h", "--why", "x", "--store", place)

    assert store.silences()[0].silence_id in invoke("alerts", "unsilence", "zz", "--store", place).stderr


def test_an_alert_published_with_another_shows_that_messages_delivery(place: Path, invoke: Invoke) -> None:
    """One message for two alerts is delivery for both."""
    rows = {row["alert_id"]: row for row in strict(invoke("alerts", "--format", "json", "--store", place).stdout)}

    assert [len(rows[alert_id]["delivery"]) for alert_id in ("aa10", "aa20", "aa30")] == [1, 1, 0]


def test_incidents_are_one_row_each(place: Path, store: Store, invoke: Invoke) -> None:
    """What began together, in text and as JSON; a run that only crashed is left out unless asked for."""
    record_run(store, "c", name="seed2")
    store.put_alerts([replace(_alert("cc10", "run_crashed"), run_id="c", rule="heartbeat")], [])
    text = invoke("alerts", "incidents", "--store", place).stdout
    rows = strict(invoke("alerts", "incidents", "--format", "json", "--store", place).stdout)

    assert "kl_drift is bad" in text
    assert "1 run that only stopped reporting or crashed hidden" in text
    [row] = rows
    assert (row["incident"], row["state"], len(row["alerts"]), row["delivery"][0]["channel"]) == (
        "aa10",
        "unresolved",
        3,
        "hook",
    )
    everything = strict(invoke("alerts", "incidents", "--heartbeats", "--format", "json", "--store", place).stdout)
    assert sorted(each["heartbeat"] for each in everything) == [False, True]


def test_a_whole_incident_is_taken_snoozed_and_noted(place: Path, store: Store, invoke: Invoke) -> None:
    """By the id of any of its alerts."""
    said = invoke("alerts", "snooze", "aa2", "--for", "2h", "--by", "ann", "--why", "lunch", "--store", place).stdout
    assert re.search(r"kl_drift, no_signal on r snoozed until .*, unless it worsens", said)
    invoke("alerts", "note", "aa2", "the judge was down", "--by", "bob", "--store", place)
    invoke("alerts", "ack", "aa2", "--incident", "--by", "cy", "--store", place)
    [row] = strict(invoke("alerts", "incidents", "r", "--format", "json", "--store", place).stdout)

    assert [(entry["by"], entry["act"]) for entry in row["audit"]] == [
        ("ann", "snooze"),
        ("ann", "snooze"),
        ("bob", "note"),
        ("cy", "acknowledge"),
        ("cy", "acknowledge"),
    ]
    assert (row["state"], set(row["quiet"])) == ("unresolved", {"aa10", "aa20"})
    assert store.silences()[0].alerts == ("aa10", "aa20")
