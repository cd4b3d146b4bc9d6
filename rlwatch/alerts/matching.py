"""Find the alerts in a message, and the silence that covers them. Few imports, because every deliverer imports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlwatch.records import JSON, Alert, AlertState, OutboxMessage, RunInfo, Severity, Silence


def alert_ids(message: OutboxMessage) -> tuple[str, ...]:
    """Return the ids of the alerts in a message, the leading one first."""
    return tuple(dict.fromkeys([message.alert_id, *(str(alert.get("id", "")) for alert in alerts_in(message))]))


def alerts_in(message: OutboxMessage) -> list[Mapping[str, JSON]]:
    """Return the alerts in a message as its payload describes them, the leading one first."""
    payload = message.payload
    every = [payload.get("alert"), *(payload.get("also") or ())]
    return [alert for alert in every if isinstance(alert, Mapping)] or [{"id": message.alert_id}]


def quiet_words(silence: Silence) -> str:
    """Return who silenced or snoozed alerts, and why: ``silenced by ann: repair``, ``snoozed by ann: later``."""
    done = "snoozed" if silence.alerts else "silenced"
    return f"{done} by {silence.by}" + (f": {silence.why}" if silence.why else "")


def silence_matches(silence: Silence, alert: Alert, run: RunInfo | None, labels: Mapping[str, str]) -> bool:
    """Return whether a silence (period without notifications) covers an alert, whatever the time.

    ``run``: run of the alert; None: only its id is known. ``labels``: labels of the alert's rule.
    """
    names = {alert.run_id, run.name if run else alert.run_id}
    return (
        (not silence.run or silence.run in names)
        and (not silence.project or (run is not None and silence.project == run.project))
        and (not silence.kind or silence.kind == alert.kind)
        and (not silence.rule or silence.rule == alert.rule)
        and (not silence.alerts or alert.alert_id in silence.alerts)
        and (silence.up_to is None or alert.severity.rank <= silence.up_to.rank)
        and all(labels.get(key) == value for key, value in silence.labels.items())
    )


def silence_of(message: OutboxMessage, silences: Sequence[Silence], now: float) -> Silence | None:
    """Return the silence that covers every alert in a message at ``now`` (Unix seconds); None without one.

    Of several, it is the one that ends last.
    """
    lasting = [each for each in silences if each.created_at <= now < each.until]
    named = list(_named_alerts(message)) if lasting else []
    over = [[s for s in lasting if silence_matches(s, alert, run, labels)] for alert, run, labels in named]
    if not over or not all(over):
        return None
    return max((silence for fitting in over for silence in fitting), key=lambda silence: silence.until)


def _named_alerts(message: OutboxMessage) -> Iterator[tuple[Alert, RunInfo, Mapping[str, str]]]:
    """Yield the alerts of a message, each with its run and the labels of its rule."""
    run = message.payload.get("run") or {}
    for named in alerts_in(message):
        run_id = str(named.get("run_id") or message.run_id)
        name = str(run.get("name", "")) if run_id == run.get("id", run_id) else ""
        level, labels = named.get("severity"), named.get("labels")
        yield (
            Alert(
                str(named.get("id", "")),
                run_id,
                str(named.get("rule", "")),
                str(named.get("kind", "")),
                Severity(level) if level in set(Severity) else Severity.CRITICAL,
                AlertState.FIRING,
                onset_step=0,
                step=0,
                message="",
            ),
            RunInfo(run_id, project=str(run.get("project", "")), name=name),
            labels if isinstance(labels, Mapping) else {},
        )
