"""Commands that scale the learning rate of a live run (``lower-lr``, ``raise-lr``), so that its schedule does not undo
it.
"""

from __future__ import annotations

import copy
import math
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.control.policy import veto_raise_lr
from rlwatch.error_boundary import Contained, ErrorBoundary, Reported
from rlwatch.errors import RLWatchError
from rlwatch.integrations.weights import inner_optimizer, inner_scheduler
from rlwatch.records import JSON, Command

SCALE, UNTIL, FIXED = "rlwatch_lr_scale", "rlwatch_lr_until", "rlwatch_lr_fixed"
"""Keys in the optimizer's parameter groups under which commands store their effect, so that checkpoints include it.

They are the scale of the schedule's rate, the step until which it applies (0: permanently), and the learning rate while
the schedule is frozen (otherwise absent).
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """Effect of commands on the learning rate: the scale, the step until which it applies (0: permanently), and the
    frozen rate of each parameter group (None: the schedule is not frozen).
    """

    scale: float
    until: int
    fixed: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Paced:
    """Optimizers and their learning-rate schedulers.

    Without schedulers the training loop sets the rate itself, or never.
    """

    optimizers: Sequence[Any]
    schedulers: Sequence[Any] = field(default=())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in inner_optimizer(optimizer).param_groups]

    @property
    def scale(self) -> float:
        """Return the multiple of the schedule's learning rate that commands have set, 1 without a command."""
        return float(self.groups[0].get(SCALE, 1.0)) if self.groups else 1.0

    @property
    def until(self) -> int:
        """Return the step from which the schedule applies again unscaled; 0 if a command did not limit it."""
        return int(self.groups[0].get(UNTIL, 0)) if self.groups else 0

    @property
    def scheduled(self) -> bool:
        """Return True if a scheduler sets the learning rate."""
        return any(scheduler is not None for scheduler in self.schedulers)

    @property
    def frozen(self) -> bool:
        """Return True while a command has frozen the learning rate, so that all steps use the same rate."""
        return any(FIXED in group for group in self.groups)

    @property
    def pace(self) -> Pace:
        """Return the current effect of commands on the learning rate."""
        return Pace(self.scale, self.until, tuple(group.get(FIXED) for group in self.groups))

    def resume(self, pace: Pace) -> None:
        """Restore ``pace``, the effect that commands had on the learning rate at an earlier time."""
        self.rescale(pace.scale, pace.until)
        for group, fixed in zip(self.groups, pace.fixed, strict=False):
            if fixed is not None:
                group[FIXED] = fixed

    def rescale(self, scale: float, until: int, *, freeze: bool = False) -> None:
        """Set the learning rate to ``scale`` times the schedule's, in place of an earlier scale, until a step (0:
        permanently).

        ``freeze``: keep the rate constant at ``scale`` times the schedule's rate of now, or times the rate at which it
        is frozen already.
        """
        factor = scale / self.scale if self.groups else 1.0
        if self.scheduled and factor != 1.0:
            scale_groups(self.groups, factor)
            for scheduler in self.schedulers:
                scale_scheduler(scheduler, factor)
        for group in self.groups:
            fixed = group.pop(FIXED, None)
            if freeze:
                now = float(group["lr"]) * (1.0 if self.scheduled else scale)
                group[FIXED] = now if fixed is None else fixed * factor
            if group.get(SCALE, 1.0) != scale or group.get(UNTIL, 0) != until:
                group[SCALE], group[UNTIL] = scale, until


