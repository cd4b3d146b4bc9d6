"""Incidents: which alerts are one, what leads, how each stands, and what people do about them."""

from dataclasses import replace

import pytest
from dispatch_examples import CRITICAL, FIRING, NOON, RESOLVED, WARNING, Office, alert

from rlwatch.alerts import silencing
from rlwatch.alerts.incidents import NEAR, IncidentState, incident_records, incidents_of, standing_of
from rlwatch.alerts.matching import silence_of
from rlwatch.alerts.rules import Rule
from rlwatch.diagnosis import Cause, Confidence, Diagnosis
from rlwatch.errors import ConfigError
from rlwatch.records import OutboxMessage, RunInfo, RunState, Severity, Silence


def cause(kind, *symptoms, sure=Confidence.PLAUSIBLE):
    return Cause(kind, kind, 0, sure, "because", "chain", (), symptoms)


def names(incidents):
    return [(each.lead.kind, [symptom.kind for symptom in each.symptoms]) for each in incidents]


def test_what_begins_together_is_one_incident_called_after_the_worst_of_it():
    """A forecast that came true is a symptom; what begins later is another incident."""
    found = incidents_of(
        [
            alert("kl_drift", onset_step=10),
            alert("crash_forecast", severity=CRITICAL, onset_step=5),
            alert("reward_drop", severity=CRITICAL, onset_step=10 + NEAR),
            alert("grad_spike", onset_step=11 + 2 * NEAR),
        ]
    )

    assert names(found) == [("reward_drop", ["crash_forecast", "kl_drift"]), ("grad_spike", [])]
    assert (found[0].onset_step, found[0].severity, found[1].severity) == (5, CRITICAL, WARNING)


@pytest.mark.parametrize(
    ("known", "over_at", "expected"),
    [
        ([cause("kl_drift", "reward_drop")], None, [("kl_drift", ["reward_drop"])]),
        ([cause("kl_drift", "reward_drop", sure=Confidence.WEAK)], None, [("kl_drift", []), ("reward_drop", [])]),
        ([cause("kl_drift", "reward_drop")], 400, [("kl_drift", []), ("reward_drop", [])]),
        ([cause("no_signal", "kl_drift", "reward_drop")], None, [("reward_drop", ["kl_drift"])]),
        ([], None, [("kl_drift", []), ("reward_drop", [])]),
    ],
)
def test_a_cause_that_still_fires_and_what_follows_are_one_however_late(known, over_at, expected):
    """The cause leads, where it is an alert itself; a weak one, or one that was over, joins nothing."""
    first = alert("kl_drift", RESOLVED if over_at else FIRING, onset_step=10, resolved_step=over_at)
    late = alert("reward_drop", severity=CRITICAL, onset_step=500)

    assert names(incidents_of([late, first], lambda: Diagnosis(causes=tuple(known)))) == expected


def test_heartbeats_are_no_incidents():
    """One that follows a failure belongs to it; a hundred others of a run are one entry, as it stands now."""
    silent = [
        replace(alert("run_silent", RESOLVED, CRITICAL, onset_step=at, resolved_step=at + 1), alert_id=f"s{at}")
        for at in range(0, 12_900, 100)
    ]
    found = incidents_of(silent)

    assert [(each.heartbeat, len(each.alerts), each.lead.alert_id) for each in found] == [(True, 129, "s12800")]
    crash = alert("run_crashed", severity=CRITICAL, onset_step=80)
    assert names(incidents_of([alert("nonfinite", severity=CRITICAL, onset_step=60), crash])) == [
        ("nonfinite", ["run_crashed"])
    ]
    assert not incidents_of([alert("nonfinite", onset_step=60), crash])[0].heartbeat


def test_an_incident_is_quiet_once_all_that_fires_of_it_is():
    """What a person did says how; an end of the run says that nobody will know."""
    [one] = incidents_of([alert("kl_drift"), alert("reward_drop"), alert("no_signal", RESOLVED)])
    kl, reward = one.firing

    def stands(goes_on=True, **quiet):
        said = {{"kl": kl, "reward": reward}[key].alert_id: words for key, words in quiet.items()}
        return standing_of(one, said, goes_on=goes_on)

    assert stands() is stands(kl="acknowledged by ann") is IncidentState.FIRING
    assert stands(kl="inhibited by x", reward="snoozed by ann") is IncidentState.SNOOZED
    assert stands(kl="acknowledged by ann", reward="silenced by bob") is IncidentState.ACKNOWLEDGED
    assert stands(goes_on=False, kl="acknowledged by ann") is IncidentState.UNRESOLVED
    assert standing_of(incidents_of([alert("no_signal", RESOLVED)])[0], {}) is IncidentState.RESOLVED


