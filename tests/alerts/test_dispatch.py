"""What is told of alerts, to whom and when: grouping, repeats, escalation, acknowledgement, what is kept back."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import time
from pathlib import Path

import pytest
from dispatch_examples import CRITICAL, FIRING, HOOK, NOON, PENDING, RESOLVED, WARNING, Office, alert, summaries

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.matching import alert_ids
from rlwatch.alerts.rules import AlertGrouping, AlertingConfig, Inhibition, QuietHours, Rule
from rlwatch.records import Acknowledgement, Alert, Finding, RunInfo, Silence
from rlwatch.store.url import open_store

PATIENT = Rule("r", channels=("hook",), repeat_minutes=60.0)
STRICT = Rule(
    "r", channels=("hook",), escalate_after_minutes=30.0, escalate_to=("pager",), escalate_severity="critical"
)


def worse(of: Alert, severity=CRITICAL) -> Alert:
    return replace(of, severity=severity, step=of.step + 1)


def over(of: Alert) -> Alert:
    return replace(of, state=RESOLVED, resolved_step=9, resolved_at=NOON)


def test_firing_worse_and_over_are_published_once_each_on_every_channel():
    """However often somebody looks."""
    office = Office(Rule("r", channels=("hook", "chat")))
    published = [
        office.publish(alert()),
        office.publish(alert()),
        office.publish(worse(alert())),
        office.publish(over(worse(alert()))),
    ]

    assert published == [
        ["hook firing warning kl_drift", "chat firing warning kl_drift"],
        [],
        ["hook escalated critical kl_drift", "chat escalated critical kl_drift"],
        ["hook resolved critical kl_drift", "chat resolved critical kl_drift"],
    ]
    assert office.later(10_000) == []


def eased(of: Alert) -> Alert:
    return replace(of, severity=WARNING, step=of.step + 2, reason="no longer critical since step 8: back at 0.7")


def test_getting_better_is_published_once_and_what_gets_worse_again_too():
    """To whoever was told that it was worse; the end is told as bad as it was."""
    office = Office()
    critical = worse(alert())
    published = [
        office.publish(critical),
        office.publish(eased(critical)),
        office.publish(eased(critical)),
        office.publish(critical),
        office.publish(eased(critical)),
        office.publish(over(critical)),
    ]

    assert published == [
        ["hook firing critical kl_drift"],
        ["hook eased warning kl_drift"],
        [],
        ["hook escalated critical kl_drift"],
        ["hook eased warning kl_drift"],
        ["hook resolved critical kl_drift"],
    ]
    texts = [message.payload["text"] for message in office.store.outbox("run")]
    assert texts[1].endswith("no longer critical since step 8: back at 0.7")


def test_an_eased_alert_is_repeated_as_what_it_is_now():
    """Not as bad as it once was."""
    office = Office(PATIENT)
    office.publish(worse(alert()))
    office.publish(eased(worse(alert())))
    office.deliver()

    assert office.later(61) == ["hook repeated warning kl_drift"]


def test_whoever_took_an_alert_on_is_told_that_it_eased():
    """As that it is over: it is no reminder."""
    office = Office()
    critical = worse(alert())
    office.publish(critical)
    office.store.acknowledge(Acknowledgement(critical.alert_id, "run", "ann", severity=CRITICAL))

    assert office.publish(eased(critical)) == ["hook eased warning kl_drift"]
    assert office.publish(critical) == []


def test_a_cause_that_eased_goes_on_to_keep_its_symptoms_back():
    """They are no news because it got better."""
    office = Office(inhibitions=(Inhibition(("cause",), ("symptom",)),))
    office.publish(alert("cause", severity=CRITICAL), alert("symptom"))

    assert office.publish(alert("cause", severity=WARNING)) == ["hook eased warning cause"]
    assert office.kept() == ["symptom: inhibited by cause since step 5"]


@pytest.mark.parametrize("state", [PENDING, RESOLVED])
def test_what_never_fired_is_never_published(state):
    """Pending, and the end of a pending one."""
    assert Office().publish(alert(state=state, fired_at=None)) == []


def test_nobody_is_notified_twice_by_two_who_look():
    """A trainer, a watcher and the dashboard over one store."""
    office = Office(PATIENT)
    published = [office.publish(alert()), summaries(office.another_dispatcher().publish("run"))]
    office.deliver()
    office.clock.advance(3600.0)

    assert published == [["hook firing warning kl_drift"], []]
    assert summaries(office.another_dispatcher().publish("run")) == ["hook repeated warning kl_drift"]
    assert summaries(office.dispatcher.publish("run")) == []


def test_what_a_dead_process_put_down_and_did_not_tell_the_next_tells():
    """The alert's row is enough."""
    office = Office()
    office.store.put_alerts([alert()], [])

    assert summaries(office.another_dispatcher().publish("run")) == ["hook firing warning kl_drift"]


