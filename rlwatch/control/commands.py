"""The commands for a live run: their kinds, the check of their arguments, and the queueing of a command."""

from __future__ import annotations

import math
import os
import pwd
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ConfigError
from rlwatch.plugins import usable
from rlwatch.ports import CommandStore
from rlwatch.records import JSON, Command
from rlwatch.redaction import redacted
from rlwatch.wording import meant

ROLLBACK = "rollback"
"""Name of the command that restores a snapshot."""
SKIP_STEP = "skip-step"
"""The command that leaves updates out."""
NONFINITE = "nonfinite"
"""Value of its ``when``: only updates whose gradient is not finite."""
TAKE_SNAPSHOT = "take-snapshot"
"""Internal command that rlwatch sends to all ranks when a snapshot is due; users cannot send it."""
UNDO_LAST = "undo"
"""Name of the command that undoes the last one."""
LAST_GOOD = "last-good"
"""Argument of a rollback: the newest snapshot that is known to be good."""
REQUIRED: Any = object()
"""Marks an argument without a default, which must be given."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Description of a command's argument that must be one of ``values``; the first one is the default."""

    values: tuple[str, ...]
    meaning: str

    @property
    def default(self) -> JSON:
        """Value that is used if the argument is not given: the first one."""
        return self.values[0]

    @property
    def allowed(self) -> str:
        """Description of the allowed values, for messages."""
        return f"one of {', '.join(self.values)}"

    def fits(self, value: JSON) -> bool:
        """Return whether ``value`` is one of the allowed texts."""
        return isinstance(value, str) and value in self.values


@dataclass(frozen=True, slots=True)
class Number:
    """Description of a command's argument that must be a finite number.

    Parameters
    ----------
    meaning
        Description for people.
    low, high
        Bounds, inclusive.
    above
        Whether ``low`` itself is excluded.
    default
        Value if the argument is not given; :data:`REQUIRED`: it must be given; None: it may be None.
    unit
        Unit, for messages.
    whole
        Whether it must be an integer.
    """

    meaning: str
    low: float = 0.0
    high: float = math.inf
    above: bool = False
    default: JSON = REQUIRED
    unit: str = ""
    whole: bool = False

    @property
    def allowed(self) -> str:
        """Description of the allowed values, for messages."""
        low = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        high = "" if math.isinf(self.high) else f" and at most {self.high:g}"
        what = "an integer" if self.whole else "a number"
        return f"{what} {low}{high}{' ' * bool(self.unit)}{self.unit}{' or none' * (self.default is None)}"

    def fits(self, value: JSON) -> bool:
        """Return whether ``value`` is an allowed number. Booleans, NaN, infinities and values too large for a float
        are not.
        """
        if value is None:
            return self.default is None
        if (
            isinstance(value, bool)
            or not isinstance(value, int if self.whole else int | float)
            or not abs(value) <= sys.float_info.max
        ):
            return False
        return value <= self.high and (value > self.low if self.above else value >= self.low)


@dataclass(frozen=True, slots=True)
class Step:
    """Description of a command's argument that must be a step of the trainer (an integer >= 1), or None."""

    meaning: str
    default: JSON = None
    allowed: str = "a step (an integer of at least 1) or none"

    def fits(self, value: JSON) -> bool:
        """Return whether ``value`` is None or an integer of at least 1."""
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """Description of a command's argument that names a snapshot: the last good one, or that of a step."""

    meaning: str
    default: JSON = LAST_GOOD
    allowed: str = f"{LAST_GOOD} or the step of a snapshot (an integer of at least 0)"

    def fits(self, value: JSON) -> bool:
        """Return whether ``value`` is ``"last-good"`` or an integer of at least 0."""
        return value == LAST_GOOD or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


Argument = Choice | Number | Step | SnapshotChoice


def checked_argument(kind: str, name: str, argument: Argument, value: JSON) -> JSON:
    """Return ``value`` if it is allowed for the argument ``name`` of a command.

    ``kind``: name of the command. ``argument``: description of what is allowed. Raises ``ConfigError`` that lists the
    allowed values.
    """
    if value is REQUIRED:
        raise ConfigError(f"{kind} needs {name}: {argument.allowed} ({argument.meaning})")
    if not argument.fits(value):
        raise ConfigError(f"{kind} {name}={value!r} is not {argument.allowed}")
    return value


