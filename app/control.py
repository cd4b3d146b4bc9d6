"""What the app asks of a live run, and what it can tell beforehand (pure but for :func:`send`)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlwatch.clock import Clock
from rlwatch.control.commands import COMMAND_KINDS, cancel, request
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.errors import RLWatchError
from rlwatch.ports import CommandStore
from rlwatch.records import JSON, Alert, AlertState, Command, CommandStatus, RunInfo, RunState, Severity

from . import format as fmt
from .asks import ASKS, RESET

TYPEABLE = 40
"""Characters of a name that a person may be asked to type."""

NEEDS_REFERENCE = frozenset({RESET, "set-kl-coef"})

REFUSED = {
    RESET: "a reset now would make the collapsing policy the anchor, and will be refused unless forced",
    "save-checkpoint": "where the trainer keeps only the newest checkpoints, a save may delete the last good one and "
    "will be refused unless forced",
    "set-kl-coef": "a lower coefficient would free the collapsing policy, and will be refused unless forced",
}
"""What a firing collapse means for a command that may be vetoed."""


NAME_HEADER, ROLE_HEADER = "x-rlwatch-name", "x-rlwatch-role"
"""What the door of the dashboard says of whoever it let in; from outside they never arrive."""


class NotPermittedError(RLWatchError):
    """Whoever asks may only look."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever looks at a page, as the door let them in; by default a nobody, who may do nothing."""

    name: str = ""
    role: str = ""

    @property
    def may_command(self) -> bool:
        """Whether they may change anything."""
        return self.role == "operator" and bool(self.name)

    def require_command(self) -> None:
        """Raise ``NotPermittedError`` unless they may change something."""
        if not self.may_command:
            raise NotPermittedError(
                f"{self.name or 'whoever is not logged in'} may look and not command: open the operator's link of "
                "rlwatch ui"
            )


@dataclass(frozen=True, slots=True)
class Check:
    """One precondition: ``met`` True, False, or None where only the trainer knows."""

    met: bool | None
    text: str


def new_key() -> str:
    """An idempotency key: one per opening of the dialog, so that a double click is one command."""
    return uuid.uuid4().hex


def checks(
    kind: str,
    run: RunInfo,
    alerts: Sequence[Alert],
    *,
    stale: bool,
    has_reference: bool | None,
    paused: bool = False,
    dead: bool = False,
) -> list[Check]:
    """What a command needs, and whether it is so as far as the store can tell."""
    found = [_alive(run, stale=stale and not paused, dead=dead and not paused)]
    if kind in NEEDS_REFERENCE:
        found.append(Check(has_reference, _reference_words(has_reference)))
    if kind in REFUSED:
        collapse = collapsing(alerts)
        found.append(Check(not collapse, _collapse_words(kind, collapse)))
    if kind == "save-checkpoint" and paused:
        found.append(Check(None, "the run is paused: the trainer saves once it goes on"))
    if kind == "resume":
        found.append(Check(paused or None, "the run is paused" if paused else "the run does not seem to be paused"))
    return found


def collapsing(alerts: Sequence[Alert]) -> list[Alert]:
    """Critical alerts of a collapse that fire now: while they do, the trainer refuses unless forced."""
    critical = [a for a in alerts if a.state is AlertState.FIRING and a.severity is Severity.CRITICAL]
    return sorted((a for a in critical if a.kind in COLLAPSE_KINDS), key=lambda alert: alert.onset_step)


def _alive(run: RunInfo, *, stale: bool, dead: bool) -> Check:
    if run.state is not RunState.RUNNING:
        return Check(False, f"the run has {run.state.value}: nobody will claim the command")
    if dead:
        return Check(False, "the trainer is dead: the command expires unless somebody starts it again")
    if stale:
        return Check(None, "no step for a while: the command expires unless the run goes on")
    return Check(True, "the run is live")


def _reference_words(has_reference: bool | None) -> str:
    if has_reference:
        return "a reference is present: KL to it is measured"
    return "no KL to a reference is recorded: the trainer refuses if it has none"


def _collapse_words(kind: str, collapse: Sequence[Alert]) -> str:
    if not collapse:
        return "no collapse is firing"
    what = ", ".join(f"{fmt.words(alert.kind)} since step {fmt.step(alert.onset_step)}" for alert in collapse)
    return f"{what}: {REFUSED[kind]}"


def may_send(run: RunInfo, kind: str, typed: str) -> bool:
    """Whether the run lives and, where it must be, its name (or id, where it has no name) was typed."""
    return run.state is RunState.RUNNING and (not ASKS[kind].typed or " ".join(typed.split()) == confirmation(run))


def confirmation(run: RunInfo) -> str:
    """What must be typed: the name on one line, or the id where there is none one would want to type."""
    name = " ".join(run.name.split())
    return name if 0 < len(name) <= TYPEABLE else run.run_id


def send(
    store: CommandStore,
    run_id: str,
    kind: str,
    args: Mapping[str, JSON],
    *,
    why: str,
    by: Principal,
    force: bool,
    key: str,
    clock: Clock | None = None,
) -> Command:
    """Queue a command; the same ``key`` twice gives the same command.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ConfigError`` for arguments that are not allowed,
    ``ControlUnavailableError`` and ``StoreBusyError``.
    """
    by.require_command()
    return request(
        store,
        run_id,
        kind,
        args=args,
        why=why.strip(),
        by=by.name,
        force=force and COMMAND_KINDS[kind].vetoed,
        idempotency_key=key,
        clock=clock,
    )


def take_back(store: CommandStore, run_id: str, command_id: str, *, by: Principal) -> Command:
    """Cancel a command that was not begun; returns it as it then stands. Raises as :func:`send` does."""
    by.require_command()
    return cancel(store, run_id, command_id, by=by.name)


def reset_due(alerts: Sequence[Alert]) -> bool:
    """Whether a reset is what the run asks for: KL has saturated or held-out scores stalled, and nothing collapses."""
    due = ("kl_saturation", "reset_due")
    saturated = any(alert.state is AlertState.FIRING and alert.kind in due for alert in alerts)
    return saturated and not collapsing(alerts)


def missed(command: Command, now: float) -> bool:
    """Whether nobody claimed it in time; the row says so only once somebody looks for commands again."""
    return command.status is CommandStatus.QUEUED and 0 < command.expires_at <= now


def waiting(commands: Sequence[Command], now: float) -> bool:
    """Whether a command is still on its way."""
    return any(command.status.open and not missed(command, now) for command in commands)


def outcome(command: Command, now: float) -> str:
    """What became of it: ``done at step 4 816``."""
    if missed(command, now) or (command.status is CommandStatus.EXPIRED and command.claimed_at is None):
        return "expired: nobody claimed it"
    at = "" if command.finished_step is None else f" at step {fmt.step(command.finished_step)}"
    return f"{command.status.value}{at}"


def arguments(command: Command) -> str:
    """What it was asked with, in a few words; what was left open is not said."""
    given = [f"{name} {_said(value)}" for name, value in command.args.items() if value is not None]
    return ", ".join([*given, *(["forced"] if command.force else [])])


def _said(value: JSON) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
