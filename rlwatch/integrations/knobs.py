"""Knobs that a trainer holds: the rates its optimizer steps with, and settings that its log does not tell.

A trainer logs the rate of its scheduler, and of most settings nothing after the start. What is read here is what the
update is made with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlwatch.integrations.learning_rate import FIXED
from rlwatch.integrations.weights import inner_optimizer
from rlwatch.records import JSON

SETTING = "setting"
"""Kind of the event that says a setting changed while the run went on: ``option``, ``before``, ``after``."""
MOST_CHANGES = 20
"""Changes told of one setting: one that changes at every step has said enough."""
LONGEST = 100
"""Characters of a value that is no number."""


def rates(optimizer: Any) -> dict[str, float]:
    """Learning rates that the optimizer would step with now: of its first parameter group, and the largest of several.

    A rate that is a tensor on a device is left out: reading it would wait for the device.
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
    """Settings of a trainer, looked at step by step.

    Parameters
    ----------
    numbers
        Metric -> reads its value now, or None where the trainer has none: recorded at every step.
    options
        Option -> reads its value now: recorded when it changes.
    """

    def __init__(
        self, numbers: Mapping[str, Callable[[], Any]], options: Mapping[str, Callable[[], Any]] | None = None
    ) -> None:
        self._numbers = numbers
        self._options = dict(options or {})
        self._known: dict[str, JSON] = {}
        self._told: dict[str, int] = {}

    def values(self) -> dict[str, float]:
        """The numbers as they are."""
        read = {metric: value() for metric, value in self._numbers.items()}
        return {metric: float(value) for metric, value in read.items() if value is not None and not _on_device(value)}

    def changes(self) -> list[dict[str, JSON]]:
        """Options that changed since the last look, each as the body of an event; none at the first."""
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
    """A value that a file can hold; a long one by its beginning."""
    if isinstance(value, Tensor):
        value = "on a device" if _on_device(value) or value.numel() > MOST_CHANGES else value.tolist()
    return value if isinstance(value, bool | int | float) else str(value)[:LONGEST]


def attributes(owner: Any, names: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    """Readers of the attributes of ``owner`` that it has: name under which each is told -> attribute."""
    return {told: _reader(owner, name) for told, name in names.items() if hasattr(owner, name)}


def _reader(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(owner, name, None)
