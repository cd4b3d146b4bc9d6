"""Findings, alarms, forecasts and diagnoses as printed text, shared by several commands."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlwatch.cli.console import SEVERITY_STYLES, Cell, cell_of, print_table, print_text
from rlwatch.columns import FINDINGS, FINDINGS_SHOWN, heads
from rlwatch.diagnosis import Action, Cause, Confidence, Diagnosis, Nature
from rlwatch.records import JSON, AlertState, Finding, ForecastRecord, Severity
from rlwatch.wording import chance, for_terminal, one_line, plural, step

if TYPE_CHECKING:
    from rlwatch.detectors.index import NotRun
    from rlwatch.forecast import Forecast
    from rlwatch.monitor.step_judge import MonitorOutcome
    from rlwatch.records import Alert
    from rlwatch.view import RunView


LONGEST = 300
"""Most characters of a message in a table, where the terminal wraps it."""


def severity_cell(severity: str) -> Cell:
    """Return a table cell with ``severity`` in its colour."""
    return (str(severity), SEVERITY_STYLES[Severity(severity)])


def stage_cell(finding: Finding) -> Cell:
    """Return a table cell with the finding's severity in its colour, or for a recovery its stage in green."""
    return (finding.stage.value, "green") if finding.stage.better else severity_cell(finding.severity)


def print_headline(view: RunView, *, detail: bool = False) -> None:
    """Print the headline of a run in the colour of its urgency; with ``detail`` also the full verdict."""
    verdict = view.verdict
    style = "green" if verdict.urgency is None else SEVERITY_STYLES[verdict.urgency]
    say_wrapped(view.headline, style=style)
    if detail and verdict.text != verdict.brief:
        say_wrapped(verdict.text, style="dim")


def print_not_judged(parts: Sequence[NotRun], flag: str, *, everything: bool = False) -> None:
    """Print the number of checks that lacked their metrics, in one line; with ``everything``, each with its reason.

    ``flag`` is the option that lists them.
    """
    if everything:
        for part in parts:
            print_text(f"check skipped: {part.name}: {part.reason}", style="dim")
    elif parts:
        print_text(f"{checks_left(parts)} ({flag} lists them)", style="dim")


def checks_left(parts: Sequence[NotRun]) -> str:
    """Return the number of skipped checks in words: ``44 checks need metrics that this log lacks``."""
    return f"{plural(len(parts), 'check')} need{'s' if len(parts) == 1 else ''} metrics that this log lacks"


# The answer to a scan: a complete summary in a few lines of 80 columns.

COLUMNS = 80
LABEL = 12
"""Width, in columns, of the labels at the left of an answer."""


