"""Vetoes of harmful commands, and permissions for actions that need no user.

Resetting the reference during a collapse would make the collapsing policy the reference (measured: it saved 0 of 14
crashing runs), so it is refused unless forced. An impossible command cannot be forced.

An action turns a firing alert into a command, as if a user had sent it: the same vetoes apply, and the requester
(``policy:NAME``) and the reason are stored. Advice in a diagnosis is never executed: only the actions in
``[[actions]]`` of ``rlwatch.toml`` are, and they are only recorded while ``dry_run`` is true, the default.
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
"""Number of rows after a snapshot that must be healthy before it counts as good: enough for a fall to show in the
median.
"""
ROWS_KEPT = 256
"""Number of newest judged rows that a live run keeps."""
KL_COEF = "policy/kl_coef"
"""The coefficient of the KL term, as it is logged."""
COLLAPSE_KINDS = collapse_kinds()
"""Kinds of finding that, while critical, make the policy unfit to become the reference."""


@dataclass(frozen=True, slots=True)
class NamedSetting:
    """A setting (such as the learning rate) that the diagnosis names as a cause and that changed before the failure in
    the log.

    Attributes
    ----------
    knob
        Name of the setting in ``knobs.toml``.
    metric
        Metric that is the setting itself.
    since
        First step with the changed value.
    before, after
        Values before the change and at the failure, in the unit of the metric.
    sure
        Confidence of the diagnosis, as the text of a ``Confidence``.
    """

    knob: str
    metric: str
    since: int
    before: float
    after: float
    sure: str


@dataclass(frozen=True, slots=True)
class RunHealth:
    """Present health of a run, by which commands are vetoed and snapshots judged.

    Parameters
    ----------
    findings
        Findings (detected problems) that hold now.
    alerts
        Alerts that fire now: an alert outlasts a finding that flickers.
    forecast
        Forecast of the last step. It vetoes nothing: a forecast collapse has not happened, and a reset or a checkpoint
        before it may be useful.
    rows
        Newest rows that were judged, in order.
    named
        Settings that changed and that the diagnosis names as causes, while a critical alert of a collapse fires.
    """

    findings: tuple[Finding, ...] = ()
    alerts: tuple[Alert, ...] = ()
    forecast: Forecast | None = None
    rows: tuple[JudgedRow, ...] = ()
    named: tuple[NamedSetting, ...] = ()

    def unsound_after(self, step: int) -> str | None:
        """Return the reason why the weights after ``step`` are not good; empty if they are; None if too few rows are
        judged.

        The row of a step measures the weights before its update, and a median shows a fall late. So the row up to
        ``step`` and :data:`ROWS_AFTER` later ones must be healthy. For the weights with which the run began, the first
        row is enough.
        """
        wanted = ROWS_AFTER if step > 0 else 1
        before = [row for row in self.rows if row.step <= step][-1:]
        after = [row for row in self.rows if row.step > step][:wanted]
        reason = next((row.why_not for row in (*before, *after) if row.why_not), "")
        return reason or ("" if len(after) == wanted else None)

    @property
    def collapsing(self) -> tuple[Finding | Alert, ...]:
        """Critical findings and alerts that show a collapse and so veto harmful commands, one of each kind."""
        signs: tuple[Finding | Alert, ...] = (*self.findings, *self.alerts)
        bad = [sign for sign in signs if sign.severity is Severity.CRITICAL and sign.kind in COLLAPSE_KINDS]
        return tuple({sign.kind: sign for sign in reversed(bad)}.values())[::-1]


def veto_reset_reference(health: RunHealth, *, force: bool = False) -> str | None:
    """Return the reason not to reset the reference model now; None if it is allowed. ``force``: always allow.

    >>> veto_reset_reference(RunHealth()) is None
    True
    """
    if force or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; a reset now would make the collapsing policy the anchor. " + (
        "Roll back to a checkpoint before the onset instead, or send the command again with force."
    )


def veto_save_checkpoint(health: RunHealth, *, kept: int | None, force: bool = False) -> str | None:
    """Return the reason not to save a checkpoint now; None if it is allowed. ``force``: always allow.

    During a collapse a new checkpoint could make the trainer delete an older, good one. ``kept``: number of checkpoints
    that the trainer keeps; None: all, so that saving is allowed.
    """
    if force or kept is None or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; only {kept} checkpoints are kept, so that a save now could " + (
        "delete the last good one. Copy that first, or send the command again with force."
    )


def veto_set_kl_coef(health: RunHealth, *, old: float, new: float, force: bool = False) -> str | None:
    """Return the reason not to lower the KL coefficient from ``old`` to ``new`` now; None if it is allowed.

    Raising it is never vetoed, nor is a return to the value before a rise that the diagnosis names as a cause.
    ``force``: always allow.
    """
    if force or new >= old or not health.collapsing:
        return None
    if any(one.metric == KL_COEF and new >= one.before for one in health.named):
        return None
    return f"refused: {describe(health.collapsing)}; a lower KL coefficient ({old:g} -> {new:g}) would free the " + (
        "collapsing policy from its anchor. Send the command again with force if that is meant."
    )


def veto_raise_lr(health: RunHealth, *, force: bool = False) -> str | None:
    """Return the reason not to raise the learning rate now; None if it is allowed. ``force``: always allow."""
    if force or not health.collapsing:
        return None
    return f"refused: {describe(health.collapsing)}; a higher learning rate would speed the collapse up. " + (
        "Send the command again with force if that is meant."
    )


def describe(signs: Sequence[Finding | Alert]) -> str:
    """Return the findings or alerts ``signs`` in a few words: ``entropy_collapse since step 120``."""
    return ", ".join(f"{f.kind} since step {f.onset_step}" for f in signs)


# Actions on a live run that need no person: a list of permissions, empty by default.

REQUESTED_BY = "policy:"
"""Prefix of the requester of an action's commands, before its name."""


