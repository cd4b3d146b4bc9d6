"""Lowering the learning rate of a live run, in a way its schedule does not undo."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.schedule import proportional, scale_groups, scale_scheduler
from rlwatch.integrations.handlers.stepwise import StepScale
from rlwatch.integrations.handlers.unwrapping import inner_optimizer, inner_scheduler
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam

SCALE, UNTIL = "rlwatch_lr_scale", "rlwatch_lr_until"
"""Kept in the optimizer's parameter groups, so that they travel with its checkpoints. ``until`` 0: for good."""


@dataclass(frozen=True, slots=True)
class Paced:
    """Optimizers and the schedulers of their learning rates (none: the loop sets it by hand, or never)."""

    optimizers: Sequence[Any]
    schedulers: Sequence[Any] = field(default=())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All parameter groups."""
        return [group for optimizer in self.optimizers for group in inner_optimizer(optimizer).param_groups]

    @property
    def scale(self) -> float:
        """What the learning rate is scaled by now."""
        return float(self.groups[0].get(SCALE, 1.0))

    @property
    def until(self) -> int:
        """The step from which the schedule rules again; 0 for none."""
        return int(self.groups[0].get(UNTIL, 0))

    @property
    def scheduled(self) -> bool:
        """Whether a scheduler sets the rate."""
        return any(scheduler is not None for scheduler in self.schedulers)


class LowerLR:
    """Handles ``lower-lr`` with ``{"scale": 0 < s <= 1, "until": step or None}``.

    The learning rate becomes ``scale`` times what the schedule says, not what an earlier command made of it: a
    second command replaces the first, and a scale of 1 gives the rate back to the schedule. With schedulers, the
    quantities they compute from are scaled. Without, the rate is scaled around every step of the optimizer, so
    that a loop that sets it by hand is heeded too.
    """

    kind: str = "lower-lr"

    def __init__(self, find: Callable[[], Paced], seam: Seam | None = None) -> None:
        self._find = find
        self._seam = seam or Seam()
        self._stepwise: list[StepScale] = []

    def check(self, command: Command) -> None:
        """Refuse where there is no rate to lower, or no way to lower it that lasts."""
        COMMAND_KINDS[self.kind].read(command.args)
        paced = self._find()
        if not paced.optimizers or not paced.groups:
            raise RLWatchError("there is no optimizer whose learning rate could be lowered")
        for scheduler in paced.schedulers:
            if scheduler is not None and not proportional(scheduler):
                name = type(inner_scheduler(scheduler)).__name__
                raise RLWatchError(f"the schedule {name} would not follow: its rates are not proportional to base_lrs")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Scale; returns the rates before and after."""
        args, paced = COMMAND_KINDS[self.kind].read(command.args), self._find()
        before, scale = self._rate(paced), float(args["scale"])
        self._apply(paced, scale / paced.scale)
        for group in paced.groups:
            group[SCALE], group[UNTIL] = scale, int(args["until"] or 0)
        self._follow(paced)
        lasts = f" until step {paced.until}" if paced.until else ""
        summary = f"learning rate {before:.3g} -> {self._rate(paced):.3g}, {scale:g} of the schedule{lasts}"
        return {
            "before": before,
            "after": self._rate(paced),
            "scale": scale,
            "until": args["until"],
            "summary": summary,
        }

    def due(self, step: int) -> Command | None:
        """The command that gives the rate back to the schedule, if it is time to."""
        paced = self._find()
        if not paced.optimizers or not paced.groups:
            return None
        self._follow(paced)
        if not 0 < paced.until <= step:
            return None
        why = f"lowered until step {paced.until}"
        return Command(uuid.uuid4().hex[:16], "", self.kind, {"scale": 1.0}, requested_by="rlwatch", why=why)

    @staticmethod
    def _apply(paced: Paced, factor: float) -> None:
        if paced.scheduled and factor != 1.0:
            scale_groups(paced.groups, factor)
            for scheduler in paced.schedulers:
                scale_scheduler(scheduler, factor)

    def _follow(self, paced: Paced) -> None:
        """Without a scheduler, scale around every step; a checkpoint may have brought a scale along."""
        inner = [inner_optimizer(optimizer) for optimizer in paced.optimizers]
        followed = [hook.optimizer for hook in self._stepwise] == inner
        if paced.scheduled or followed or paced.scale == 1.0:
            return
        for hook in self._stepwise:
            hook.remove()
        self._stepwise = [StepScale(optimizer, SCALE, self._seam) for optimizer in inner]

    def _rate(self, paced: Paced) -> float:
        """The first group's rate, as the next step will use it."""
        rate = float(paced.groups[0]["lr"])
        return rate if paced.scheduled else rate * paced.scale