def test_alerts_of_one_step_are_one_message_led_by_the_severest():
    """A message is a reason to look; the look shows all."""
    office = Office(inhibitions=())
    several = [alert("kl_drift"), alert("nonfinite", severity=CRITICAL), alert("grad_spike", onset_step=3)]

    assert office.publish(*several) == ["hook firing critical nonfinite + grad_spike + kl_drift"]
    assert office.publish() == []


def test_alerts_of_one_group_end_as_they_end_and_the_last_end_says_so():
    """Who keeps an incident open by ``group.id`` closes it at 0."""
    office = Office()
    a, b = alert("a", severity=CRITICAL), alert("b")
    office.publish(a, b)
    first = office.dispatcher.publish("run", [over(a)])[0]
    second = office.dispatcher.publish("run", [over(b)])[0]

    assert [m.payload["group"] for m in (first, second)] == [
        {"id": a.alert_id, "firing": 1},
        {"id": a.alert_id, "firing": 0},
    ]
    assert {m.alert_id for m in (first, second)} == {a.alert_id}


def test_with_grouping_off_each_alert_is_its_own_message():
    """For receivers that know one alert a message."""
    assert Office(grouping=AlertGrouping(by="none")).publish(alert("a"), alert("b")) == [
        "hook firing warning a",
        "hook firing warning b",
    ]


def test_alerts_wait_for_others_of_their_group_and_no_longer():
    """What fired ten seconds later is in the same message, and makes it no later."""
    office = Office(grouping=AlertGrouping(wait_s=30.0))
    assert office.publish(alert("a")) == []
    office.clock.advance(20.0)
    assert office.publish(alert("b", fired_at=NOON + 20.0)) == []
    assert office.kept() == [f"{kind}: waits for others of its group" for kind in "ab"]
    office.clock.advance(10.0)

    assert office.publish() == ["hook firing warning a + b"]


def test_what_was_over_while_it_waited_tells_nobody():
    """A flicker is no news."""
    office = Office(grouping=AlertGrouping(wait_s=30.0))

    assert [office.publish(alert()), office.publish(over(alert())), office.later(5)] == [[], [], []]


def test_the_last_word_waits_for_nobody():
    """The trainer ends; there may be nobody to say it later."""
    office = Office(grouping=AlertGrouping(wait_s=30.0))
    office.publish(alert())

    assert office.publish(final=True) == ["hook firing warning kl_drift"]


def test_runs_of_a_project_that_fail_together_are_one_message():
    """A node, a bad batch of data, a reward service: one cause."""
    office = Office(runs=("one", "two"), grouping=AlertGrouping(by="project", wait_s=30.0))
    assert office.publish(alert(run="one"), run="one") == []
    assert office.publish(alert("nonfinite", severity=CRITICAL, run="two"), run="two") == []

    assert office.later(1, run="one") == ["hook firing critical nonfinite + kl_drift"]
    assert office.later(1, run="two") == []
    assert office.publish(over(alert(run="one")), run="one") == ["hook resolved warning kl_drift"]


def test_it_is_repeated_as_often_as_the_rule_says_until_it_is_over():
    """Counted from the last word on that channel; each repeat is a message of its own."""
    office = Office(PATIENT)
    office.publish(alert())
    office.deliver()
    published = [office.later(59), office.later(1)]
    office.deliver()
    published += [office.later(59), office.later(1)]
    office.deliver()
    office.publish(over(alert()))

    assert published == [[], ["hook repeated warning kl_drift"]] * 2
    assert office.later(600) == []
    assert len({m.message_id for m in office.store.outbox()}) == 4


def test_what_has_not_arrived_is_not_repeated():
    """A receiver that was down over the weekend gets one message, not thirty."""
    office = Office(PATIENT)
    office.publish(alert())

    assert office.later(600) == []


