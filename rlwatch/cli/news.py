"""Findings and alerts as lines of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlwatch.cli.console import say
from rlwatch.cli.wording import SEVERITY_STYLES, one_line, step
from rlwatch.records import AlertState, Finding

if TYPE_CHECKING:
    from rlwatch.monitor.engine import Outcome
    from rlwatch.records import Alert


def finding_line(finding: Finding) -> str:
    """One finding as one line."""
    since = f" since {step(finding.onset_step)}" if finding.onset_step < finding.step else ""
    return f"step {step(finding.step)}  {finding.severity}  {finding.kind}{since}: {one_line(finding.message, 160)}"


def alert_line(alert: Alert) -> str:
    """One change of an alert as one line."""
    at = alert.resolved_step if alert.resolved_step is not None else alert.step
    return f"step {step(at)}  ALERT {alert.state}  {alert.severity}  {alert.kind} (rule {alert.rule})"


def tell_finding(finding: Finding, prefix: str = "") -> None:
    """Print a finding in the colour of its severity."""
    say(prefix + finding_line(finding), style=SEVERITY_STYLES[finding.severity])


def tell_alert(alert: Alert, prefix: str = "") -> None:
    """Print a change of an alert: green when it is over."""
    over = alert.state is AlertState.RESOLVED
    say(prefix + alert_line(alert), style="green" if over else SEVERITY_STYLES[alert.severity])


def tell_outcome(outcome: Outcome, prefix: str = "") -> None:
    """Print what a batch of records brought: findings, then the alerts that people are told of."""
    for finding in outcome.findings:
        tell_finding(finding, prefix)
    for transition in outcome.transitions:
        if transition.notify:
            tell_alert(transition.alert, prefix)
