"""What the demo promised, each with the evidence for or against it. Exit code 0 means all of it happened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.demo.facts import ENTROPY, KL, REWARD, SILENT, Facts
from rlwatch.demo.person import saturated_from
from rlwatch.demo.recipe import Recipe
from rlwatch.records import CRASH_FORECAST, JSON, Command, CommandStatus, Finding, OutboxStatus, RunState, Severity

LEARNED = 0.1
"""Reward, on a scale that ends at 1, that counts as learning."""
ZERO = 0.05
"""Share of the KL before the reset below which it is back at zero."""
ENDS = 20
"""Rows over which the beginning and the end are read."""
DEAD_ENTROPY, DEAD_REWARD, DEAD_SILENT = 0.1, 0.35, 0.8
"""Entropy against its start, reward against its best, and share of silent samples, of a dead run."""


class Delivered(Protocol):
    """What a webhook receiver knows of one request."""

    @property
    def payload(self) -> object:
        """The parsed body."""
        ...

    @property
    def verified(self) -> bool | None:
        """Whether the signature was right."""
        ...


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, whether it was kept, and the numbers that say so."""

    promise: str
    kept: bool
    evidence: str


def examine(facts: Facts, deliveries: Sequence[Delivered], exit_code: int | None, recipe: Recipe) -> list[Check]:
    """All promises, in the order in which they should have come true."""
    first, second = (*facts.commands, None, None)[:2]
    reset = first.finished_step if first is not None and first.status is CommandStatus.DONE else None
    return [
        _learned(facts, recipe),
        _saturated(facts, reset),
        _no_early_alarm(facts, recipe),
        _reset(facts, first, reset, recipe),
        _back_at_zero(facts, reset),
        _collapsed(facts),
        _forecast(facts, recipe),
        _warned_first(facts, recipe),
        _delivered(facts, deliveries),
        _refused(second),
        _finished(facts, exit_code, recipe),
    ]


