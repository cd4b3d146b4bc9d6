"""What the app asks of a live run, and what it can tell beforehand (pure but for :func:`send`)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from rlwatch.clock import Clock
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.control.request import request, whoami
from rlwatch.ports import CommandStore
from rlwatch.records import Alert, AlertState, Command, CommandStatus, RunInfo, RunState, Severity

from . import format as fmt

RESET = "reset-reference"
OPTIMIZER = {
    "clear": "cleared: a fresh start (ProRL v1)",
    "keep": "kept: momentum carries on (ProRL v2)",
}
"""Values of the argument ``optimizer`` and what each means."""

TYPEABLE = 40
"""Characters of a name that a person may be asked to type."""

OPEN = frozenset({CommandStatus.QUEUED, CommandStatus.CLAIMED})


@dataclass(frozen=True, slots=True)
class Check:
    """One precondition: ``met`` True, False, or None where only the trainer knows."""

    met: bool | None
    text: str


def new_key() -> str:
    """An idempotency key: one per opening of the dialog, so that a double click is one command."""
    return uuid.uuid4().hex


def reset_checks(run: RunInfo, alerts: Sequence[Alert], *, stale: bool, has_reference: bool | None) -> list[Check]:
    """What a reset of the reference needs, and whether it is so as far as the store can tell."""
    collapse = collapsing(alerts)
    return [
        _alive(run, stale=stale),
        Check(has_reference, _reference_words(has_reference)),
        Check(not collapse, _collapse_words(collapse)),
    ]


def collapsing(alerts: Sequence[Alert]) -> list[Alert]:
    """Critical alerts of a collapse that fire now: while they do, the trainer refuses unless forced."""
    critical = [a for a in alerts if a.state is AlertState.FIRING and a.severity is Severity.CRITICAL]
    return sorted((a for a in critical if a.kind in COLLAPSE_KINDS), key=lambda alert: alert.onset_step)


def _alive(run: RunInfo, *, stale: bool) -> Check:
    if run.state is not RunState.RUNNING:
        return Check(False, f"the run has {run.state.value}: nobody will claim the command")
    if stale:
        return Check(None, "no step for a while: the command expires unless the run goes on")
    return Check(True, "the run is live")


def _reference_words(has_reference: bool | None) -> str:
    if has_reference:
        return "a reference is present: KL to it is measured"
    return "no KL to a reference is recorded: the trainer refuses if it has none"


def _collapse_words(collapse: Sequence[Alert]) -> str:
    if not collapse:
        return "no collapse is firing"
    what = ", ".join(f"{fmt.words(alert.kind)} since step {fmt.step(alert.onset_step)}" for alert in collapse)
    return f"{what}: a reset now would make the collapsing policy the anchor, and will be refused unless forced"


def may_send(run: RunInfo, typed: str) -> bool:
    """Whether the typed confirmation is the run's name (or id, where it has no name)."""
    return run.state is RunState.RUNNING and " ".join(typed.split()) == confirmation(run)


def confirmation(run: RunInfo) -> str:
    """What must be typed: the name on one line, or the id where there is none one would want to type."""
    name = " ".join(run.name.split())
    return name if 0 < len(name) <= TYPEABLE else run.run_id


def send(
    store: CommandStore,
    run_id: str,
    *,
    optimizer: str,
    why: str,
    by: str,
    force: bool,
    key: str,
    clock: Clock | None = None,
) -> Command:
    """Queue a reset of the reference; the same ``key`` twice gives the same command.

    Raises ``ConfigError`` for an unknown ``optimizer``, ``ControlUnavailableError`` and ``StoreBusyError``.
    """
    return request(
        store,
        run_id,
        RESET,
        args={"optimizer": optimizer},
        why=why.strip(),
        by=by.strip() or whoami(),
        force=force,
        idempotency_key=key,
        clock=clock,
    )


def reset_due(alerts: Sequence[Alert]) -> bool:
    """Whether a reset is what the run asks for: KL has saturated, and nothing collapses."""
    saturated = any(alert.state is AlertState.FIRING and alert.kind == "kl_saturation" for alert in alerts)
    return saturated and not collapsing(alerts)


def missed(command: Command, now: float) -> bool:
    """Whether nobody claimed it in time; the row says so only once somebody looks for commands again."""
    return command.status is CommandStatus.QUEUED and 0 < command.expires_at <= now


def waiting(commands: Sequence[Command], now: float) -> bool:
    """Whether a command is still on its way."""
    return any(command.status in OPEN and not missed(command, now) for command in commands)


def outcome(command: Command, now: float) -> str:
    """What became of it: ``done at step 4 816``."""
    if command.status is CommandStatus.EXPIRED or missed(command, now):
        return "expired: nobody claimed it"
    at = "" if command.finished_step is None else f" at step {fmt.step(command.finished_step)}"
    return f"{command.status.value}{at}"
