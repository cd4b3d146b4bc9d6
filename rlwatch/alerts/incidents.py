"""Incidents: related alerts of a run as one item with a state, named after its leading alert.

Two alerts are related if they began within :data:`NEAR` steps of each other, or if the run's diagnosis names one as the
cause of the other while that one still fired. An action on an incident applies to its alerts: firing ones are
acknowledged, snoozed and silenced. A silent or crashed run is no incident of its own: its alert belongs to the incident
before it; without one, all heartbeat alerts of the run form one incident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rlwatch.alerts.matching import alert_ids, silence_matches
from rlwatch.alerts.rules import HEARTBEAT_KINDS, AlertingConfig
from rlwatch.alerts.silencing import quiet_reasons
from rlwatch.diagnosis import Cause, Confidence, Diagnosis
from rlwatch.errors import StoreError
from rlwatch.ports import Store
from rlwatch.records import (
    CRASH_FORECAST,
    Acknowledgement,
    Alert,
    AlertState,
    AuditEntry,
    OutboxMessage,
    RunInfo,
    RunState,
    Severity,
    Silence,
)
from rlwatch.view import stored_diagnosis

NEAR = 50
"""Number of steps within which alerts that begin are one incident: the horizon of a forecast."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Related alerts of one run: ``lead`` is the alert that names the incident, ``symptoms`` are the others, by onset.

    ``cause``: the likeliest cause, if the run's diagnosis names one that is at least plausible.
    """

    lead: Alert
    symptoms: tuple[Alert, ...] = ()
    cause: Cause | None = None

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All alerts of the incident, the leading one first."""
        return (self.lead, *self.symptoms)

    @property
    def run_id(self) -> str:
        """Id of the run whose alerts the incident groups."""
        return self.lead.run_id

    @property
    def firing(self) -> tuple[Alert, ...]:
        """Alerts of the incident that fire now."""
        return tuple(alert for alert in self.alerts if alert.state is AlertState.FIRING)

    @property
    def onset_step(self) -> int:
        """Step at which the first of the alerts began, in retrospect."""
        return min(alert.onset_step for alert in self.alerts)

    @property
    def fired_at(self) -> float | None:
        """Time at which the first of the alerts fired (Unix seconds); None if none has fired."""
        return min((alert.fired_at for alert in self.alerts if alert.fired_at is not None), default=None)

    @property
    def severity(self) -> Severity:
        """Worst severity of the firing alerts; once all are over, of all alerts."""
        return max((alert.severity for alert in self.firing or self.alerts), key=lambda severity: severity.rank)

    @property
    def heartbeat(self) -> bool:
        """Return whether the incident consists only of alerts that the run fell silent or ended with an error."""
        return all(alert.kind in HEARTBEAT_KINDS for alert in self.alerts)


def incidents_of(alerts: Iterable[Alert], diagnosis: Callable[[], Diagnosis | None] = lambda: None) -> list[Incident]:
    """Group the alerts of one run into incidents, ordered by onset.

    ``diagnosis`` returns the run's diagnosis; it is called only where several alerts may be related.
    """
    ordered = sorted(alerts, key=lambda alert: (alert.onset_step, alert.alert_id))
    beats = [alert for alert in ordered if alert.kind in HEARTBEAT_KINDS]
    found = [alert for alert in ordered if alert.kind not in HEARTBEAT_KINDS]
    known = diagnosis() if len(found) > 1 else None
    causes = [] if known is None else [cause for cause in known.causes if cause.sure is not Confidence.WEAK]
    groups: list[list[Alert]] = []
    for alert in found:
        mine = [group for group in groups if any(_belong(other, alert, causes) for other in group)]
        merged = [*(each for group in mine for each in group), alert]
        groups = [*(group for group in groups if group not in mine), merged]
    alone: list[Alert] = []
    for beat in beats:
        before = [group for group in groups if any(_leads_to(alert, beat) for alert in group)]
        (before[-1] if before else alone).append(beat)
    whole = [_incident(group, causes) for group in groups] + ([_incident(alone, [])] if alone else [])
    return sorted(whole, key=lambda incident: (incident.onset_step, incident.lead.alert_id))