# Every kind of command for a live run, with its arguments and its meaning.


@dataclass(frozen=True, slots=True)
class CommandKind:
    """One kind of command for a live run: its name, meaning and arguments.

    ``vetoed``: whether the trainer may refuse it during a collapse, which ``force`` overrules.
    """

    name: str
    meaning: str
    args: Mapping[str, Argument] = field(default_factory=dict)
    vetoed: bool = False

    def read(self, given: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return all arguments of a command: those ``given``, and the defaults of the others.

        Raises ``ConfigError`` for an unknown argument, or a value that is not allowed.
        """
        for name in given:
            if name not in self.args:
                takes = f"it takes: {', '.join(sorted(self.args))}" if self.args else "it takes none"
                raise ConfigError(f"{self.name} has no argument {name!r}; {takes}")
        return {
            name: checked_argument(self.name, name, argument, given.get(name, argument.default))
            for name, argument in self.args.items()
        }


_ALL_KINDS = (
    CommandKind(
        "reset-reference",
        "the policy as it is at the next safe boundary becomes its own reference: KL starts again from 0",
        {"optimizer": Choice(("clear", "keep"), "the optimizer's state: cleared (ProRL v1) or kept (ProRL v2)")},
        vetoed=True,
    ),
    CommandKind("save-checkpoint", "the trainer saves a checkpoint, as it would by its own schedule", vetoed=True),
    CommandKind(
        "lower-lr",
        "the learning rate becomes a fraction of what the schedule says; 1 gives it back to the schedule",
        {
            "scale": Number("fraction of the scheduled learning rate", high=1.0, above=True),
            "until": Step("the step from which the schedule rules again"),
            "freeze": Choice(("no", "yes"), "whether the rate stays what it is then, though the schedule goes on"),
        },
    ),
    CommandKind(
        "raise-lr",
        "the learning rate becomes a multiple of what the schedule says, also one above 1",
        {"scale": Number("multiple of the scheduled learning rate", high=10.0, above=True)},
        vetoed=True,
    ),
    CommandKind(
        "set-kl-coef",
        "the coefficient of the KL term (beta) becomes this value",
        {"value": Number("the new coefficient")},
        vetoed=True,
    ),
    CommandKind(
        ROLLBACK,
        "weights and optimizer become those of a snapshot; training goes on from there",
        {"to": SnapshotChoice("the snapshot: the last one known to be good, or the one of a step")},
    ),
    CommandKind(
        "set-clip",
        "the importance ratio is clipped to this range from the next batch on",
        {
            "low": Number("distance below 1 at which ratios are clipped", high=1.0, above=True),
            "high": Number("distance above 1; none: the same as below", above=True, default=None),
        },
    ),
    CommandKind(
        "set-grad-clip",
        "gradients are clipped to this norm",
        {"value": Number("the largest norm", above=True)},
    ),
    CommandKind(
        "set-entropy-coef",
        "the coefficient of the entropy bonus becomes this value",
        {"value": Number("the new coefficient")},
    ),
    CommandKind(
        "set-is-correction",
        "the ratios of trainer to rollout engine are truncated or masked in this way",
        {
            "mode": Choice(
                ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"),
                "truncated (TIS) or masked (MIS), by token or by sequence; off: not corrected",
            ),
            "cap": Number("the largest ratio; none: as it is", low=1.0, default=None),
        },
    ),
    CommandKind("sync-weights", "the rollout engine is sent the weights again before the next batch is sampled"),
    CommandKind(
        "hold",
        "nothing is updated while batches are sampled: their reward shows if the fault lies in the policy or outside",
        {"batches": Number("batches to sample; 0 ends a hold", high=1e6, default=3, unit="batches", whole=True)},
    ),
    CommandKind(
        SKIP_STEP,
        "the next updates are left out: their gradients are dropped, and weights and optimizer stay as they are",
        {
            "steps": Number("updates it lasts; 0 ends it", high=1e6, default=1, unit="updates", whole=True),
            "when": Choice(("always", NONFINITE), "every one, or those whose gradient is NaN or infinite"),
        },
    ),
    CommandKind(
        UNDO_LAST, "the last command is taken back, if it can be: a setting, a held batch, a rollback", vetoed=True
    ),
    CommandKind(
        "pause",
        "training waits at the next safe boundary",
        {"minutes": Number("the longest it waits", high=1440.0, above=True, default=60.0, unit="minutes")},
    ),
    CommandKind("resume", "a paused training goes on"),
    CommandKind(
        "stop",
        "training ends at the next safe boundary, as if it had reached its last step",
        {"save": Choice(("yes", "no"), "whether a checkpoint is saved first")},
    ),
)

COMMAND_KINDS: Mapping[str, CommandKind] = {kind.name: kind for kind in _ALL_KINDS}
"""Every kind of command by name."""


def command_kind(name: str) -> CommandKind:
    """Return the kind of command called ``name``, rlwatch's own or a plugin's. Raises ``ConfigError`` that lists all
    kinds.
    """
    if name in COMMAND_KINDS:
        return COMMAND_KINDS[name]
    others = handlers_of_plugins()
    if name not in others:
        known = sorted([*COMMAND_KINDS, *others])
        raise ConfigError(f"unknown command {name!r}; known: {', '.join(known)}{meant(name, known, alike=0.75)}")
    return CommandKind(name, others[name].meaning, others[name].args)


def handlers_of_plugins() -> Mapping[str, Any]:
    """Return name of a command -> class that executes it, for the commands that plugins add."""
    return usable("rlwatch.commands", COMMAND_KINDS)


# Queueing commands for a live run.

EXPIRES_S = 600.0


def request(
    store: CommandStore,
    run_id: str,
    kind: str,
    *,
    args: Mapping[str, JSON] | None = None,
    why: str = "",
    by: str | None = None,
    force: bool = False,
    expires_s: float = EXPIRES_S,
    idempotency_key: str | None = None,
    clock: Clock | None = None,
) -> Command:
    """Queue a command for a live run and return it as stored.

    A command that no trainer begins within ``expires_s`` seconds expires, so that a restarted trainer does not execute
    an old request. Two calls with the same ``idempotency_key`` return the same command.

    Parameters
    ----------
    store, run_id
        Store, and id of the run in it.
    kind, args
        Kind of command, and its arguments.
    why, by
        The user's reason, and the user; None: the account of this process.
    force
        Overrule a veto of the trainer.
    expires_s
        Seconds after which the command expires.
    idempotency_key
        Key that identifies this request; None: a new one.
    clock
        Clock; None: the machine's.

    Raises
    ------
    ConfigError
        For an unknown kind or argument, or a value that is not allowed; the message lists the allowed ones.
    ControlUnavailableError
        Where the store cannot carry commands (a network file system).
    """
    now = (clock or SystemClock()).now()
    command = Command(
        command_id=uuid.uuid4().hex[:16],
        run_id=run_id,
        kind=kind,
        args=command_kind(kind).read(args or {}),
        force=force,
        requested_by=by or whoami(),
        why=redacted(why),
        idempotency_key=idempotency_key or uuid.uuid4().hex,
        created_at=now,
        expires_at=now + expires_s,
    )
    return store.submit(command)


def cancel(
    store: CommandStore,
    run_id: str,
    command_id: str,
    *,
    why: str = "",
    by: str | None = None,
    clock: Clock | None = None,
) -> Command:
    """Cancel a command whose execution has not begun; return it with its new status.

    ``why`` and ``by``: the user's reason, and the user (None: the account of this process).

    Returns
    -------
    Command
        With status ``cancelled``: no trainer will execute it. ``cancelling``: a trainer has claimed it, and drops it at
        its next poll unless its execution has begun; read the command again later. Any other status: the command had
        its final result before.

    Raises
    ------
    StoreError
        If the run has no such command.
    ControlUnavailableError
        Where the store cannot carry commands.
    """
    result = f"cancelled by {by or whoami()}{f': {why}' if why else ''}"
    return store.cancel(run_id, command_id, (clock or SystemClock()).now(), result=result)


def whoami() -> str:
    """Return ``user@host`` of this process: the account it runs under, not ``$USER``."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
