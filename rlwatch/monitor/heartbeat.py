"""The alert on a run that fell silent or died: judged from the store by whoever watches it, not by the dead.

Deterministic but for the time of the judgement: an alert's id is made of the last row the run wrote, so that
all who watch raise the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rlwatch.alerts.engine import alert_id
from rlwatch.alerts.rules import CRASHED, HEARTBEAT_KINDS, SILENT, Rule
from rlwatch.control.liveness import Sign
from rlwatch.records import JSON, Alert, AlertState, RunInfo, RunState, Severity

RECENT_S = 24 * 3600.0
"""A run that was silent for longer when somebody first looks is history, not news."""


def judged(run: RunInfo, sign: Sign, alerts: Iterable[Alert], rule: Rule, now: float) -> list[Alert]:
    """What the heartbeat rule says of ``run`` now that its stored ``alerts`` do not say yet."""
    said = {alert.alert_id: alert for alert in alerts if alert.rule == rule.name and alert.kind in HEARTBEAT_KINDS}
    current = _raised(run, sign, rule, now)
    firing = [alert for alert in said.values() if alert.state is AlertState.FIRING]
    over = [_over(alert, run, sign, now) for alert in firing if _ended(alert, current, run, sign)]
    if current is None:
        return over
    before = said.get(current.alert_id)
    if before is None:
        recent = now - max(run.last_ts or 0.0, run.heartbeat_at or 0.0, run.created_at) < RECENT_S
        return [*over, current] if recent else over
    worse = before.state is AlertState.FIRING and current.severity.rank > before.severity.rank
    return [*over, replace(current, fired_at=before.fired_at)] if worse else over


def _raised(run: RunInfo, sign: Sign, rule: Rule, now: float) -> Alert | None:
    """The alert that holds now, if any."""
    if run.state is RunState.CRASHED:
        kind, severity, message = CRASHED, Severity.CRITICAL, run.state_reason or "the trainer ended with an error"
    elif sign.silent_s is not None:
        kind, severity, message = SILENT, _silence_severity(sign), _silence_words(run, sign, now)
    else:
        return None
    if (rule.kinds and kind not in rule.kinds) or severity.rank < rule.min_severity.rank:
        return None
    step = run.last_step or 0
    return Alert(
        alert_id=alert_id(run.run_id, rule.name, kind, sign.pace.seq),
        run_id=run.run_id,
        rule=rule.name,
        kind=kind,
        severity=rule.severity or severity,
        state=AlertState.FIRING,
        onset_step=step,
        step=step,
        message=message,
        reason=f"{message}; judged from the store",
        detector="heartbeat",
        evidence=_evidence(run, sign),
        fired_at=now,
    )


def _ended(alert: Alert, current: Alert | None, run: RunInfo, sign: Sign) -> bool:
    """Whether the run spoke again, or its writer said how it ended."""
    if current is not None:
        return alert.alert_id != current.alert_id
    spoke = alert.alert_id != alert_id(alert.run_id, alert.rule, alert.kind, sign.pace.seq)
    return spoke or run.state is RunState.FINISHED


def _over(alert: Alert, run: RunInfo, sign: Sign, now: float) -> Alert:
    words = {
        RunState.FINISHED: f"the run has finished{f': {run.state_reason}' if run.state_reason else ''}",
        RunState.CRASHED: "the run has ended with an error",
        RunState.RUNNING: f"the run reports again: step {run.last_step}, attempt {max(run.attempt, sign.pace.attempt)}",
    }
    return replace(
        alert,
        state=AlertState.RESOLVED,
        step=run.last_step or 0,
        reason=words[run.state],
        resolved_step=run.last_step or 0,
        resolved_at=now,
    )


def _silence_severity(sign: Sign) -> Severity:
    return Severity.WARNING if sign.reports else Severity.CRITICAL


def _silence_words(run: RunInfo, sign: Sign, now: float) -> str:
    usual = "" if sign.pace.step_s is None else f" (usually {duration(sign.pace.step_s)})"
    silence = f"no step for {duration(sign.silent_s or 0.0)}{usual}"
    if sign.reports:
        return f"{silence}; its process lives: it hangs, or does something that takes long"
    last = max(run.heartbeat_at or 0.0, run.last_ts or 0.0, run.created_at)
    return f"{silence}, and no sign of its process for {duration(now - last)}: it was killed, or its machine is gone"


def _evidence(run: RunInfo, sign: Sign) -> dict[str, JSON]:
    found = {
        "silent_s": sign.silent_s,
        "median_step_s": sign.pace.step_s,
        "last_step": run.last_step,
        "last_step_at": run.last_ts,
        "heartbeat_at": run.heartbeat_at,
        "host": run.host or None,
        "pid": run.pid,
    }
    return {key: value for key, value in found.items() if value is not None}


def duration(seconds: float) -> str:
    """``38 s``, ``41 min``, ``3.5 h``.

    >>> [duration(s) for s in (0.25, 38, 2460, 12600)]
    ['0.25 s', '38 s', '41 min', '3.5 h']
    """
    for unit, length, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if seconds < most:
            return f"{seconds / length:.2g} {unit}" if seconds < 100 * length else f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.3g} h"
