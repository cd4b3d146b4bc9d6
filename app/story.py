"""Why a run is in its state, as one sentence in the order things began."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.records import Alert, AlertState, Finding

from . import format as fmt


def clauses(findings: Sequence[Finding], alerts: Sequence[Alert]) -> list[str]:
    """``["engine mismatch growing from step 4 410", "entropy collapse from step 4 690"]``.

    What fires now, in order of onset; findings that led no alert but began in the same stretch join it.
    """
    firing = {alert.kind: alert.onset_step for alert in alerts if alert.state is AlertState.FIRING}
    if not firing:
        return []
    begins = dict(firing)
    for finding in newest_by_kind(findings):
        known = begins.get(finding.kind)
        if known is not None:
            begins[finding.kind] = min(known, finding.onset_step)
    ordered = sorted(begins.items(), key=lambda item: (item[1], item[0]))
    return [f"{fmt.words(kind)} from step {fmt.step(onset)}" for kind, onset in ordered]


def newest_by_kind(findings: Sequence[Finding]) -> list[Finding]:
    """The newest finding of each kind."""
    return list({finding.kind: finding for finding in findings}.values())


def baselines(findings: Sequence[Finding]) -> dict[str, float]:
    """Metric -> the run's own healthy level of it, as the newest finding on it said."""
    return {f.metric: f.baseline for f in findings if f.metric and f.baseline is not None}


def past(alerts: Sequence[Alert]) -> str:
    """What to say when nothing fires: the last alarm and when it was over."""
    over = [a for a in alerts if a.state is AlertState.RESOLVED and a.fired_at is not None]
    if not over:
        return ""
    last = max(over, key=lambda alert: alert.resolved_step or alert.step)
    ended = fmt.step(last.resolved_step if last.resolved_step is not None else last.step)
    return f"{fmt.words(last.kind)} from step {fmt.step(last.onset_step)}, over at step {ended}"