def test_a_snooze_keeps_its_alerts_back_for_a_while_unless_they_get_worse():
    """Others of their kind are told; what still fires afterwards is told then; who did it is in the audit."""
    office = Office(Rule("r", channels=("hook",)))
    office.publish(alert())
    snoozed = silencing.snooze(
        office.store, [alert(), alert("gone", RESOLVED)], by=" ann ", for_s=3600.0, why="later", clock=office.clock
    )

    assert (snoozed.alerts, snoozed.up_to, snoozed.until) == ((alert().alert_id,), WARNING, NOON + 3600.0)
    assert [(entry.by, entry.act, entry.alert_id) for entry in office.store.audit("run")] == [
        ("ann", "snooze", alert().alert_id)
    ]
    [record] = incident_records(office.store, office.policy, NOON + 1.0)
    assert (record.standing, record.silences) == (IncidentState.SNOOZED, (snoozed,))
    assert incident_records(office.store, office.policy, NOON + 3600.0)[0].standing is IncidentState.FIRING
    office.publish(alert(severity=CRITICAL))
    assert [message.payload["event"] for message in office.store.outbox()] == ["firing", "escalated"]


@pytest.mark.parametrize(
    ("alerts", "by", "for_s", "problem"),
    [
        ([alert()], "", 60.0, "needs a name, got ''"),
        ([alert("kl_drift", RESOLVED)], "ann", 60.0, "only what fires can be snoozed: .* is resolved"),
        ([alert()], "ann", 0.0, "more than nothing and at most a year, got 0 s"),
    ],
)
def test_a_snooze_that_cannot_be_is_refused(alerts, by, for_s, problem):
    """In words; nothing is kept."""
    store = Office().store
    with pytest.raises(ConfigError, match=problem):
        silencing.snooze(store, alerts, by=by, for_s=for_s)
    assert (store.silences(), store.audit()) == ([], [])


def test_notes_and_what_was_done_stand_at_the_incident():
    """In the order it was done; an empty note is none."""
    office = Office(Rule("r", channels=("hook",)))
    office.publish(alert(), alert("reward_drop"))
    silencing.acknowledge(office.store, alert(), by="ann", why="mine", clock=office.clock)
    office.clock.advance(1.0)
    silencing.note(office.store, alert("reward_drop"), by="bob", text=" the judge was down ", clock=office.clock)
    [record] = incident_records(office.store, office.policy, NOON)

    assert [(entry.by, entry.act, entry.text) for entry in record.audit] == [
        ("ann", "acknowledge", "mine"),
        ("bob", "note", "the judge was down"),
    ]
    assert [note.text for note in record.notes] == ["the judge was down"]
    for text in ("  ", "x" * 2001):
        with pytest.raises(ConfigError, match="a note"):
            silencing.note(office.store, alert(), by="bob", text=text)


def test_who_began_and_who_ended_a_silence_is_kept():
    """With what it was about."""
    office = Office()
    kept = silencing.silence(office.store, by="ann", why="repair", for_s=60.0, run="run", clock=office.clock)
    silencing.end_silence(office.store, kept.silence_id, by="bob", clock=office.clock)

    assert [(e.by, e.act, e.text.split(" until")[0]) for e in office.store.audit()] == [
        ("ann", "silence", "run run"),
        ("bob", "unsilence", "run run"),
    ]


def test_an_incident_of_a_run_that_ended_or_cannot_be_read_is_listed():
    """What was never told is not."""
    office = Office(Rule("r", channels=("hook",)))
    office.publish(alert())
    writer = office.store.open_run(RunInfo("run"))
    writer.finish(RunState.FINISHED, "", NOON)
    writer.close()
    [record] = incident_records(office.store, office.policy, NOON)

    assert (record.standing, record.open, record.run.run_id) == (IncidentState.UNRESOLVED, False, "run")


def test_a_message_is_silenced_only_if_all_it_tells_of_is():
    """By what it says itself: run, project, kind, rule, label, alert; and not before or after."""
    told = {"id": "a1", "kind": "kl_drift", "rule": "kl", "severity": "warning", "labels": {"team": "rl"}}
    other = {"id": "a2", "kind": "no_signal", "rule": "reward", "severity": "critical", "labels": {}}
    run = {"id": "run", "name": "seed3", "project": "math"}

    def fits(silence, *also):
        payload = {"event": "firing", "alert": told, "also": list(also), "run": run}
        return silence_of(OutboxMessage("m", "run", "a1", "hook", payload), [silence], NOON) is silence

    def silence(**about):
        return Silence("s", "ann", "", NOON, NOON + 1.0, **about)

    for about in ({"run": "seed3"}, {"run": "run"}, {"project": "math"}, {}):
        assert fits(silence(**about), other)
    for about in ({"kind": "kl_drift"}, {"rule": "kl"}, {"labels": {"team": "rl"}}, {"alerts": ("a1",)}):
        assert fits(silence(**about))
        assert not fits(silence(**about), other)
    assert not fits(silence(run="seed4"))
    assert not fits(silence(up_to=Severity.INFO))
    assert not fits(Silence("s", "ann", "", NOON - 9.0, NOON))