def _belong(one: Alert, other: Alert, causes: Sequence[Cause]) -> bool:
    """Return whether two alerts are related, of which ``one`` began first."""
    if other.onset_step - one.onset_step <= NEAR:
        return True
    over = one.resolved_step is not None and one.resolved_step < other.onset_step
    return not over and any({one.kind, other.kind} <= {cause.kind, *cause.symptoms} for cause in causes)


def _leads_to(alert: Alert, beat: Alert) -> bool:
    """Return whether the run fell silent or crashed while the alert fired, or soon after."""
    end = alert.resolved_step
    return alert.onset_step <= beat.onset_step and (end is None or beat.onset_step - end <= NEAR)


def _incident(group: Sequence[Alert], causes: Sequence[Cause]) -> Incident:
    def foremost(alert: Alert) -> tuple[bool, bool, int, int]:
        beat = alert.kind in HEARTBEAT_KINDS
        return (beat, alert.kind == CRASH_FORECAST, -alert.severity.rank, alert.onset_step)

    cause = next((cause for cause in causes if {a.kind for a in group} & {cause.kind, *cause.symptoms}), None)
    lead = min(group, key=foremost)
    if cause is not None:
        lead = next((alert for alert in group if alert.kind == cause.kind), lead)
    if all(alert.kind in HEARTBEAT_KINDS for alert in group):
        lead = group[-1]  # its present state
    return Incident(lead, tuple(alert for alert in group if alert is not lead), cause)


class IncidentState(StrEnum):
    """States of an incident, as shown to users."""

    FIRING = "firing"
    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    SNOOZED = "snoozed"
    SILENCED = "silenced"
    INHIBITED = "inhibited"
    UNRESOLVED = "unresolved"
    """The run ended before the incident was over."""
    RESOLVED = "resolved"


QUIET = (IncidentState.ACKNOWLEDGED, IncidentState.SNOOZED, IncidentState.SILENCED, IncidentState.INHIBITED)


def standing_of(incident: Incident, quiet: Mapping[str, str], *, goes_on: bool = True) -> IncidentState:
    """Return the state of an incident.

    ``quiet``: alert id -> reason why a firing alert is quiet. ``goes_on``: whether the run goes on. An incident is
    quiet once all of its firing alerts are; its state is then the action that made them quiet.
    """
    firing = incident.firing
    if firing and not goes_on:
        return IncidentState.UNRESOLVED
    if not firing:
        waits = goes_on and any(alert.state is AlertState.PENDING for alert in incident.alerts)
        return IncidentState.PENDING if waits else IncidentState.RESOLVED
    if any(alert.alert_id not in quiet for alert in firing):
        return IncidentState.FIRING
    words = {quiet[alert.alert_id].partition(" ")[0] for alert in firing}
    return next((standing for standing in QUIET if standing.value in words), IncidentState.INHIBITED)