class LowerLR:
    """Handler of the command ``lower-lr`` with ``{"scale": s, "until": step or None, "freeze": "yes" | "no"}``, 0 < s
    <= 1.

    The learning rate becomes ``scale`` times the rate of the schedule, not of an earlier command: a second command
    replaces the first, and a scale of 1 restores the schedule. With schedulers, the quantities that they compute from
    are scaled. Without, the rate is scaled around every step of the optimizer, so that rates set by the loop itself are
    scaled, too. ``find`` returns the current optimizers and schedulers.
    """

    kind: str = "lower-lr"

    def __init__(self, find: Callable[[], Paced], error_boundary: ErrorBoundary | None = None) -> None:
        self._find = find
        self._error_boundary = error_boundary or ErrorBoundary()
        self._stepwise: list[StepScale] = []

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is no learning rate to lower, or if a scheduler would undo the change."""
        COMMAND_KINDS[self.kind].read(command.args)
        paced = self._find()
        if not paced.optimizers or not paced.groups:
            raise RLWatchError("there is no optimizer whose learning rate could be lowered")
        for scheduler in paced.schedulers:
            if scheduler is not None and not proportional(scheduler):
                name = type(inner_scheduler(scheduler)).__name__
                raise RLWatchError(f"the schedule {name} would not follow: its rates are not proportional to base_lrs")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Scale the learning rate.

        Return a report with the rate ``before`` and ``after``, and the command that reverts it.
        """
        args = COMMAND_KINDS[self.kind].read(command.args)
        until = args["until"]
        until = until if isinstance(until, int) else None
        return self.rescaled(float(args["scale"]), until, freeze=args["freeze"] == "yes")

    def rescaled(self, scale: float, until: int | None, *, freeze: bool = False) -> Mapping[str, JSON]:
        """Set the learning rate to ``scale`` times the schedule's, until the step ``until`` (None: permanently).

        ``freeze``: keep the rate constant from now on. Returns a report with the rate ``before`` and ``after``, and the
        command that reverts the change.
        """
        paced = self._find()
        before, old, was_frozen = self._rate(paced), paced.pace, paced.frozen
        paced.rescale(scale, until or 0, freeze=freeze)
        self._follow(paced)
        lasts = f" until step {paced.until}" if paced.until else ""
        lasts += ", frozen" if freeze else ""
        summary = f"learning rate {before:.3g} -> {self._rate(paced):.3g}, {scale:g} of the schedule{lasts}"
        scale_before = old.scale
        back: dict[str, JSON] = {"scale": scale_before}
        if scale_before <= 1.0:
            back |= {"until": old.until or None, "freeze": "yes" if was_frozen else "no"}
        return {
            "before": before,
            "after": self._rate(paced),
            "scale": scale,
            "until": until,
            "summary": summary,
            "undo": {"kind": self.kind if scale_before <= 1.0 else RaiseLR.kind, "args": back},
        }

    def due(self, step: int) -> Command | None:
        """Return the command that restores the schedule if its limit is at or before ``step``, else None."""
        paced = self._find()
        if not paced.optimizers or not paced.groups:
            return None
        self._follow(paced)
        if not 0 < paced.until <= step:
            return None
        why = f"lowered until step {paced.until}"
        return Command(uuid.uuid4().hex[:16], "", self.kind, {"scale": 1.0}, requested_by="rlwatch", why=why)

    def _follow(self, paced: Paced) -> None:
        """Scale around every step if there is no scheduler; the scale may come from a checkpoint."""
        inner = [inner_optimizer(optimizer) for optimizer in paced.optimizers]
        followed = [hook.optimizer for hook in self._stepwise] == inner
        if followed or (not paced.frozen and (paced.scheduled or paced.scale == 1.0)):
            return
        for hook in self._stepwise:
            hook.remove()
        self._stepwise = [StepScale(optimizer, self._error_boundary, scheduled=paced.scheduled) for optimizer in inner]

    def _rate(self, paced: Paced) -> float:
        """Return the first group's rate for the next step."""
        return float(stepped(paced.groups[0], scheduled=paced.scheduled))


class RaiseLR:
    """Handler of the command ``raise-lr`` with ``{"scale": s}``, 0 < s <= 10: multiply the schedule's learning rate by
    s.

    It replaces the multiple that ``lower-lr`` set, by the same mechanism (``lower``). ``error_boundary`` is the error
    boundary that leads to the run's health, for the veto during a collapse.
    """

    kind: str = "raise-lr"

    def __init__(self, lower: LowerLR, error_boundary: ErrorBoundary) -> None:
        self._lower = lower
        self._error_boundary = error_boundary

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if the learning rate cannot be changed, or during a collapse unless ``command`` is
        forced.
        """
        scale = COMMAND_KINDS[self.kind].read(command.args)["scale"]
        self._lower.check(replace(command, args={"scale": min(float(scale), 1.0)}))
        run = self._error_boundary.run
        veto = None if run is None else veto_raise_lr(run.health(), force=command.force)
        if veto is not None:
            raise RLWatchError(veto)

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Scale the learning rate.

        Return a report with the rate ``before`` and ``after``, and the command that reverts it.
        """
        return self._lower.rescaled(float(COMMAND_KINDS[self.kind].read(command.args)["scale"]), None)


# Scaling the rates of a learning-rate schedule by scaling the quantities from which it computes them.
#
# Schedulers of torch compute the rate at every step from the initial rates (``LambdaLR``), or from the last rate and a
# floor (``CosineAnnealingLR``). The rate is proportional to those quantities: if all are scaled by the same factor, all
# later rates are scaled by it, in the scheduler's own log and in checkpoints of its state, too.

IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
"""Keys of learning rates that an optimizer's parameter group may hold."""
IN_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min", "default_min_lr", "eps")
"""Attributes of a scheduler that may be learning rates; ``eps`` is the smallest change that ``ReduceLROnPlateau``
makes.
"""
KNOWN = ("torch.optim.lr_scheduler", "transformers.optimization")
"""Modules whose schedulers are known to compute rates proportional to their inputs."""


def scale_groups(groups: Iterable[dict[str, Any]], factor: float) -> None:
    """Multiply the learning rates in an optimizer's parameter ``groups`` by ``factor``, in place."""
    for group in groups:
        for name in IN_GROUPS:
            value = group.get(name)
            if isinstance(value, Tensor):  # a captured or compiled step reads this tensor object
                value.mul_(factor)
            elif value is not None:
                group[name] = value * factor


def scale_scheduler(scheduler: Any, factor: float) -> None:
    """Multiply the learning rates in ``scheduler`` and its inner schedulers by ``factor``, in place."""
    for part in _parts(scheduler):
        for name in IN_SCHEDULERS:
            if getattr(part, name, None) is not None:
                setattr(part, name, _scaled(getattr(part, name), factor))


def proportional(scheduler: Any) -> bool:
    """Return True if scaling the inputs of ``scheduler`` scales its learning rates by the same factor.

    Schedulers of torch and transformers do. For others the rates of a copy are compared before and after.
    """
    return all(type(part).__module__ in KNOWN or _follows(part) for part in _parts(scheduler))


def _parts(scheduler: Any) -> Iterator[Any]:
    scheduler = inner_scheduler(scheduler)
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _scaled(value: Any, factor: float) -> Any:
    """Return a scaled new object, because schedulers share objects with the optimizer and each other."""
    return [one * factor for one in value] if isinstance(value, list | tuple) else value * factor


def _follows(scheduler: Any) -> bool:
    """Test a deep copy. A scheduler that raises counts as not proportional."""
    with Contained(lambda _error: None):
        before, after = _rates(scheduler, 1.0), _rates(scheduler, 0.5)
        return all(math.isclose(b, 2 * a, rel_tol=1e-6) for b, a in zip(before, after, strict=True))
    return False


def _rates(scheduler: Any, factor: float) -> list[float]:
    trial = copy.copy(scheduler)
    groups = [
        {k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in scheduler.optimizer.param_groups
    ]
    trial.optimizer = SimpleNamespace(param_groups=groups)
    for name in IN_SCHEDULERS:
        if hasattr(trial, name):
            setattr(trial, name, copy.deepcopy(getattr(trial, name)))
    scale_groups(groups, factor)
    scale_scheduler(trial, factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [float(rate) for rate in trial.get_lr()]


# A learning rate scaled around every step of an optimizer, for loops that set it by hand.


def stepped(group: Mapping[str, Any], *, scheduled: bool) -> Any:
    """Return the learning rate that the optimizer uses for ``group``, a parameter group.

    It is the frozen rate if there is one, else the group's rate, which a schedule has scaled already (``scheduled``) or
    which is scaled here.
    """
    if FIXED in group:
        return group[FIXED]
    return group["lr"] if scheduled else group["lr"] * group.get(SCALE, 1.0)


class StepScale:
    """Hooks that set the commanded learning rate of each parameter group while the optimizer steps, and restore its own
    rate afterwards.

    Code that sets or reads the rate between steps sees no difference. If the rate cannot be scaled, the step uses the
    loop's own rate, and ``error_boundary`` (the error boundary) reports the error. ``scheduled`` is True if a scheduler
    sets the rate.
    """

    def __init__(self, optimizer: Optimizer, error_boundary: ErrorBoundary, *, scheduled: bool) -> None:
        self.optimizer = optimizer
        self._scheduled = scheduled
        self._set: list[tuple[dict[str, Any], Any]] = []
        before = optimizer.register_step_pre_hook(error_boundary.hook("learning rate", lambda *_: self._scale()))
        after = optimizer.register_step_post_hook(
            error_boundary.hook("learning rate of before", lambda *_: self._restore())
        )
        self._hooks = (before, after)

    def remove(self) -> None:
        """Restore the optimizer's own learning rates and remove the hooks."""
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def _scale(self) -> None:
        self._restore()  # a step that raised did not restore them
        with Reported(lambda _: self._restore()):  # all groups or none
            for group in self.optimizer.param_groups:
                if FIXED in group or (not self._scheduled and group.get(SCALE, 1.0) != 1.0):
                    self._set.append((group, group["lr"]))
                    group["lr"] = stepped(group, scheduled=self._scheduled)

    def _restore(self) -> None:
        while self._set:
            group, rate = self._set.pop()
            group["lr"] = rate