@dataclass(frozen=True, slots=True)
class PermittedAction:
    """A permission from ``rlwatch.toml``: when an alert of one of ``kinds`` fires, send the run a command.

    Parameters
    ----------
    name
        Unique name; part of the name under which the command is requested.
    kinds
        Kinds of alerts; at least one. There is no "all".
    do, args
        A command and its arguments, as ``rlwatch command`` takes them.
    min_severity
        Lowest severity of the alert.
    cooldown_steps
        Number of steps that must pass after the last command of this action.
    most
        Largest number of commands of this action in the life of the run, over all its attempts (processes).
    dry_run
        Only record the command that would have been sent.

    Raises
    ------
    ConfigError
        For an unknown command or argument, a number out of range, or a reset of the reference upon a collapse: it would
        make the collapsing policy the reference.
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
        """Name under which the commands of this action are requested."""
        return f"{REQUESTED_BY}{self.name}"

    def concerns(self, alert: Alert) -> bool:
        """Return whether the action applies to ``alert``, by its kind and severity."""
        return alert.kind in self.kinds and alert.severity.rank >= self.min_severity.rank


@dataclass(frozen=True, slots=True)
class ActionHistory:
    """The commands that one permitted action (a command sent without a user) has sent to a run: their number, and the
    step of the last one.
    """

    count: int = 0
    last_step: int | None = None

    @classmethod
    def of(cls, action: PermittedAction, commands: Sequence[Command]) -> ActionHistory:
        """Return the history of ``action`` from all ``commands`` of the run.

        Commands whose execution never began count only for the cool-down.
        """
        own = [command for command in commands if command.requested_by == action.by]
        unspent = (CommandStatus.EXPIRED, CommandStatus.REJECTED, CommandStatus.CANCELLED)
        spent = [c for c in own if c.status not in unspent]
        steps = [step for command in own if (step := requested_at_step(command)) is not None]
        return cls(len(spent), max(steps, default=None))

    def more(self, step: int) -> ActionHistory:
        """Return a copy of the history with one more command of the action, sent at ``step``."""
        return ActionHistory(self.count + 1, step)


def requested_at_step(command: Command) -> int | None:
    """Return the step of the alert that made an action request ``command``; None for a command of a user."""
    _, _, step = command.idempotency_key.rpartition("@")
    return int(step) if step.isdigit() and command.requested_by.startswith(REQUESTED_BY) else None


def action_key(action: PermittedAction, alert: Alert) -> str:
    """Return the idempotency key of a command by action, alert and step, so that a replayed run sends it only once."""
    return f"{action.name}/{alert.alert_id}@{alert.step}"


def action_refusal(action: PermittedAction, alert: Alert, past: ActionHistory) -> str | None:
    """Return the reason not to execute ``action`` upon ``alert``; None if it is allowed.

    ``past``: the commands of this action so far.
    """
    if past.count >= action.most:
        return f"its budget of {action.most} in this run is spent"
    if past.last_step is not None and alert.step < past.last_step + action.cooldown_steps:
        return f"it cools down until step {past.last_step + action.cooldown_steps}"
    return None
