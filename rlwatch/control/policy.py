"""Refuse commands that must not be obeyed, and permit those that need no person.

A reset of the reference during a collapse would make the collapsing policy the anchor (measured: it saved
0 of 14 crashing runs), so it is refused unless forced. Nothing can be forced past what is impossible.

An action turns an alert that fires into a command, the same row a person would have written: it goes the same way, is
refused by the same vetoes and is kept with who (``policy:NAME``) and why. Advice is not permission: only what
``[[actions]]`` in ``rlwatch.toml`` names is done, and only tried out (``dry_run``) until that says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlwatch.catalogue import collapse_kinds
from rlwatch.control.commands import command_kind
from rlwatch.errors import ConfigError
from rlwatch.records import JSON, Alert, Command, CommandStatus, Finding, JudgedRow, Severity

if TYPE_CHECKING:
    from rlwatch.forecast import Forecast


ROWS_AFTER = 8
"""Rows after a snapshot that must be sound before it counts as good: those of which a fall fills the median."""
ROWS_KEPT = 256
"""Newest judged rows that a live run keeps."""
COLLAPSE_KINDS = collapse_kinds()
"""Kinds of finding that, while critical, mean the policy is not fit to become a reference: the catalogue says which."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    """Findings that hold for the run right now, and alerts that fire: an alert outlives a finding that flickers.

    ``forecast``: of the last step judged. It vetoes nothing: what may come is no collapse yet, and a reset or a
    checkpoint before it may be just what is wanted. ``rows``: the newest rows that were judged, in order.
    """

    findings: tuple[Finding, ...] = ()
    alerts: tuple[Alert, ...] = ()
    forecast: Forecast | None = None
    rows: tuple[JudgedRow, ...] = ()

    def unsound_after(self, step: int) -> str | None:
        """Return the reason that the weights after ``step`` are not good, "" if they are, None if too few are judged.

        The row of a step shows the weights before its update, and a fall hides among the rows of a median: so the
        row up to ``step`` and :data:`ROWS_AFTER` later ones have to be sound. The first row says all of the weights
        that the run began with: no update had broken them.
        """
        wanted = ROWS_AFTER if step > 0 else 1
        before = [row for row in self.rows if row.step <= step][-1:]
        after = [row for row in self.rows if row.step > step][:wanted]
        reason = next((row.why_not for row in (*before, *after) if row.why_not), "")
        return reason or ("" if len(after) == wanted else None)

    @property
    def collapsing(self) -> tuple[Finding | Alert, ...]:
        """Signs that veto a reset: critical findings that hold and critical alerts that fire, one of each kind."""
        signs: tuple[Finding | Alert, ...] = (*self.findings, *self.alerts)
        bad = [sign for sign in signs if sign.severity is Severity.CRITICAL and sign.kind in COLLAPSE_KINDS]
        return tuple({sign.kind: sign for sign in reversed(bad)}.values())[::-1]


def veto_reset_reference(health: RunHealth, *, force: bool = False) -> str | None:
    """The reason not to reset the reference now, or None if it may be.

    >>> veto_reset_reference(RunHealth()) is None
    True
    """
    if force or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; a reset now would make the collapsing policy the anchor. " + (
        "Roll back to a checkpoint before the onset instead, or send the command again with force."
    )


def veto_save_checkpoint(health: RunHealth, *, kept: int | None, force: bool = False) -> str | None:
    """The reason not to save a checkpoint now: the trainer keeps only ``kept`` and would delete an older, good one.

    None if one may be saved; always, where all are kept (``kept`` None).
    """
    if force or kept is None or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; only {kept} checkpoints are kept, so that a save now could " + (
        "delete the last good one. Copy that first, or send the command again with force."
    )


def veto_set_kl_coef(health: RunHealth, *, old: float, new: float, force: bool = False) -> str | None:
    """The reason not to lower the KL coefficient now; None if it may be. Raising it is never vetoed."""
    if force or new >= old or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; a lower KL coefficient ({old:g} -> {new:g}) would free the " + (
        "collapsing policy from its anchor. Send the command again with force if that is meant."
    )


def veto_raise_lr(health: RunHealth, *, force: bool = False) -> str | None:
    """The reason not to raise the learning rate now, or None if it may be."""
    if force or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; a higher learning rate would speed the collapse up. " + (
        "Send the command again with force if that is meant."
    )


def describe(signs: Sequence[Finding | Alert]) -> str:
    """They in a few words: ``entropy_collapse since step 120``."""
    return ", ".join(f"{f.kind} since step {f.onset_step}" for f in signs)


# What may be done to a live run without asking anybody: a list of permissions, empty unless somebody writes one.

REQUESTED_BY = "policy:"
"""Commands of an action are requested by this and its name."""


@dataclass(frozen=True, slots=True)
class PermittedAction:
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
            object.__setattr__(self, "args", command_kind(self.do).read(self.args))
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
        """Name under which its commands are requested."""
        return f"{REQUESTED_BY}{self.name}"

    def concerns(self, alert: Alert) -> bool:
        """True if it is about such an alert."""
        return alert.kind in self.kinds and alert.severity.rank >= self.min_severity.rank


@dataclass(frozen=True, slots=True)
class ActionHistory:
    """Requests of an action to the run so far: how often, and at which step of the run last."""

    count: int = 0
    last_step: int | None = None

    @classmethod
    def of(cls, action: PermittedAction, commands: Sequence[Command]) -> ActionHistory:
        """Of the run's ``commands``: those that were never begun count for nothing but the cool-down."""
        own = [command for command in commands if command.requested_by == action.by]
        unspent = (CommandStatus.EXPIRED, CommandStatus.REJECTED, CommandStatus.CANCELLED)
        spent = [c for c in own if c.status not in unspent]
        steps = [step for command in own if (step := requested_at_step(command)) is not None]
        return cls(len(spent), max(steps, default=None))

    def more(self, step: int) -> ActionHistory:
        """With one more, at ``step``."""
        return ActionHistory(self.count + 1, step)


def requested_at_step(command: Command) -> int | None:
    """The step of the alert that a command of an action answers; None of other commands."""
    _, _, step = command.idempotency_key.rpartition("@")
    return int(step) if step.isdigit() and command.requested_by.startswith(REQUESTED_BY) else None


def action_key(action: PermittedAction, alert: Alert) -> str:
    """The same for the same action, alert and step: asking twice, by a run relived, asks once."""
    return f"{action.name}/{alert.alert_id}@{alert.step}"


def action_refusal(action: PermittedAction, alert: Alert, past: ActionHistory) -> str | None:
    """The reason not to take the action upon ``alert``; None if it may be."""
    if past.count >= action.most:
        return f"its budget of {action.most} in this run is spent"
    if past.last_step is not None and alert.step < past.last_step + action.cooldown_steps:
        return f"it cools down until step {past.last_step + action.cooldown_steps}"
    return None