def test_an_acknowledged_alert_stays_quiet_until_it_is_over():
    """No repeats and no escalation; the end is told."""
    office = Office(replace(PATIENT, escalate_after_minutes=5.0, escalate_to=("pager",)))
    office.publish(alert())
    office.deliver()
    office.store.acknowledge(Acknowledgement(alert().alert_id, "run", "ann", "on it", NOON, WARNING))

    assert [office.later(10), office.later(600)] == [[], []]
    assert office.publish(over(alert())) == ["hook resolved warning kl_drift"]


def test_getting_worse_than_it_was_acknowledged_is_published():
    """Whoever took on a warning has not seen the crash."""
    office = Office()
    office.publish(alert())
    office.store.acknowledge(Acknowledgement(alert().alert_id, "run", "ann", severity=WARNING))

    assert office.publish(worse(alert())) == ["hook escalated critical kl_drift"]


def test_what_nobody_acknowledges_is_told_to_others_louder():
    """Once on each channel."""
    office = Office(STRICT)
    office.publish(alert())

    assert [office.later(29), office.later(1), office.later(60)] == [
        [],
        ["pager unacknowledged critical kl_drift", "hook unacknowledged critical kl_drift"],
        [],
    ]
    assert office.publish(over(alert())) == ["hook resolved critical kl_drift", "pager resolved critical kl_drift"]


def test_it_escalates_by_steps_where_the_rule_counts_steps():
    """Of the run, since it fired."""
    from rlwatch.records import StepRecord

    office = Office(replace(STRICT, escalate_after_minutes=0.0, escalate_after_steps=10, escalate_severity=None))
    office.publish(alert(step=7))
    writer = office.store.open_run(RunInfo("run"))
    writer.write([StepRecord(16, {"kl": 1.0}, attempt=2)])
    assert office.publish() == []
    writer.write([StepRecord(17, {"kl": 1.0}, attempt=2)])

    assert office.publish() == ["pager unacknowledged warning kl_drift"]
    assert office.store.outbox()[-1].payload["alert"]["reason"] == "not acknowledged for 10 steps"


def test_an_alert_that_tells_nobody_at_first_can_still_escalate():
    """``channels = []``: only what nobody looks at for an hour."""
    office = Office(Rule("r", channels=(), escalate_after_minutes=60, escalate_to=("pager",)))

    assert [office.publish(alert()), office.later(59), office.later(1)] == [
        [],
        [],
        ["pager unacknowledged warning kl_drift"],
    ]


@pytest.mark.parametrize("rule", [PATIENT, STRICT])
def test_of_a_run_that_is_not_live_nothing_is_repeated_or_escalated(rule: Rule):
    """It cannot get better any more; with ``only_live = false`` it goes on."""
    dead, kept = Office(rule), Office(replace(rule, only_live=False))
    for office in (dead, kept):
        office.publish(alert())
        office.deliver()
        office.live = False

    assert dead.later(90) == []
    assert kept.later(90) != []


def test_of_a_run_that_is_not_live_what_was_not_published_is_published_for_a_day():
    """Its trainer died before it could; last month's alerts are no news."""
    office = Office(live=False)
    office.store.put_alerts([alert("old", fired_at=NOON - 25 * 3600.0), alert("new", fired_at=NOON - 3600.0)], [])

    assert office.publish() == ["hook firing warning new"]


SILENCES = {
    "run": {"run": "run"},
    "run's name": {"run": "name of run"},
    "project": {"project": "math"},
    "kind": {"kind": "kl_drift"},
    "rule": {"rule": "r"},
    "label": {"labels": {"team": "rl"}},
    "all": {},
    "both": {"kind": "kl_drift", "labels": {"team": "rl"}},
}
OTHERS = {
    "run": {"run": "ru"},
    "project": {"project": "code"},
    "kind": {"kind": "grad_spike"},
    "rule": {"rule": "s"},
    "label": {"labels": {"team": "infra"}},
    "both": {"kind": "kl_drift", "labels": {"team": "infra"}},
}


@pytest.mark.parametrize("fits", SILENCES.values(), ids=SILENCES)
def test_a_silenced_alert_is_published_when_the_silence_is_over_if_it_still_fires(fits: dict):
    """Kept back, not lost; with the reason."""
    office = Office(replace(HOOK, labels={"team": "rl"}))
    office.store.put_silence(Silence("s", "ann", "node 7 is in repair", NOON - 60, NOON + 600, **fits))

    assert office.publish(alert()) == []
    assert office.kept() == ["kl_drift: silenced by ann: node 7 is in repair"]
    assert [office.later(9), office.later(1)] == [[], ["hook firing warning kl_drift"]]


