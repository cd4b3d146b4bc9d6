"""The demo's run as its store records it: the data, a simulated user, and the demo's promises with their evidence.

Exit code 0 means that all promises were kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlwatch.control.commands import request
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.demo import SMOLLM2, Recipe
from rlwatch.diagnosis import Diagnosis
from rlwatch.errors import RunNotFoundError, StoreBusyError
from rlwatch.forecast.forecast import forecast_of
from rlwatch.ports import CommandStore, Series, Store
from rlwatch.records import (
    CRASH_FORECAST,
    JSON,
    Alert,
    AlertState,
    Command,
    CommandStatus,
    Event,
    Finding,
    ForecastRecord,
    OutboxMessage,
    OutboxStatus,
    RunInfo,
    RunState,
    Severity,
)

REWARD, ENTROPY, KL, SILENT = "reward", "entropy", "kl", "frac_reward_zero_std"
"""TRL's names of the metrics that the demo uses."""
CURVES = (REWARD, ENTROPY, KL, SILENT)


@dataclass(frozen=True, slots=True)
class DemoFacts:
    """Everything that the store holds about the demo's run at one moment.

    ``curves``: TRL's name of a metric -> its series. The other fields are the run's records in the order of the store.
    """

    run: RunInfo
    curves: Mapping[str, Series]
    findings: tuple[Finding, ...] = ()
    alerts: tuple[Alert, ...] = ()
    commands: tuple[Command, ...] = ()
    events: tuple[Event, ...] = ()
    outbox: tuple[OutboxMessage, ...] = ()
    forecasts: tuple[ForecastRecord, ...] = ()

    def values(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return the values (N,) of a metric at the steps ``first`` to ``last``, inclusive; ``last``
        None: to the end.
        """
        curve = self.curves[name]
        inside = (curve.steps >= first) & (curve.steps <= (np.inf if last is None else last))
        return curve.values[inside]

    def level(self, name: str, first: int = 0, last: int | None = None) -> float:
        """Return the median of a metric over the steps ``first`` to ``last``, inclusive; NaN if nothing was measured
        there.
        """
        values = self.values(name, first, last)
        return float(np.median(values)) if len(values) else float("nan")

    @property
    def step(self) -> int:
        """Last recorded step of the run; 0 before the first."""
        steps = self.curves[REWARD].steps
        return int(steps[-1]) if len(steps) else 0

    def firing(self, severity: Severity) -> list[Alert]:
        """Return the alerts of this severity that fire now, oldest first."""
        return [a for a in reversed(self.alerts) if a.state is AlertState.FIRING and a.severity is severity]


def look(store: Store, run_id: str) -> DemoFacts | None:
    """Read the present data of the demo's run; None while it has not begun, or while its files are
    locked for a moment.
    """
    try:
        return DemoFacts(
            run=store.run(run_id),
            curves=store.series(run_id, CURVES),
            findings=tuple(store.findings(run_id)),
            alerts=tuple(store.alerts(run_id)),
            commands=tuple(store.commands(run_id)),
            events=tuple(store.events(run_id)),
            outbox=tuple(store.outbox(run_id)),
            forecasts=tuple(store.forecasts(run_id)),
        )
    except (RunNotFoundError, StoreBusyError):
        return None


# The person at the dashboard: reads the store, thinks, and writes commands into it. Nothing else.
#
# Asks for a reset of the reference once KL has saturated, and asks again, rashly, when the run collapses.

NAME = "demo person"
RESET = "reset-reference"
PATIENCE = 130
"""Number of steps after which the simulated user looks at the KL curve without waiting for a finding."""
WINDOW = 25
FLAT = 0.15
"""Relative change between two windows that looks flat on a chart."""
RISEN = 1.5
"""Multiple of its first level from which on a curve counts as risen."""
FIRST = 5
ENOUGH = 2
"""Number of kinds of collapse with a critical alert at the same time after which the user does something rash."""


class Person:
    """Simulated user of the demo, who reads the store and sends commands; call :meth:`act` with each new state.

    The user asks for a reset of the reference once KL has saturated, and again, rashly, when the run collapses.
    """

    def __init__(self, store: CommandStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    def act(self, facts: DemoFacts) -> Command | None:
        """Send a command if the present data give a reason for one, and return it; else None."""
        if any(command.status.open for command in facts.commands):
            return None
        why = reason_to_reset(facts) if not facts.commands else reason_to_panic(facts)
        if why is None:
            return None
        key = f"demo-{len(facts.commands)}"
        try:
            return request(self._store, self._run_id, RESET, why=why, by=NAME, idempotency_key=key)
        except StoreBusyError:
            return None  # the reason remains at the next attempt


def reason_to_reset(facts: DemoFacts) -> str | None:
    """Return the simulated user's reason to reset the reference, from a finding or the KL curve; None
    if there is none.
    """
    for finding in facts.findings:
        if finding.kind == "kl_saturation":
            return finding.message
    if facts.step < PATIENCE:
        return None
    now, before = facts.level(KL, facts.step - WINDOW + 1), saturated_from(facts, facts.step)
    return None if before is None else f"the KL chart is flat: {before:.3f}, then {now:.3f} nats/token"


def saturated_from(facts: DemoFacts, step: int) -> float | None:
    """Return the KL (nats per token) of the window before the last one, if KL had risen and then remained level; else
    None.

    The last window of :data:`WINDOW` steps ends at ``step``.
    """
    now = facts.level(KL, step - WINDOW + 1, step)
    before = facts.level(KL, step - 2 * WINDOW + 1, step - WINDOW)
    start = facts.level(KL, 2, 1 + FIRST)
    flat = abs(now - before) < FLAT * now and before > RISEN * start
    return before if flat else None


def reason_to_panic(facts: DemoFacts) -> str | None:
    """Return the simulated user's reason for a second, rash command: critical alerts of several kinds of collapse;
    else None.
    """
    if len(facts.commands) > 1:
        return None
    alarms = {alert.kind: alert for alert in facts.firing(Severity.CRITICAL) if alert.kind in COLLAPSE_KINDS}
    if len(alarms) < ENOUGH:
        return None
    return f"perhaps it helps against {' and '.join(sorted(alarms))}"


# Promises of the demo, each with the evidence for or against it.

LEARNED = 0.1
"""Gain of reward, on a scale that ends at 1, that counts as learning."""
NAMED_WITHIN = 5
"""Largest difference in steps between the beginning of the range test and the step at which the diagnosis dates it."""
ZERO = 0.05
"""Share of the KL before the reset below which KL counts as back at zero."""
ENDS = 20
"""Number of rows over which the beginning and the end are measured."""
DEAD_ENTROPY, DEAD_REWARD, DEAD_SILENT = 0.1, 0.35, 0.8
"""Entropy against its start, reward against its best, and share of silent samples, of a dead run."""


class Delivered(Protocol):
    """Interface of one request that a webhook receiver got."""

    @property
    def payload(self) -> object:
        """Parsed body of the webhook request."""
        ...

    @property
    def verified(self) -> bool | None:
        """True if the signature of the request was right."""
        ...


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """One promise of the demo, whether it was kept, and the numbers that prove it."""

    promise: str
    kept: bool
    evidence: str


def examine(
    facts: DemoFacts, diagnosis: Diagnosis, deliveries: Sequence[Delivered], exit_code: int | None, recipe: Recipe
) -> list[DemoCheck]:
    """Check all promises of the demo, in the order in which they should have been kept.

    Parameters
    ----------
    facts
        The run's data at its end.
    diagnosis
        Likely causes of the failure.
    deliveries
        Requests that the webhook receiver got.
    exit_code
        Exit code of the trainer.
    recipe
        Hyperparameters of the run.
    """
    if recipe.model == SMOLLM2:
        return [
            _learned(facts, recipe),
            _unlearned(facts),
            _alarmed(facts, recipe),
            _delivered(facts, deliveries),
            _finished(facts, exit_code, recipe),
        ]
    first, second = (*facts.commands, None, None)[:2]
    reset = first.finished_step if first is not None and first.status is CommandStatus.DONE else None
    return [
        _learned(facts, recipe),
        _saturated(facts, reset),
        _no_early_alarm(facts, recipe),
        _reset(facts, first, reset, recipe),
        _back_at_zero(facts, reset),
        _collapsed(facts),
        _named(diagnosis, recipe),
        _forecast(facts, recipe),
        _warned_first(facts, recipe),
        _delivered(facts, deliveries),
        _refused(second),
        _finished(facts, exit_code, recipe),
    ]


def _learned(facts: DemoFacts, recipe: Recipe) -> DemoCheck:
    first = facts.level(REWARD, 0, ENDS // 2)
    best = facts.level(REWARD, recipe.range_test_step - ENDS, recipe.range_test_step)
    return DemoCheck("the policy learned", best - first > LEARNED, f"reward {first:.2f} -> {best:.2f}")


def _unlearned(facts: DemoFacts) -> DemoCheck:
    rewards = facts.values(REWARD)
    best, end = (float(max(rewards)) if len(rewards) else math.nan), facts.level(REWARD, facts.step - ENDS // 2)
    return DemoCheck("its own learning rate broke it", end < DEAD_REWARD * best, f"reward {best:.2f} -> {end:.2f}")


def _alarmed(facts: DemoFacts, recipe: Recipe) -> DemoCheck:
    after = [f for f in facts.findings if f.severity is Severity.CRITICAL and f.step >= recipe.range_test_step]
    proof = ", ".join(f"{f.kind} at step {f.step}" for f in after) or f"none from step {recipe.range_test_step} on"
    return DemoCheck("the failure was found while the run was alive", bool(after), proof)


def _saturated(facts: DemoFacts, reset: int | None) -> DemoCheck:
    promise = "KL to the reference rose and saturated"
    early = [f for f in facts.findings if f.kind == "kl_saturation" and (reset is None or f.step <= reset)]
    if early:
        return DemoCheck(promise, True, f"found at step {early[0].step}: {early[0].message}")
    level = None if reset is None else saturated_from(facts, reset)
    if level is None:
        return DemoCheck(promise, False, "no finding, and the curve was not flat")
    return DemoCheck(promise, True, f"no finding, but a person saw it level at {level:.2f} nats/token")


def _no_early_alarm(facts: DemoFacts, recipe: Recipe) -> DemoCheck:
    early = [f for f in facts.findings if f.severity is Severity.CRITICAL and f.step < recipe.range_test_step]
    proof = ", ".join(f"{f.kind} at step {f.step}" for f in early) or f"none before step {recipe.range_test_step}"
    return DemoCheck("no critical finding while it was healthy", not early, proof)


def _reset(facts: DemoFacts, command: Command | None, reset: int | None, recipe: Recipe) -> DemoCheck:
    promise = "the live trainer reset its reference when asked"
    if command is None:
        return DemoCheck(promise, False, "no request was made")
    if reset is None:
        return DemoCheck(promise, False, f"{command.status.value}: {command.result or 'no answer'}")
    recorded = any(event.kind == "reference_reset" and event.step == reset for event in facts.events)
    in_time = reset < recipe.range_test_step
    return DemoCheck(promise, recorded and in_time, f"step {reset}: {command.result}")


def _back_at_zero(facts: DemoFacts, reset: int | None) -> DemoCheck:
    promise = "KL went back to zero"
    before, after = _around(facts, reset)
    if before is None or after is None:
        return DemoCheck(promise, False, "no row before and after a reset")
    return DemoCheck(promise, 0.0 <= abs(after) <= ZERO * before, f"{before:.4f} -> {after:.6f} nats/token")


def _around(facts: DemoFacts, reset: int | None) -> tuple[float | None, float | None]:
    """Return the KL in the last row made with the old reference and in the first made with the new one."""
    if reset is None:
        return None, None
    before, after = facts.values(KL, 0, reset), facts.values(KL, reset + 1)
    return (float(before[-1]) if len(before) else None), (float(after[0]) if len(after) else None)


def _collapsed(facts: DemoFacts) -> DemoCheck:
    last = facts.step - ENDS + 1
    start, end = facts.level(ENTROPY, 0, ENDS), facts.level(ENTROPY, last)
    rewards = facts.values(REWARD)
    best = float(max(rewards)) if len(rewards) else math.nan
    reward, silent = facts.level(REWARD, last), facts.level(SILENT, last)
    dead = end < DEAD_ENTROPY * start and reward < DEAD_REWARD * best and silent > DEAD_SILENT
    proof = f"entropy {start:.2f} -> {end:.4f}, reward {best:.2f} -> {reward:.2f}, {silent:.0%} of the samples silent"
    return DemoCheck("its own learning rate collapsed it", dead, proof)


def _named(diagnosis: Diagnosis, recipe: Recipe) -> DemoCheck:
    """Check that the learning rate is the likeliest cause, with an onset near the beginning of the range test."""
    first = diagnosis.causes[0] if diagnosis.causes else None
    near = first is not None and abs(first.onset_step - recipe.range_test_step) <= NAMED_WITHIN
    named = first is not None and first.kind == "learning_rate" and near
    return DemoCheck("its learning rate was named as the cause", named, diagnosis.summary)


def _forecast(facts: DemoFacts, recipe: Recipe) -> DemoCheck:
    """Check that the collapse was forecast after the learning rate began to grow, and before a critical finding."""
    promise = "the collapse was forecast"
    shown = [forecast_of(record) for record in facts.forecasts]
    if shown and all(one.p50 is None for one in shown):  # a kind of log for which no chance is shown, with the reason
        return DemoCheck("no chance was shown of a kind of log that never warned", True, shown[-1].reason)
    late = [f for f in facts.findings if f.step >= recipe.range_test_step]
    forecast = next((f for f in late if f.kind == CRASH_FORECAST), None)
    sure = next((f for f in late if f.kind in COLLAPSE_KINDS and f.severity is Severity.CRITICAL), None)
    if forecast is None or sure is None:
        return DemoCheck(promise, False, "no forecast" if forecast is None else "no collapse to forecast")
    proof = f"at step {forecast.step}, {sure.step - forecast.step} steps before {sure.kind}: {forecast.message}"
    return DemoCheck(promise, forecast.step < sure.step, proof)


def _warned_first(facts: DemoFacts, recipe: Recipe) -> DemoCheck:
    promise = "a collapse was warned of, then alarmed"
    late = [f for f in facts.findings if f.kind in COLLAPSE_KINDS and f.step >= recipe.range_test_step]
    published = {alert.kind for alert in facts.alerts if alert.fired_at and alert.severity is Severity.CRITICAL}
    pairs: dict[str, str] = {}
    for alarm in (f for f in late if f.severity is Severity.CRITICAL and f.kind in published):
        warning = next((f for f in late if _warns_of(f, alarm)), None)
        if warning is not None:
            proof = f"{alarm.kind}: warning at step {warning.step}, critical at step {alarm.step}"
            pairs.setdefault(alarm.kind, proof)
    proof = "; ".join(pairs.values()) or f"{len(late)} findings, no warning before an alarm"
    return DemoCheck(promise, bool(pairs), proof)


def _warns_of(finding: Finding, alarm: Finding) -> bool:
    return finding.kind == alarm.kind and finding.severity is Severity.WARNING and finding.step < alarm.step


def _delivered(facts: DemoFacts, deliveries: Sequence[Delivered]) -> DemoCheck:
    signed = [d for d in deliveries if d.verified and _severity(d.payload) == Severity.CRITICAL.value]
    pending = sum(message.status is not OutboxStatus.SENT for message in facts.outbox if message.channel == "webhook")
    proof = f"{len(signed)} critical of {len(deliveries)} received, all signed" if signed else "none received"
    forged = any(not d.verified for d in deliveries)
    return DemoCheck(
        "a signed webhook carried the alarm",
        bool(signed) and not forged and not pending,
        f"{proof}, {pending} unsent",
    )


def _severity(payload: JSON) -> str:
    alert = payload.get("alert", {}) if isinstance(payload, dict) else {}
    return str(alert.get("severity", ""))


def _refused(command: Command | None) -> DemoCheck:
    promise = "a reset in the middle of the collapse was refused"
    if command is None:
        return DemoCheck(promise, False, "no request was made")
    named = any(kind in command.result for kind in COLLAPSE_KINDS)
    return DemoCheck(
        promise, command.status is CommandStatus.REJECTED and named, command.result or command.status.value
    )


def _finished(facts: DemoFacts, exit_code: int | None, recipe: Recipe) -> DemoCheck:
    whole = facts.run.state is RunState.FINISHED and facts.step == recipe.steps and exit_code == 0
    proof = f"{facts.run.state.value} at step {facts.step} of {recipe.steps}, trainer's exit code {exit_code}"
    return DemoCheck("the run was recorded to its end", whole, proof)