def say_wrapped(text: str, style: str = "", *, label: str = "", most: int = 0) -> None:
    """Print ``text`` wrapped to 80 columns, indented behind ``label``; at most ``most`` lines, if that is not 0."""
    indent = " " * LABEL if label else ""
    lines = textwrap.wrap(
        for_terminal(text),
        COLUMNS,
        initial_indent=f"{label:<{LABEL}}" if label else "",
        subsequent_indent=indent,
        max_lines=most or None,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    for line in lines:
        print_text(line, style=style)


def print_answer(view: RunView, alarms: Sequence[tuple[Severity, str, int]], notes: Sequence[str], flag: str) -> None:
    """Print a run's headline, its cause with evidence and advice, the alarms, and the checks that were skipped.

    Parameters
    ----------
    view
        The run.
    alarms
        Severity, kind and step of each alarm, in order.
    notes
        Remarks on reading the log.
    flag
        The option that lists everything.
    """
    print_headline(view)
    explanation = view.explanation
    if explanation.causes:
        _print_why(explanation)
    if alarms:
        first = alarms[0]
        critical = next((alarm for alarm in alarms if alarm[0] is Severity.CRITICAL), None)
        parts = [f"{first[0].value} at step {step(first[2])} ({first[1]})"]
        parts += [f"critical at step {step(critical[2])} ({critical[1]})"] if critical and critical != first else []
        say_wrapped("; ".join(parts), label="alarms", most=2)
    missing = [f"no {fact}" for fact in view.verdict.missing]
    missing += [checks_left(view.not_judged)] if view.not_judged else []
    if missing:
        say_wrapped(f"{', '.join(missing)} ({flag} lists them)", label="not judged", style="dim", most=2)
    for note in notes[:FEW_NOTES]:
        say_wrapped(note, label="reading", style="dim", most=1)


FEW_NOTES = 2
"""Most remarks on reading a log that are printed; ``-v`` prints all."""
FEW_EVIDENCE = 3
"""Most pieces of evidence that are printed with an answer."""


def _print_why(explanation: Diagnosis) -> None:
    """Print cause, evidence in order of time and actions, in at most seven lines."""
    first = explanation.causes[0]
    if not explanation.enough:
        say_wrapped(explanation.why_not, label="cause", style=STYLES[Confidence.WEAK], most=2)
        return
    text = f"{first.title} ({first.sure.words}: {first.why})"
    say_wrapped(text, label="cause", style=STYLES[first.sure], most=2)
    shown = [f"step {step(e.step)} {e.text.removesuffix(f' from step {e.step}')}" for e in first.evidence]
    say_wrapped("; ".join(shown[:FEW_EVIDENCE]), label="evidence", most=3)
    actions = [f"{place}. {action.name}" for place, action in enumerate(first.actions[:FEW], 1)]
    if actions:
        say_wrapped("  ".join(actions), label="do", most=2)


def print_findings(findings: Iterable[Finding], *, title: str = "Findings") -> None:
    """Print a table with kind, onset, step and message of each finding; a recovery has its stage in place of a
    severity.
    """
    rows = [_finding_cells(finding) for finding in findings]
    if rows:
        print_table(heads(FINDINGS, FINDINGS_SHOWN), rows, title=title)


def _finding_cells(finding: Finding) -> list[Cell]:
    cells = {name: cell_of(FINDINGS[name], getattr(finding, name)) for name in FINDINGS_SHOWN}
    return list((cells | {"severity": stage_cell(finding)}).values())


def print_alarms(alarms: Sequence[tuple[str, str, int, str]]) -> None:
    """Print a table of the alarms that would have been sent, each as (severity, kind, step, reason)."""
    rows = [(severity_cell(s), kind, step(at), one_line(reason, LONGEST)) for s, kind, at, reason in alarms]
    if rows:
        print_table(("severity", "kind", ">step", "reason"), rows, title="Alerts (would have been sent)")


# The forecasts of a run, in one line.


def newest_row(records: Sequence[ForecastRecord]) -> dict[str, JSON] | None:
    """Return the last of ``records`` as the forecast in plain values, with its reason; None if there are no records."""
    from dataclasses import asdict

    from rlwatch.forecast.forecast import forecast_of

    if not records:
        return None
    newest = forecast_of(records[-1])
    return asdict(newest) | {"kind": newest.kind.value, "reason": newest.reason}


def forecast_line(forecasts: Sequence[Forecast], *, now: bool = False) -> str:
    """Return a line with the highest failure probability and the first alarm of ``forecasts``; "" if there are none.

    ``now``: also the newest probability.

    >>> from rlwatch.forecast import Forecast
    >>> forecast_line([Forecast(40, p50=0.02), Forecast(41, p50=0.83, alarm=True), Forecast(42, p50=0.5)], now=True)
    'forecast: now 50% within 50 steps; highest 83% at step 41; alarm from step 41'
    """
    alarms = [forecast.step for forecast in forecasts if forecast.alarm]
    known = [forecast for forecast in forecasts if forecast.p50 is not None]
    if not known:
        return _by_limits(forecasts, alarms)
    highest = max(known, key=lambda forecast: forecast.p50 or 0.0)
    parts = [f"now {chance(known[-1].p50)} within 50 steps"] if now else []
    parts.append(f"highest {chance(highest.p50)}{'' if now else ' within 50 steps'} at step {step(highest.step)}")
    parts.append(f"alarm from step {step(alarms[0])}" if alarms else "no alarm")
    return f"forecast: {'; '.join(parts)}"


def _by_limits(forecasts: Sequence[Forecast], alarms: Sequence[int]) -> str:
    """Return, for a run without a probability, the reason and the limit that it approaches."""
    from rlwatch.forecast.forecast import forecast_sentence
    from rlwatch.forecast.gate import NO_SIGNAL

    if forecasts and forecasts[-1].limits_only.startswith(NO_SIGNAL):
        return forecast_sentence(forecasts[-1])
    reasons = [forecast.limits_only for forecast in forecasts if forecast.limits_only]
    if not reasons:
        return ""
    near = f"a limit is near from step {step(alarms[0])}" if alarms else "no limit came near"
    return f"forecast: {near}; {reasons[-1]}"


def print_forecast(records: Sequence[ForecastRecord], *, now: bool = False) -> None:
    """Print the line of :func:`forecast_line` for a run, or with ``now`` the reason that it has no forecast."""
    from rlwatch.forecast.forecast import forecast_of

    forecasts = [forecast_of(record) for record in records]
    line = forecast_line(forecasts, now=now)
    if line:
        print_text(line, style="yellow" if forecasts[-1].alarm or "alarm from" in line else "")
    elif forecasts and now:
        print_text(forecasts[-1].absent, style="dim")


# A diagnosis as text: cause, confidence, evidence in order of time, and actions.

FEW = 3
"""Most recommended actions that are printed, unless all are requested."""
WORSE = (Severity.WARNING, Severity.CRITICAL)
STYLES = {Confidence.STRONG: "bold red", Confidence.PLAUSIBLE: "yellow", Confidence.WEAK: "dim"}


def print_diagnosis(diagnosis: Diagnosis, *, everything: bool = False) -> None:
    """Print the likeliest cause of a failure with its evidence and first actions, then one line for each other cause.

    ``everything``: print all actions. If no evidence is a warning or worse, only the cause of a small gap between
    trainer and rollout engine is printed, if there is one.
    """
    if diagnosis.gap is not None:
        print_text(f"Note: {diagnosis.gap.text}", style="dim")
    if not any(evidence.severity in WORSE for cause in diagnosis.causes for evidence in cause.evidence):
        return
    first, *others = diagnosis.causes
    print_text("Diagnosis", style="bold")
    if diagnosis.enough:
        print_text(
            f"  {'most likely: ' * (first.nature is Nature.CAUSE)}{first.title} ({first.sure.words}: {first.why})",
            style=STYLES[first.sure],
        )
    else:
        print_text(f"  {diagnosis.why_not}", style=STYLES[Confidence.WEAK])
    print_text(f"  it began at step {step(first.onset_step)}; in order of time:")
    _print_evidence(first)
    if diagnosis.enough or everything:
        _print_actions(first, everything=everything)
    for other in others:
        print_text(f"  or: {other.title} ({other.sure.words}): {other.summary}", style="dim")


def _print_evidence(cause: Cause) -> None:
    for evidence in cause.evidence:
        seen = f" (seen at {step(evidence.seen_step)})" if evidence.seen_step is not None else ""
        message = evidence.message or evidence.text
        print_text(f"    step {step(evidence.step):>7}{seen:<18}  {evidence.kind}: {one_line(message, LONGEST)}")


def _print_actions(cause: Cause, *, everything: bool) -> None:
    if cause.actions:
        print_text("What to do, in order", style="bold")
    for place, action in enumerate(cause.actions if everything else cause.actions[:FEW], 1):
        _print_action(place, action)
    left = len(cause.actions) - FEW
    if left > 0 and not everything:
        print_text(f"  and {left} more: rlwatch report RUN, or --format json", style="dim")
    if cause.withheld:
        print_text(f"  {cause.withheld}", style="yellow")


def _print_action(place: int, action: Action) -> None:
    print_text(f"  {place}. {action.name} ({action.strength.value})")
    print_text(f"     {action.what}")
    for trainer, text in action.options.items():
        print_text(f"     {trainer}: {text}", style="cyan")
    print_text(f"     evidence: {action.evidence} [{action.source}]", style="dim")


# Findings and alerts as lines of a stream.


def finding_line(finding: Finding) -> str:
    """Return step, severity (or stage of recovery), kind, onset and message of a finding as one line."""
    since = f" since {step(finding.onset_step)}" if finding.onset_step < finding.step else ""
    what = finding.stage if finding.stage.better else finding.severity
    return f"step {step(finding.step)}  {what}  {finding.kind}{since}: {one_line(finding.message, 160)}"


def alert_line(alert: Alert) -> str:
    """Return step, state, severity, kind and rule of an alert as one line; for a resolved alert also how it ended."""
    at = alert.resolved_step if alert.resolved_step is not None else alert.step
    why = f": {one_line(alert.reason, 160)}" if alert.state is AlertState.RESOLVED and alert.reason else ""
    return f"step {step(at)}  ALERT {alert.state}  {alert.severity}  {alert.kind} (rule {alert.rule}){why}"


def print_finding_line(finding: Finding, prefix: str = "") -> None:
    """Print a finding as one line behind ``prefix``, in the colour of its severity; a recovery in green."""
    print_text(
        prefix + finding_line(finding), style="green" if finding.stage.better else SEVERITY_STYLES[finding.severity]
    )


def print_alert_line(alert: Alert, prefix: str = "") -> None:
    """Print an alert as one line behind ``prefix``, in the colour of its severity; a resolved one in green."""
    over = alert.state is AlertState.RESOLVED
    print_text(prefix + alert_line(alert), style="green" if over else SEVERITY_STYLES[alert.severity])


def print_outcome(outcome: MonitorOutcome, prefix: str = "") -> None:
    """Print the findings, recoveries and sent alerts from judging a batch of records, each line behind ``prefix``."""
    for finding in (*outcome.findings, *outcome.recoveries):
        print_finding_line(finding, prefix)
    for transition in outcome.transitions:
        if transition.notify:
            print_alert_line(transition.alert, prefix)
