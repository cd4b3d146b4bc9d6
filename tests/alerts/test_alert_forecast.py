"""The rule about forecasts: early, told once, and moot once the crash is there."""

import pytest
from alert_examples import CRITICAL, INFO, WARNING, finding, told

from rlwatch.alerts.engine import AlertEngine
from rlwatch.alerts.rules import HEARTBEAT_KINDS, builtin_kinds, default_inhibitions, default_rules, inhibitors
from rlwatch.control.policy import RunHealth, veto_reset_reference
from rlwatch.records import Alert, AlertState

KIND = "crash_forecast"


def alert(kind, severity):
    return Alert(kind, "run", "r", kind, severity, AlertState.FIRING, 10, 10, "")


def kept_back(cause, severity, symptom=WARNING):
    alerts = [alert(cause, severity), alert(KIND, symptom)]
    return KIND in inhibitors(alerts, alerts, default_inhibitions())


def test_it_has_a_rule_of_its_own_that_carries_why():
    """Told as it was found, under its own name, to be routed by."""
    rows = [(s, [finding(KIND, step=s, message="mismatch/k3 (42 %)")] if s >= 5 else []) for s in range(12)]
    [first] = [t for t in told(AlertEngine("run", default_rules()), rows) if t.notify]

    assert (first.alert.rule, first.alert.step, first.alert.onset_step) == ("forecast", 7, 5)
    assert first.alert.message == "mismatch/k3 (42 %)"


@pytest.mark.parametrize("kind", [k for k in builtin_kinds() if k not in (KIND, *HEARTBEAT_KINDS)])
def test_a_critical_finding_keeps_the_forecast_back(kind):
    """It has come true; also a critical forecast is."""
    assert kept_back(kind, CRITICAL)
    assert kept_back(kind, CRITICAL, symptom=CRITICAL)


def test_a_warning_does_not():
    """A forecast says more than a detector's warning: how likely, and when."""
    assert not any(
        kept_back(kind, severity) for kind in ("entropy_collapse", "reward_drop") for severity in (WARNING, INFO)
    )


def test_a_forecast_keeps_nothing_back():
    """What happens is told whatever was forecast."""
    alerts = [alert(KIND, CRITICAL), *(alert(kind, WARNING) for kind in builtin_kinds() if kind != KIND)]

    assert inhibitors(alerts, alerts[:1], default_inhibitions()) == {}


def test_a_forecast_vetoes_no_command():
    """Before the collapse the policy may still be a good anchor; what may come is no verdict."""
    health = RunHealth((finding(KIND, CRITICAL),), (alert(KIND, CRITICAL),))

    assert veto_reset_reference(health) is None