@dataclass(frozen=True, slots=True)
class IncidentRecord:
    """An incident with the messages, silences and audit entries about it.

    Parameters
    ----------
    incident, run
        The incident and its run; None where the run cannot be read.
    standing
        State of the incident.
    quiet
        Alert id -> reason why a firing alert is quiet.
    acknowledgements
        Acknowledgements of its alerts.
    messages, audit
        Messages and users' actions, oldest first.
    silences
        Active silences that match any of its alerts.
    """

    incident: Incident
    run: RunInfo | None = None
    standing: IncidentState = IncidentState.FIRING
    quiet: Mapping[str, str] = field(default_factory=dict)
    acknowledgements: tuple[Acknowledgement, ...] = ()
    messages: tuple[OutboxMessage, ...] = ()
    silences: tuple[Silence, ...] = ()
    audit: tuple[AuditEntry, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Return whether the run goes on, so that the incident may still change."""
        return self.run is None or self.run.state is RunState.RUNNING

    @property
    def open(self) -> bool:
        """Return whether the incident fires in a run that goes on, quiet or not."""
        return self.goes_on and bool(self.incident.firing)

    @property
    def notes(self) -> tuple[AuditEntry, ...]:
        """Notes that users left at the alerts of the incident."""
        return tuple(entry for entry in self.audit if entry.act == "note")


def incident_records(
    store: Store,
    policy: AlertingConfig,
    now: float,
    *,
    run_id: str | None = None,
    diagnose: Callable[[RunInfo], Diagnosis] | None = None,
) -> list[IncidentRecord]:
    """Return every incident of the store, or of one run, with its messages and silences; the one that fired last first.

    ``now``: Unix seconds. ``diagnose``: returns the diagnosis of a run; None: diagnose from the store. May raise
    ``StoreError``.
    """
    runs = {run.run_id: run for run in store.runs()}
    alerts = store.alerts(run_id)
    reader = _IncidentReader(store, runs, run_id, diagnose)
    silences = [silence for silence in store.silences() if silence.created_at <= now < silence.until]
    quiet = quiet_reasons(alerts, policy, now, runs=runs, acknowledgements=reader.acknowledgements, silences=silences)
    by_run: dict[str, list[Alert]] = {}
    for alert in alerts:
        run = runs.get(alert.run_id)
        live = run is None or run.state is RunState.RUNNING
        if alert.fired_at is not None or (live and alert.state is not AlertState.RESOLVED):
            by_run.setdefault(alert.run_id, []).append(alert)
    found = [
        reader.record(incident, quiet, silences, policy)
        for each, own in by_run.items()
        for incident in incidents_of(own, lambda each=each: reader.diagnosis(each))  # type: ignore[misc]
    ]
    return sorted(found, key=lambda record: -(record.incident.fired_at or float("inf")))


class _IncidentReader:
    """All messages and audit entries about alerts, by alert."""

    def __init__(
        self,
        store: Store,
        runs: Mapping[str, RunInfo],
        run_id: str | None,
        diagnose: Callable[[RunInfo], Diagnosis] | None,
    ) -> None:
        self.acknowledgements = store.acknowledgements(run_id)
        self._runs = runs
        self._diagnose = diagnose or (lambda run: stored_diagnosis(store, run))
        self._messages: dict[str, list[OutboxMessage]] = {}
        for message in store.outbox(run_id):
            for alert_id in alert_ids(message):
                self._messages.setdefault(alert_id, []).append(message)
        self._audit: dict[str, list[AuditEntry]] = {}
        for entry in store.audit(run_id):
            self._audit.setdefault(entry.alert_id, []).append(entry)

    def diagnosis(self, run_id: str) -> Diagnosis | None:
        run = self._runs.get(run_id)
        try:
            return None if run is None else self._diagnose(run)
        except StoreError:
            return None  # they are grouped by their steps alone

    def record(
        self, incident: Incident, quiet: Mapping[str, str], silences: Sequence[Silence], policy: AlertingConfig
    ) -> IncidentRecord:
        run = self._runs.get(incident.run_id)
        ids = [alert.alert_id for alert in incident.alerts]
        messages = {m.message_id: m for alert_id in ids for m in self._messages.get(alert_id, ())}
        labels = {alert.rule: _labels(policy, alert.rule) for alert in incident.alerts}
        mine = [s for s in silences if any(silence_matches(s, a, run, labels[a.rule]) for a in incident.alerts)]
        entries = [entry for alert_id in ids for entry in self._audit.get(alert_id, ())]
        record = IncidentRecord(
            incident,
            run,
            quiet={alert_id: quiet[alert_id] for alert_id in ids if alert_id in quiet},
            acknowledgements=tuple(a for a in self.acknowledgements if a.alert_id in ids),
            messages=tuple(sorted(messages.values(), key=lambda message: message.created_at)),
            silences=tuple(mine),
            audit=tuple(sorted(entries, key=lambda entry: entry.at)),
        )
        return replace(record, standing=standing_of(incident, quiet, goes_on=record.goes_on))


def _labels(policy: AlertingConfig, name: str) -> Mapping[str, str]:
    rule = policy.rule(name)
    return rule.labels if rule else {}