@pytest.mark.parametrize("fits", OTHERS.values(), ids=OTHERS)
def test_a_silence_of_something_else_silences_nothing(fits: dict):
    """All that it names must fit."""
    office = Office(replace(HOOK, labels={"team": "rl"}))
    office.store.put_silence(Silence("s", "ann", "", NOON - 60, NOON + 600, **fits))

    assert office.publish(alert()) == ["hook firing warning kl_drift"]


def test_the_end_of_what_was_published_before_a_silence_is_published_after_it():
    """Who knows that it fires will know that it is over."""
    office = Office()
    office.publish(alert())
    office.store.put_silence(Silence("s", "ann", "", NOON, NOON + 600))

    assert [office.publish(over(alert())), office.later(10)] == [[], ["hook resolved warning kl_drift"]]


def test_in_quiet_hours_only_the_critical_is_published_and_the_rest_in_the_morning():
    """What is over by then nobody need know."""
    office = Office(quiet_hours=(QuietHours(time(12), time(18)),))
    published = office.publish(alert("a"), alert("b"), alert("c", severity=CRITICAL))

    assert published == ["hook firing critical c"]
    assert office.kept() == [f"{kind}: quiet hours until 18:00 UTC" for kind in "ab"]
    assert [office.publish(over(alert("a"))), office.later(360)] == [[], ["hook firing warning b"]]


def test_what_escalates_to_critical_breaks_the_quiet():
    """That is what it is for."""
    office = Office(STRICT, quiet_hours=(QuietHours(time(12, 10), time(18)),))
    office.publish(alert())

    assert office.later(30) == ["pager unacknowledged critical kl_drift", "hook unacknowledged critical kl_drift"]


def test_a_symptom_comes_when_its_cause_is_over_if_it_still_holds():
    """Kept back, not lost."""
    office = Office(inhibitions=(Inhibition(("nonfinite",), ("grad_spike", "kl_drift")),))
    cause = alert("nonfinite", severity=CRITICAL)
    assert office.publish(cause, alert("grad_spike"), alert("kl_drift")) == ["hook firing critical nonfinite"]
    assert office.kept() == [f"{kind}: inhibited by nonfinite since step 5" for kind in ("grad_spike", "kl_drift")]
    office.publish(over(alert("kl_drift")))

    assert office.publish(over(cause)) == ["hook resolved critical nonfinite", "hook firing warning grad_spike"]


def test_the_end_of_a_symptom_that_was_published_is_published_though_its_cause_fires():
    """Good news is not kept back."""
    office = Office(inhibitions=(Inhibition(("nonfinite",)),))
    office.publish(alert("kl_drift"))
    office.publish(alert("nonfinite", severity=CRITICAL))

    assert office.publish(over(alert("kl_drift"))) == ["hook resolved warning kl_drift"]


def test_a_cause_that_tells_nobody_keeps_nobody_back():
    """Else nobody would be told of anything."""
    office = Office(HOOK, Rule("mute", channels=("console",)), inhibitions=(Inhibition(("nonfinite",)),))

    assert office.publish(alert("nonfinite", severity=CRITICAL, rule="mute"), alert()) == [
        "hook firing warning kl_drift"
    ]


def test_a_message_names_what_fires_on_its_run_since_before():
    """Cause before symptom, in the order they began."""
    office = Office(runs=("run", "other"))
    office.publish(alert("entropy_collapse", onset_step=4), alert("mismatch_growth", onset_step=2))
    office.store.put_alerts([alert("nonfinite", onset_step=1, run="other")], [])
    [sent] = office.dispatcher.publish("run", [alert("reward_drop", onset_step=6)])

    assert [(each["kind"], each["onset_step"]) for each in sent.payload["earlier"]] == [
        ("mismatch_growth", 2),
        ("entropy_collapse", 4),
    ]


