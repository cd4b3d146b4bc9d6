"""What may be done to a live run without asking anybody: a list of permissions, empty unless somebody writes one.

An action turns an alert that fires into a command, the same row a person would have written: it goes the same way, is
refused by the same vetoes and is kept with who (``policy:NAME``) and why. Advice is not permission: only what
``[[actions]]`` in ``rlwatch.toml`` names is done, and only tried out (``dry_run``) until that says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlwatch.control.kinds import kind_of
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.errors import ConfigError
from rlwatch.records import JSON, Alert, Command, CommandStatus, Severity

BY = "policy:"
"""Commands of an action are requested by this and its name."""


@dataclass(frozen=True, slots=True)
class Action:
    """A permission: when an alert of one of ``kinds`` fires, ask the run to ``do`` something.

    Parameters
    ----------
    name
        Unique; part of who requested the command.
    kinds
        Of alerts; at least one. There is no "all".
    do, args
        A command and its arguments, as ``rlwatch command`` takes them.
    min_severity
        Least severity of the alert.
    cooldown_steps
        Steps that must pass after the last command of this action.
    most
        Commands of this action in the life of the run, over all its attempts.
    dry_run
        Only record what would have been asked.

    Raises
    ------
    ConfigError
        For an unknown command or argument, a number out of range, or a reset of the reference upon a collapse: it
        would make the collapsing policy the anchor.
    """

    name: str
    kinds: tuple[str, ...]
    do: str
    args: Mapping[str, JSON] = field(default_factory=dict)
    min_severity: Severity = Severity.WARNING
    cooldown_steps: int = 100
    most: int = 1
    dry_run: bool = True

    def __post_init__(self) -> None:
        if not self.name or not self.kinds:
            raise ConfigError(f"action {self.name!r}: needs a name, and kinds: at least one kind of alert")
        for what, least in (("cooldown_steps", 0), ("most", 1)):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"action {self.name!r}: {what} must be an integer of at least {least}, got {value!r}")
        try:
            object.__setattr__(self, "args", kind_of(self.do).read(self.args))
        except ConfigError as error:
            raise ConfigError(f"action {self.name!r}: {error}") from None
        fatal = sorted(COLLAPSE_KINDS.intersection(self.kinds))
        if self.do == "reset-reference" and fatal:
            raise ConfigError(
                f"action {self.name!r}: reset-reference upon {', '.join(fatal)} would make a collapsing policy the "
                "anchor; ask for stop, pause or lower-lr there"
            )

    @property
    def by(self) -> str:
        """Who requests its commands."""
        return f"{BY}{self.name}"

    def concerns(self, alert: Alert) -> bool:
        """Whether it is about such an alert."""
        return alert.kind in self.kinds and alert.severity.rank >= self.min_severity.rank


@dataclass(frozen=True, slots=True)
class Past:
    """What an action has asked of the run so far: how often, and at which step of the run last."""

    count: int = 0
    last_step: int | None = None

    @classmethod
    def of(cls, action: Action, commands: Sequence[Command]) -> Past:
        """Of the run's ``commands``: those that were never begun count for nothing but the cool-down."""
        ours = [command for command in commands if command.requested_by == action.by]
        unspent = (CommandStatus.EXPIRED, CommandStatus.REJECTED, CommandStatus.CANCELLED)
        spent = [c for c in ours if c.status not in unspent]
        steps = [step for command in ours if (step := asked_at(command)) is not None]
        return cls(len(spent), max(steps, default=None))

    def more(self, step: int) -> Past:
        """With one more, at ``step``."""
        return Past(self.count + 1, step)


def asked_at(command: Command) -> int | None:
    """The step of the alert that a command of an action answers; None of other commands."""
    _, _, step = command.idempotency_key.rpartition("@")
    return int(step) if step.isdigit() and command.requested_by.startswith(BY) else None


def key_of(action: Action, alert: Alert) -> str:
    """The same for the same action, alert and step: asking twice, by a run relived, asks once."""
    return f"{action.name}/{alert.alert_id}@{alert.step}"


def refusal(action: Action, alert: Alert, past: Past) -> str | None:
    """Why the action must not be taken upon ``alert``; None if it may."""
    if past.count >= action.most:
        return f"its budget of {action.most} in this run is spent"
    if past.last_step is not None and alert.step < past.last_step + action.cooldown_steps:
        return f"it cools down until step {past.last_step + action.cooldown_steps}"
    return None