def _learned(facts: Facts, recipe: Recipe) -> Check:
    first = facts.level(REWARD, 0, ENDS // 2)
    best = facts.level(REWARD, recipe.range_test_step - ENDS, recipe.range_test_step)
    return Check("the policy learned", best - first > LEARNED, f"reward {first:.2f} -> {best:.2f}")


def _saturated(facts: Facts, reset: int | None) -> Check:
    promise = "KL to the reference rose and saturated"
    early = [f for f in facts.findings if f.kind == "kl_saturation" and (reset is None or f.step <= reset)]
    if early:
        return Check(promise, True, f"found at step {early[0].step}: {early[0].message}")
    level = None if reset is None else saturated_from(facts, reset)
    if level is None:
        return Check(promise, False, "no finding, and the curve was not flat")
    return Check(promise, True, f"no finding, but a person saw it level at {level:.2f} nats/token")


def _no_early_alarm(facts: Facts, recipe: Recipe) -> Check:
    early = [f for f in facts.findings if f.severity is Severity.CRITICAL and f.step < recipe.range_test_step]
    said = ", ".join(f"{f.kind} at step {f.step}" for f in early) or f"none before step {recipe.range_test_step}"
    return Check("no critical finding while it was healthy", not early, said)


def _reset(facts: Facts, command: Command | None, reset: int | None, recipe: Recipe) -> Check:
    promise = "the live trainer reset its reference when asked"
    if command is None:
        return Check(promise, False, "nobody asked")
    if reset is None:
        return Check(promise, False, f"{command.status.value}: {command.result or 'no answer'}")
    recorded = any(event.kind == "reference_reset" and event.step == reset for event in facts.events)
    in_time = reset < recipe.range_test_step
    return Check(promise, recorded and in_time, f"step {reset}: {command.result}")


def _back_at_zero(facts: Facts, reset: int | None) -> Check:
    promise = "KL went back to zero"
    before, after = _around(facts, reset)
    if before is None or after is None:
        return Check(promise, False, "no row before and after a reset")
    return Check(promise, 0.0 <= abs(after) <= ZERO * before, f"{before:.4f} -> {after:.6f} nats/token")


def _around(facts: Facts, reset: int | None) -> tuple[float | None, float | None]:
    """KL in the last row made with the old reference and in the first made with the new."""
    if reset is None:
        return None, None
    before, after = facts.values(KL, 0, reset), facts.values(KL, reset + 1)
    return (float(before[-1]) if len(before) else None), (float(after[0]) if len(after) else None)


def _collapsed(facts: Facts) -> Check:
    last = facts.step - ENDS + 1
    start, end = facts.level(ENTROPY, 0, ENDS), facts.level(ENTROPY, last)
    rewards = facts.values(REWARD)
    best = float(max(rewards)) if len(rewards) else math.nan
    reward, silent = facts.level(REWARD, last), facts.level(SILENT, last)
    dead = end < DEAD_ENTROPY * start and reward < DEAD_REWARD * best and silent > DEAD_SILENT
    said = f"entropy {start:.2f} -> {end:.4f}, reward {best:.2f} -> {reward:.2f}, {silent:.0%} of the samples silent"
    return Check("its own learning rate collapsed it", dead, said)


def _forecast(facts: Facts, recipe: Recipe) -> Check:
    """From the step on at which its learning rate began to grow, and before any detector was sure."""
    promise = "the collapse was forecast"
    late = [f for f in facts.findings if f.step >= recipe.range_test_step]
    told = next((f for f in late if f.kind == CRASH_FORECAST), None)
    sure = next((f for f in late if f.kind in COLLAPSE_KINDS and f.severity is Severity.CRITICAL), None)
    if told is None or sure is None:
        return Check(promise, False, "no forecast" if told is None else "no collapse to forecast")
    said = f"at step {told.step}, {sure.step - told.step} steps before {sure.kind}: {told.message}"
    return Check(promise, told.step < sure.step, said)


def _warned_first(facts: Facts, recipe: Recipe) -> Check:
    promise = "a collapse was warned of, then alarmed"
    late = [f for f in facts.findings if f.kind in COLLAPSE_KINDS and f.step >= recipe.range_test_step]
    told = {alert.kind for alert in facts.alerts if alert.fired_at and alert.severity is Severity.CRITICAL}
    pairs: dict[str, str] = {}
    for alarm in (f for f in late if f.severity is Severity.CRITICAL and f.kind in told):
        warning = next((f for f in late if _warns_of(f, alarm)), None)
        if warning is not None:
            said = f"{alarm.kind}: warning at step {warning.step}, critical at step {alarm.step}"
            pairs.setdefault(alarm.kind, said)
    said = "; ".join(pairs.values()) or f"{len(late)} findings, no warning before an alarm"
    return Check(promise, bool(pairs), said)


def _warns_of(finding: Finding, alarm: Finding) -> bool:
    return finding.kind == alarm.kind and finding.severity is Severity.WARNING and finding.step < alarm.step


def _delivered(facts: Facts, deliveries: Sequence[Delivered]) -> Check:
    signed = [d for d in deliveries if d.verified and _severity(d.payload) == Severity.CRITICAL.value]
    pending = sum(message.status is not OutboxStatus.SENT for message in facts.outbox if message.channel == "webhook")
    said = f"{len(signed)} critical of {len(deliveries)} received, all signed" if signed else "none received"
    forged = any(not d.verified for d in deliveries)
    return Check(
        "a signed webhook carried the alarm", bool(signed) and not forged and not pending, f"{said}, {pending} unsent"
    )


def _severity(payload: JSON) -> str:
    alert = payload.get("alert", {}) if isinstance(payload, dict) else {}
    return str(alert.get("severity", ""))


def _refused(command: Command | None) -> Check:
    promise = "a reset in the middle of the collapse was refused"
    if command is None:
        return Check(promise, False, "nobody asked")
    named = any(kind in command.result for kind in COLLAPSE_KINDS)
    return Check(promise, command.status is CommandStatus.REJECTED and named, command.result or command.status.value)


def _finished(facts: Facts, exit_code: int | None, recipe: Recipe) -> Check:
    whole = facts.run.state is RunState.FINISHED and facts.step == recipe.steps and exit_code == 0
    said = f"{facts.run.state.value} at step {facts.step} of {recipe.steps}, trainer's exit code {exit_code}"
    return Check("the run was recorded to its end", whole, said)