def test_a_message_names_the_cause_that_explains_it_by_what_was_known_then():
    """Of a chain its root; of a failure outside every chain nothing; and nothing that was found only later."""
    office = Office()
    writer = office.store.open_run(RunInfo("run"))
    chain = [("mismatch_growth", 412), ("entropy_collapse", 455), ("long_tail", 470), ("reward_drop", 498)]
    found = [Finding("d", kind, CRITICAL, onset + 9, onset, "", seq=n) for n, (kind, onset) in enumerate(chain, 1)]
    writer.write(found)
    published = [
        (kind, office.dispatcher.publish("run", [alert(kind, step=at)])[0].payload["cause"])
        for kind, at in (("entropy_collapse", 464), ("long_tail", 479), ("mismatch_growth", 421))
    ]

    assert [(kind, cause and (cause["kind"], cause["sure"])) for kind, cause in published] == [
        ("entropy_collapse", ("mismatch_growth", "strong")),
        ("long_tail", None),
        ("mismatch_growth", None),
    ]


def test_the_console_is_not_written_for_and_rules_of_others_are_left_alone():
    """A process logs its own alerts; who has another rlwatch.toml tells its own."""
    office = Office(Rule("r", channels=("console",), escalate_after_minutes=1, escalate_to=("console",)))

    assert [office.publish(alert()), office.publish(alert("x", rule="theirs")), office.later(60)] == [[], [], []]
    assert {each.state for each in office.store.alerts("run")} == {FIRING}


def test_messages_that_are_not_ours_are_no_telling():
    """A trial message, and one from another version."""
    from rlwatch.records import OutboxMessage

    office = Office()
    strange = [OutboxMessage("t", "run", "x", "hook", {"event": "test"}), OutboxMessage("u", "run", "y", "hook", {})]
    office.store.put_alerts([alert()], strange)

    assert office.publish() == ["hook firing warning kl_drift"]


def test_getting_worse_when_a_repeat_is_due_is_one_message():
    """The stronger word."""
    office = Office(PATIENT)
    office.publish(alert())
    office.deliver()
    office.clock.advance(3600.0)

    assert office.publish(worse(alert())) == ["hook escalated critical kl_drift"]


def test_two_who_tell_of_a_project_at_once_say_it_once():
    """A second process that comes between the reading and the writing of the first waits for it."""
    office = Office(runs=("one", "two"), grouping=AlertGrouping(by="project"))
    office.store.put_alerts([alert(run="one")], [])
    ledger, helpers = office.store.ledger, []

    def come_between() -> None:
        office.another_dispatcher().publish("two", [alert("nonfinite", severity=CRITICAL, run="two")])

    def slow_ledger(run_id: str):
        found = ledger(run_id)
        if run_id == "two" and len(helpers) < 2 and threading.current_thread() is threading.main_thread():
            helpers.append(threading.Thread(target=come_between if helpers else lambda: None))
            helpers[-1].start()
            helpers[-1].join(0.3)
        return found

    office.store.ledger = slow_ledger
    office.publish(run="one")
    helpers[-1].join(10.0)

    published = Counter(alert_id for m in office.store.outbox() for alert_id in alert_ids(m))
    assert set(published.values()) == {1}
    assert len(published) == 2


def test_many_processes_that_tell_at_once_say_each_thing_once(tmp_path: Path):
    """Over one store of files, each with its own connection; a busy store is asked again."""
    store = open_store(tmp_path)
    store.open_run(RunInfo("run")).close()

    def looks(number: int) -> None:
        dispatcher = Dispatcher(open_store(tmp_path), AlertingConfig(rules=(HOOK,)))
        for kind in "abc":
            dispatcher.publish("run", [alert(kind)] if number % 2 else [])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(looks, range(8)))

    published = Counter(alert_id for m in store.outbox() for alert_id in alert_ids(m))
    assert set(published.values()) == {1}
    assert len(published) == 3


def test_two_who_tell_of_a_run_at_once_say_it_once():
    """A worse alert that comes between deciding and writing waits: it cannot take along what is being published."""
    office, helpers = Office(inhibitions=()), []
    publish = office.store.publish

    def slow(run_id, alerts, compose):
        return publish(run_id, alerts, lambda ledger: meanwhile(compose(ledger)))

    def meanwhile(messages):
        if not helpers:
            worst = alert("entropy_collapse", severity=CRITICAL)
            helpers.append(threading.Thread(target=lambda: office.another_dispatcher().publish("run", [worst])))
            helpers[0].start()
            helpers[0].join(0.3)
        return messages

    office.store.publish = slow
    office.publish(alert())
    helpers[0].join(10.0)

    published = Counter(alert_id for m in office.store.outbox() for alert_id in alert_ids(m))
    assert set(published.values()) == {1}
    assert len(published) == 2
