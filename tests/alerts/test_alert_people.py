"""What people do about alerts, and how each stands because of it."""

from __future__ import annotations

import pytest
from dispatch_examples import CRITICAL, NOON, RESOLVED, Office, alert

from rlwatch.alerts import silencing
from rlwatch.alerts.rules import Rule
from rlwatch.alerts.silencing import seconds_of
from rlwatch.errors import ConfigError
from rlwatch.records import Acknowledgement, RunInfo, RunState, Silence

RUNS = {"run": RunInfo("run", project="math")}


def test_an_alert_stands_as_users_and_its_cause_left_it():
    """Acknowledged before silenced before inhibited; what is over, or told, does not stand anywhere."""
    alerts = [
        alert("nonfinite", severity=CRITICAL),
        alert("kl_drift"),
        alert("no_signal"),
        alert("grad_spike"),
        alert("reward_drop", RESOLVED),
    ]
    taken = [Acknowledgement(alerts[1].alert_id, "run", "ann", "mine")]
    silences = [
        Silence("a", "bob", "known", NOON - 5, NOON + 5, kind="no_signal"),
        Silence("b", "bob", "old", NOON - 5, NOON, kind="grad_spike"),
    ]
    found = silencing.quiet_reasons(alerts, Office().policy, NOON, runs=RUNS, acknowledgements=taken, silences=silences)

    assert found == {
        alerts[1].alert_id: "acknowledged by ann: mine",
        alerts[2].alert_id: "silenced by bob: known",
        alerts[3].alert_id: "inhibited by nonfinite",
    }


def test_what_waits_because_its_cause_has_only_just_ended_says_so():
    """Until which step, and which cause; not of a run that ended, nor of a rule or a run that is not known."""
    office = Office(Rule("r", channels=("hook",), keep_firing_for=20))
    cause = alert("nonfinite", RESOLVED, CRITICAL, resolved_step=60)
    others = [alert("reward_drop", rule="theirs"), alert("reward_drop", run="unknown")]

    def found(**run):
        runs = {"run": RunInfo("run", **run)}
        alerts = [cause, alert(), *others]
        return silencing.quiet_reasons(alerts, office.policy, NOON, runs=runs, acknowledgements=(), silences=())

    assert found(last_step=79) == {alert().alert_id: "inhibited until step 80: nonfinite was over at step 60"}
    assert found(last_step=80) == found(last_step=None) == found(last_step=79, state=RunState.FINISHED) == {}


@pytest.mark.parametrize("who", ["", "  "])
def test_whoever_acknowledges_or_silences_has_a_name(who: str):
    """Others will ask."""
    store = Office().store

    with pytest.raises(ConfigError, match=f"needs a name, got '{who}'"):
        silencing.acknowledge(store, alert(), by=who)
    with pytest.raises(ConfigError, match="needs a name and a reason"):
        silencing.silence(store, by=who, why="x", for_s=60.0, everything=True)


def test_an_acknowledgement_is_stamped_and_as_bad_as_the_alert_was():
    """So that getting worse is news again."""
    office = Office()
    office.publish(alert())

    assert silencing.acknowledge(
        office.store, alert(), by=" ann ", why=" mine ", clock=office.clock
    ) == Acknowledgement(alert().alert_id, "run", "ann", "mine", NOON, alert().severity)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400.0), ("2h", 7200.0), ("1d12h", 129_600.0), ("0.5 h", 1800.0), ("1w", 604_800.0)]
)
def test_durations_are_read_as_users_write_them(text: str, seconds: float):
    """One unit or several."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "2 hours", "-1h", "2h x"])
def test_what_is_no_duration_is_refused(text: str):
    """With an example."""
    with pytest.raises(ConfigError, match="as in 90m, 2h or 1d12h"):
        seconds_of(text)
