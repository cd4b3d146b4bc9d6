"""Settings of a trainer: learning rates and settings that it does not log, and the commands that change them.

A trainer logs the learning rate of its scheduler, and most settings only at the start. This module reads the values
that the update uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.errors import RLWatchError
from rlwatch.integrations.learning_rate import FIXED
from rlwatch.integrations.weights import inner_optimizer
from rlwatch.records import JSON, Command
from rlwatch.wording import cell

SETTING = "setting"
"""Kind of the event for a setting that changed during the run, with its ``option``, ``before`` and ``after``."""
MOST_CHANGES = 20
"""Largest number of changes that are reported of one setting, because some settings change at every step."""
LONGEST = 100
"""Largest number of characters that are kept of a setting's value if it is not a number."""


def rates(optimizer: Any) -> dict[str, float]:
    """Return the current learning rates of ``optimizer`` as metrics.

    ``optim/lr`` is that of the first parameter group, ``optim/lr_max`` the largest if there are several groups. Empty
    if a rate is a tensor on a device, because reading it would wait for the device, or if ``optimizer`` is None.
    """
    groups = [] if optimizer is None else list(inner_optimizer(optimizer).param_groups)
    held = [group.get(FIXED, group.get("lr")) for group in groups]
    known = [float(rate) for rate in held if rate is not None and not _on_device(rate)]
    if not known or len(known) < len(held):
        return {}
    return {"optim/lr": known[0]} | ({"optim/lr_max": max(known)} if len(known) > 1 else {})


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


class TrainerSettings:
    """Settings of a trainer, read at every step.

    Parameters
    ----------
    numbers
        Metric -> function that returns its current value or None; recorded at every step.
    options
        Option -> function that returns its current value; recorded when it changes.
    """

    def __init__(
        self, numbers: Mapping[str, Callable[[], Any]], options: Mapping[str, Callable[[], Any]] | None = None
    ) -> None:
        self._numbers = numbers
        self._options = dict(options or {})
        self._known: dict[str, JSON] = {}
        self._reported: dict[str, int] = {}

    def values(self) -> dict[str, float]:
        """Return the current values of the numeric settings, by metric name.

        Unknown settings and tensors on a device are left out.
        """
        read = {metric: value() for metric, value in self._numbers.items()}
        return {metric: float(value) for metric, value in read.items() if value is not None and not _on_device(value)}

    def changes(self) -> list[dict[str, JSON]]:
        """Return the options that changed since the last call, each as ``{"option", "before", "after"}``.

        The first call returns none. Each option is reported at most ``MOST_CHANGES`` times.
        """
        found: list[dict[str, JSON]] = []
        for option, read in self._options.items():
            value = _plain(read())
            before = self._known.setdefault(option, value)
            if before != value and self._reported.get(option, 0) < MOST_CHANGES:
                self._reported[option] = self._reported.get(option, 0) + 1
                found.append({"option": option, "before": before, "after": value})
            self._known[option] = value
        return found


def _plain(value: Any) -> JSON:
    """Return a JSON value, truncated if it is long."""
    if isinstance(value, Tensor):
        value = "on a device" if _on_device(value) or value.numel() > MOST_CHANGES else value.tolist()
    return value if isinstance(value, bool | int | float) else str(value)[:LONGEST]


def attributes(owner: Any, names: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    """Return a function for each existing attribute of ``owner`` that reads its current value.

    ``names`` maps the name of an option in the log to the name of the attribute; the result has the options as keys.
    """
    return {option: _reader(owner, name) for option, name in names.items() if hasattr(owner, name)}


def _reader(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(owner, name, None)


# Handlers of commands that change a setting of the trainer (``set-clip``, ``set-entropy-coef`` and similar ones) and
# of ``sync-weights``.

Values = Mapping[str, JSON]
"""Arguments of a command and their values."""
ADJUSTABLE = ("set-clip", "set-grad-clip", "set-entropy-coef", "set-is-correction")
"""Kinds of commands that only change a setting of the trainer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the trainer that a command can change, as functions that read and write it.

    Attributes
    ----------
    read
        Returns the current values, by the names of the command's arguments. Raises ``RLWatchError`` with the reason why
        they cannot be changed.
    write
        Sets the values, which the trainer's later computations use. An argument that was left out of the command is
        None.
    """

    read: Callable[[], Values]
    write: Callable[[Values], None]


class Adjust:
    """Handler of one of the commands in :data:`ADJUSTABLE`.

    ``kind`` is the command's name, ``setting`` what it changes.
    """

    def __init__(self, kind: str, setting: Setting) -> None:
        self.kind = kind
        self._setting = setting
        self.kept: Values | None = None
        """Values set last by a command; None while the trainer's own configuration is in force."""

    def values(self) -> Values:
        """Return the present values of the trainer's setting, by the names of the command's arguments.

        Raises ``RLWatchError`` with the reason if the setting cannot be changed.
        """
        return self._setting.read()

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if the trainer has no such setting, or does not read it while it runs."""
        COMMAND_KINDS[self.kind].read(command.args)
        self._setting.read()

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Set the values. Return a report with all values ``before`` and ``after`` and the command that reverts the
        change.
        """
        args, before = COMMAND_KINDS[self.kind].read(command.args), self._setting.read()
        self._setting.write(args)
        after = self._setting.read()
        self.kept = dict(after)
        changed = [name for name in after if after[name] != before.get(name)]
        words = ", ".join(f"{name} {cell(before.get(name))} -> {cell(after[name])}" for name in changed)
        return {
            "before": dict(before),
            "after": dict(after),
            "summary": words or "it was so already",
            "undo": {"kind": self.kind, "args": dict(before)},
        }


class SyncWeights:
    """Handler of the command ``sync-weights``, which makes the trainer send its weights to the rollout engine.

    ``sync`` sends the weights, or makes the trainer send them, and returns a message.
    """

    kind: str = "sync-weights"

    def __init__(self, sync: Callable[[], str]) -> None:
        self._sync = sync

    def check(self, command: Command) -> None:
        """Raise ``ConfigError`` if the command's arguments are not valid."""
        COMMAND_KINDS[self.kind].read(command.args)

    def __call__(self, command: Command) -> Mapping[str, JSON]:  # noqa: ARG002  (the signature of the port)
        """Send the weights to the rollout engine and return a report with a ``summary``."""
        return {"summary": self._sync()}


def unchangeable(reason: str) -> Setting:
    """Return a setting whose reading raises ``RLWatchError`` with ``reason``, for a setting that cannot be changed."""

    def refuse() -> Values:
        raise RLWatchError(reason)

    return Setting(refuse, lambda _values: None)
