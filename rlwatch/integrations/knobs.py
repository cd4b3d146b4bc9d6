"""Learning rates of a trainer's optimizer, and settings that the trainer does not log.

A trainer logs the learning rate of its scheduler, and most settings only at the start. This module reads the values
that the update uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlwatch.integrations.learning_rate import FIXED
from rlwatch.integrations.weights import inner_optimizer
from rlwatch.records import JSON

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
        self._told: dict[str, int] = {}

    def values(self) -> dict[str, float]:
        """Return the current values of the numeric settings, by metric name. Unknown ones and tensors on a device are
        left out.
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
            if before != value and self._told.get(option, 0) < MOST_CHANGES:
                self._told[option] = self._told.get(option, 0) + 1
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
