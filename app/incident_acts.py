"""User actions on incidents and forecasts: each checks the permission, writes, and adds an entry to the audit log.

Drawing a page changes nothing; every change to alerts goes through this module. Each function raises
``NotPermittedError`` unless its user ``by`` is an operator, ``ConfigError`` for invalid arguments, and ``StoreError``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from rlwatch.alerts import silencing
from rlwatch.alerts.config import Config, build_notifiers
from rlwatch.alerts.outbox import Trial, try_channels
from rlwatch.alerts.tuning import Tuning, write_tuning
from rlwatch.clock import Clock
from rlwatch.errors import ConfigError
from rlwatch.forecast.record import Past, answer
from rlwatch.ports import AlertStore, Store
from rlwatch.records import Acknowledgement, Alert, AuditEntry, ForecastAnswer, Silence
from rlwatch.step_notes import StepNote, add_step_note, remove_step_note

from .principal import Principal

LENGTHS = {"30 minutes": "30m", "2 hours": "2h", "8 hours": "8h", "a day": "1d", "a week": "1w"}
"""Durations offered for a snooze or a silence."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Choice of alerts that a silence matches (by run, project and kind), offered to the user under ``label``."""

    label: str
    run: str = ""
    project: str = ""
    kind: str = ""


def scopes(alert: Alert, run_name: str, project: str, words: str) -> list[Scope]:
    """Return the choices of alerts to silence for a given alert, the narrowest first.

    ``run_name``, ``project``: name and project of its run. ``words``: kind of the alert in plain English.
    """
    found = [
        Scope(f"{words} on this run", run=alert.run_id, kind=alert.kind),
        Scope(f"everything on this run ({run_name})", run=alert.run_id),
        Scope(f"{words} in project {project}", project=project, kind=alert.kind),
        Scope(f"{words} in this store", kind=alert.kind),
    ]
    return [scope for scope in found if project or not scope.label.endswith(f"project {project}")]


def acknowledge_alert(
    store: AlertStore, alert_id: str, *, by: Principal, why: str, clock: Clock | None = None
) -> Acknowledgement:
    """Acknowledge a firing alert and return the stored acknowledgement.

    ``why``: the user's reason. Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and
    ``StoreError``.
    """
    by.require_command()
    return silencing.acknowledge(
        store, silencing.find_alert(store.alerts(), alert_id), by=by.name, why=why, clock=clock
    )


def acknowledge_all(store: AlertStore, alerts: Sequence[Alert], *, by: Principal, why: str) -> Acknowledgement:
    """Acknowledge all of ``alerts`` that still fire; return the first acknowledgement.

    ``why``: the user's reason. Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and
    ``StoreError``.
    """
    by.require_command()
    known = {alert.alert_id: alert for alert in store.alerts()}
    now = [known.get(alert.alert_id, alert) for alert in alerts]
    firing = [alert for alert in now if alert.state == "firing"] or now[:1]
    if not firing:
        raise ConfigError("nothing to acknowledge: the incident has no alert left")
    kept = [silencing.acknowledge(store, alert, by=by.name, why=why) for alert in firing]
    return kept[0]


def snooze(store: AlertStore, alerts: Sequence[Alert], *, by: Principal, length: str, why: str) -> Silence:
    """Pause notifications of the firing ones of ``alerts`` for one of :data:`LENGTHS`; return the stored silence.

    ``why``: the user's reason. Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and
    ``StoreError``.
    """
    by.require_command()
    return silencing.snooze(store, alerts, by=by.name, for_s=silencing.seconds_of(LENGTHS[length]), why=why)


def silence(store: AlertStore, scope: Scope, *, by: Principal, length: str, why: str) -> Silence:
    """Silence alerts that match ``scope`` for one of :data:`LENGTHS`; return the stored silence.

    ``why``: the user's reason. Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and
    ``StoreError``.
    """
    by.require_command()
    for_s = silencing.seconds_of(LENGTHS[length])
    return silencing.silence(
        store, by=by.name, why=why, for_s=for_s, run=scope.run, project=scope.project, kind=scope.kind
    )


def unsilence(store: AlertStore, silence_id: str, *, by: Principal) -> Silence:
    """End a silence or a snooze now, and return it as stored.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    return silencing.end_silence(store, silence_id, by=by.name)


def note(store: AlertStore, alert: Alert, *, by: Principal, text: str) -> AuditEntry:
    """Add a note to an alert, and return the entry of the audit log.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    return silencing.note(store, alert, by=by.name, text=text)


def note_at_step(store: Store, run_id: str, step: int, *, by: Principal, text: str) -> StepNote:
    """Add a note at a step of a run, and return it as stored.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    return add_step_note(store, run_id, step, text, by=by.name)


def remove_note_at_step(store: Store, note: StepNote, *, by: Principal) -> None:
    """Remove a user's note at a step of a run.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    remove_step_note(store, note, by=by.name)


def answer_forecast(store: Store, past: Past, *, by: Principal, right: bool, why: str) -> ForecastAnswer:
    """Store the user's answer that a forecast was right or wrong, and return it.

    ``past``: the forecast. ``why``: the user's reason. Raises ``NotPermittedError`` unless ``by`` is an operator,
    ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    return answer(store, past, right=right, by=by.name, why=why, now=time.time())


def keep_rules(store: AlertStore, before: Tuning, after: Tuning, *, by: Principal) -> None:
    """Write the changed alert rules ``after`` to the store's file, which must still be as in ``before``.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` and ``StoreError``.
    """
    by.require_command()
    write_tuning(before, after)
    names = sorted({*before.tables, *after.tables})
    changed = [name for name in names if before.tables.get(name) != after.tables.get(name)]
    text = f"{', '.join(changed) or 'nothing'} in {after.path.name} of the store"
    store.put_entry(AuditEntry(uuid.uuid4().hex, time.time(), by.name, "rules", text))


def try_channel(config: Config, name: str, *, by: Principal) -> Trial:
    """Send one test message to the channel ``name`` on the path of alerts, and return the result.

    Raises ``NotPermittedError`` unless ``by`` is an operator, and ``ConfigError`` if no channel has that name.
    """
    by.require_command()
    notifier = build_notifiers(config, console=False).get(name)
    if notifier is None:
        raise ConfigError(f"no channel is called {name!r}; configured channels: {', '.join(config.channel_names)}")
    return try_channels({name: notifier}, dashboard_url=config.dashboard_url)[0]
