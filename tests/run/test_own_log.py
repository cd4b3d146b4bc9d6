"""What a trainer's own log says of alerts: each once, and what is held back only in number."""

import logging
import time

import pytest

from rlwatch.alerts.engine import DecisionReason, Transition
from rlwatch.alerts.rules import AlertingConfig, default_rules
from rlwatch.errors import StoreBusyError
from rlwatch.monitor.step_judge import MonitorOutcome
from rlwatch.records import Alert, AlertState, RunInfo, Severity, Silence
from rlwatch.run.alerting import OwnLog

RULES = {kind: rule for rule in default_rules() for kind in rule.kinds}
CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING


def fires(kind, step, severity=CRITICAL, reason=DecisionReason.FIRED_AT_ONCE):
    alert = Alert(
        f"id of {kind}",
        "r",
        rule=RULES[kind].name,
        kind=kind,
        severity=severity,
        state=AlertState.FIRING if reason is not DecisionReason.RESOLVED else AlertState.RESOLVED,
        onset_step=step,
        step=step,
        message="bad",
    )
    return Transition(alert, reason, RULES[kind])


def over(kind, step):
    return fires(kind, step, reason=DecisionReason.RESOLVED)


@pytest.fixture
def say(caplog):
    """Takes transitions as one outcome; what was logged of them."""
    caplog.set_level(logging.INFO, "rlwatch")
    silences = []
    log = OwnLog(AlertingConfig(), RunInfo("r"), lambda: silences)

    def saying(*transitions):
        caplog.clear()
        log(MonitorOutcome(transitions=transitions))
        return [record.getMessage() for record in caplog.records]

    saying.silences = silences
    return saying


def test_what_a_crash_inhibits_is_counted_and_not_said(say):
    """In whatever order the two come, of one step or of two in one batch."""
    assert say(fires("grad_spike", 40, WARNING), fires("nonfinite", 40), fires("reward_drop", 44)) == [
        "firing critical nonfinite at step 40: bad",
        "2 alerts held back: inhibited by nonfinite since step 40 (rlwatch alerts lists all)",
    ]


def test_what_is_held_back_is_said_when_its_cause_is_over_if_it_still_fires(say):
    """What ended before is never spoken of, nor is its end."""
    say(fires("nonfinite", 40), fires("reward_drop", 41), fires("grad_spike", 42))

    assert say(over("grad_spike", 50)) == []
    assert say(over("nonfinite", 60)) == [
        "resolved critical nonfinite at step 60: bad",
        "firing critical reward_drop at step 41: bad",
    ]
    assert say(over("reward_drop", 70)) == ["resolved critical reward_drop at step 70: bad"]


def test_a_silence_holds_back_and_a_store_that_is_busy_holds_nothing_back(say, caplog):
    """Rather one line too many than an alert that nobody saw."""
    say.silences.append(Silence("s", "me", "known", time.time() - 1, time.time() + 60, kind="reward_drop"))

    def busy():
        raise StoreBusyError("busy")

    assert say(fires("reward_drop", 5), over("reward_drop", 9)) == [
        "1 alert held back: silenced by me: known (rlwatch alerts lists all)"
    ]
    OwnLog(AlertingConfig(), RunInfo("r"), busy)(MonitorOutcome(transitions=(fires("reward_drop", 5),)))
    assert caplog.records[-1].getMessage().startswith("firing critical reward_drop")


def test_an_alert_that_gets_worse_is_said_again_and_what_only_waits_is_not(say):
    """Pending and silent transitions are no news."""
    assert say(fires("kl_drift", 5, WARNING, DecisionReason.FIRST_PENDING)) == []
    assert len(say(fires("kl_drift", 15, WARNING, DecisionReason.HELD_FOR))) == 1
    assert say(fires("kl_drift", 20, CRITICAL, DecisionReason.ESCALATED)) == [
        "firing critical kl_drift at step 20: bad"
    ]
