"""The person at the dashboard: reads the store, thinks, and writes commands into it. Nothing else.

Asks for a reset of the reference once KL has saturated, and asks again, rashly, when the run collapses.
"""

from __future__ import annotations

from rlwatch.control.commands import request
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.demo.facts import KL, Facts
from rlwatch.errors import StoreBusyError
from rlwatch.ports import CommandStore
from rlwatch.records import Command, Severity

NAME = "demo person"
RESET = "reset-reference"
PATIENCE = 130
"""Steps after which the person looks at the KL curve without waiting for a finding."""
WINDOW = 25
FLAT = 0.15
"""Relative change between two windows that looks flat on a chart."""
RISEN = 1.5
"""Times its first level that makes a curve one that has risen."""
FIRST = 5
ENOUGH = 2
"""Kinds of collapse alarmed at the same time before the person does something rash."""


class Person:
    """Acts on what one look at the store shows; call :meth:`act` at every look."""

    def __init__(self, store: CommandStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    def act(self, facts: Facts) -> Command | None:
        """Send a command if this is the moment; returns it."""
        if any(command.status.open for command in facts.commands):
            return None
        why = reason_to_reset(facts) if not facts.commands else reason_to_panic(facts)
        if why is None:
            return None
        key = f"demo-{len(facts.commands)}"
        try:
            return request(self._store, self._run_id, RESET, why=why, by=NAME, idempotency_key=key)
        except StoreBusyError:
            return None  # the reason will still be there at the next look


def reason_to_reset(facts: Facts) -> str | None:
    """Why a reset is due: a finding says so, or the curve looks it; None if neither."""
    for finding in facts.findings:
        if finding.kind == "kl_saturation":
            return finding.message
    if facts.step < PATIENCE:
        return None
    now, before = facts.level(KL, facts.step - WINDOW + 1), saturated_from(facts, facts.step)
    return None if before is None else f"the KL chart is flat: {before:.3f}, then {now:.3f} nats/token"


def saturated_from(facts: Facts, step: int) -> float | None:
    """The KL of the window before the last one up to ``step``, if KL had risen and stayed level since; else None."""
    now = facts.level(KL, step - WINDOW + 1, step)
    before = facts.level(KL, step - 2 * WINDOW + 1, step - WINDOW)
    start = facts.level(KL, 2, 1 + FIRST)
    flat = abs(now - before) < FLAT * now and before > RISEN * start
    return before if flat else None


def reason_to_panic(facts: Facts) -> str | None:
    """Critical alerts of ``ENOUGH`` kinds of collapse that fire, if the first command is behind us."""
    if len(facts.commands) > 1:
        return None
    alarms = {alert.kind: alert for alert in facts.firing(Severity.CRITICAL) if alert.kind in COLLAPSE_KINDS}
    if len(alarms) < ENOUGH:
        return None
    return f"perhaps it helps against {' and '.join(sorted(alarms))}"
