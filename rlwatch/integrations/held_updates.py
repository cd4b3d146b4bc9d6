"""Commands that let a trainer step without changing the weights: ``hold`` and ``skip-step``.

Handlers of these commands drop the gradients when an optimizer begins its step. An optimizer of torch does not touch a
parameter without a gradient, and applies no weight decay to it. So weights and optimizer state stay as they are, bit
for bit, and nothing has to be restored afterwards. The trainer samples, measures, logs and counts its steps as before.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from rlwatch.control.commands import COMMAND_KINDS, NONFINITE, SKIP_STEP
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.weights import inner_optimizer, sharded
from rlwatch.records import JSON, Command
from rlwatch.wording import number, plural

REWARD = "reward/mean"
NO_OPTIMIZER = "there is no optimizer whose step could be left out"
FEW = 3
"""Number of rewards at the beginning and at the end of a hold that the answer to its command shows; the event has
all.
"""


class GradientDrop:
    """Hook that drops the gradients of optimizers at the beginning of a step, so that the step changes nothing.

    ``error_boundary`` is the error boundary around the hook, ``what`` names the hook in error messages. ``wanted``
    receives an optimizer at its step and returns True if its gradients are to be dropped.
    """

    def __init__(self, error_boundary: ErrorBoundary, what: str, wanted: Callable[[Optimizer], bool]) -> None:
        self._error_boundary = error_boundary
        self._what = what
        self._wanted = wanted
        self._hooks: list[Any] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Install the hook on ``optimizers``, in place of hooks installed before."""
        self.end()
        hook = self._error_boundary.hook(self._what, lambda optimizer, *_: self._look(optimizer))
        self._hooks = [optimizer.register_step_pre_hook(hook) for optimizer in optimizers]

    def end(self) -> None:
        """Remove the hook, so that the optimizers change the weights again."""
        while self._hooks:
            self._hooks.pop().remove()

    def _look(self, optimizer: Optimizer) -> None:
        if self._wanted(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def steppable(optimizers: Sequence[Any]) -> list[Optimizer]:
    """Return the torch optimizers inside the wrappers in ``optimizers``.

    Raises ``RLWatchError`` if there is none, or if one is not a ``torch.optim.Optimizer``.
    """
    inner = [inner_optimizer(one) for one in optimizers]
    if not inner:
        raise RLWatchError(NO_OPTIMIZER)
    for one in inner:
        if not isinstance(one, Optimizer):
            kind = f"{type(one).__module__}.{type(one).__name__}"
            raise RLWatchError(f"the optimizer is a {kind}, whose steps rlwatch cannot leave out")
    return inner


class HoldUpdates:
    """Handler of the command ``hold``: sample a number of batches with unchanged weights.

    Its argument is ``{"batches": n}``; 0 ends a hold. A batch is what is sampled between two safe boundaries. At the
    end the event of the command holds the mean reward of each batch. If rewards recover after weights were restored,
    the fault was in the policy. If they do not, the fault lies outside it.

    Parameters
    ----------
    find
        Returns the current optimizers.
    error_boundary
        Error boundary around the hook that drops gradients.
    step
        Returns the number of the optimizer step that has ended.
    latest
        Returns the metrics measured last, by canonical name; ``reward/mean`` is read.
    """

    kind: str = "hold"

    def __init__(
        self,
        find: Callable[[], Sequence[Any]],
        error_boundary: ErrorBoundary,
        step: Callable[[], int],
        latest: Callable[[], Mapping[str, float]],
    ) -> None:
        self._find = find
        self._step = step
        self._latest = latest
        self._drop = GradientDrop(error_boundary, "hold", lambda _optimizer: True)
        self._batches = 0
        self._boundary = 0
        self._seen = 0
        self._rewards: list[float] = []

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if an optimizer cannot be held, or if ``command`` ends a hold and none is active."""
        batches = COMMAND_KINDS[self.kind].read(command.args)["batches"]
        steppable(self._find())
        if not batches and not self._batches:
            raise RLWatchError("no batch is held")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin a hold, or end it if ``command`` asks for 0 batches. Returns the report with a ``summary``."""
        batches = int(COMMAND_KINDS[self.kind].read(command.args)["batches"])
        if not batches:
            return self._ended()
        self._drop.begin(steppable(self._find()))
        self._batches, self._seen, self._boundary, self._rewards = batches, 0, self._step(), []
        summary = (
            f"{plural(batches, 'batch', 'batches')} are sampled with the weights as they are, and nothing is updated"
        )
        return {"batches": batches, "summary": summary, "undo": {"kind": self.kind, "args": {"batches": 0}}}

    def due(self, step: int) -> Command | None:
        """Return the command that ends the hold if its batches were sampled by ``step``, else None.

        Call it at each boundary (point of training at which commands may be executed).
        """
        if not self._batches or step == self._boundary:
            return None
        self._seen, self._boundary = self._seen + 1, step
        reward = self._latest().get(REWARD)
        self._rewards += [] if reward is None else [reward]
        if self._seen < self._batches:
            return None
        why = f"{plural(self._seen, 'batch', 'batches')} were sampled"
        return Command(uuid.uuid4().hex[:16], "", self.kind, {"batches": 0}, requested_by="rlwatch", why=why)

    def _ended(self) -> Mapping[str, JSON]:
        self._drop.end()
        seen, rewards = self._seen, list(self._rewards)
        self._batches = 0
        shown = [number(one) for one in rewards]
        shown = [*shown[:FEW], "...", *shown[-FEW:]] if len(shown) > 2 * FEW else shown
        outcome = f"; reward {', '.join(shown)}" if rewards else "; no reward was measured"
        summary = f"updates go on after {plural(seen, 'held batch', 'held batches')}{outcome}"
        return {"batches": seen, "rewards": list[JSON](rewards), "summary": summary}


@dataclass(slots=True)
class Skipping:
    """Updates that are left out under one condition: how many are still ``left`` to look at, and how many were ``seen``
    and ``skipped``.
    """

    left: int
    seen: int = 0
    skipped: int = 0


class SkipStep:
    """Handler of the command ``skip-step`` with ``{"steps": n, "when": "always" | "nonfinite"}``: leave out the next n
    updates.

    With ``nonfinite`` only updates whose gradient is not finite are left out. Both conditions can be in force at once.
    A command with 0 steps ends the condition that it names, or the other one if only that is in force.
    """

    kind: str = SKIP_STEP

    def __init__(self, find: Callable[[], Sequence[Any]], error_boundary: ErrorBoundary) -> None:
        self._find = find
        self._drop = GradientDrop(error_boundary, "updates that are left out", self._wanted)
        self._first: Optimizer | None = None
        self._now: dict[str, Skipping] = {}
        self.skipped = 0
        """Updates that were left out so far because their gradient was not finite."""

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if an optimizer's step cannot be left out, or if ``command`` ends the skipping and
        none is active.
        """
        args = COMMAND_KINDS[self.kind].read(command.args)
        steppable(self._find())
        if not args["steps"] and not self._now:
            raise RLWatchError("no update is left out")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin to skip steps, or end it if ``command`` asks for 0 steps. Returns the report with a ``summary``."""
        args = COMMAND_KINDS[self.kind].read(command.args)
        steps, when = int(args["steps"]), str(args["when"])
        if not steps:
            return self._ended(when)
        optimizers = steppable(self._find())
        self._first, self._now[when] = optimizers[0], Skipping(steps)
        self._drop.begin(optimizers)
        which = " if their gradient is not finite" if when == NONFINITE else ""
        summary = f"{plural(steps, 'update')} from now on are left out{which}"
        return {**args, "summary": summary, "undo": {"kind": self.kind, "args": {"steps": 0, "when": when}}}

    def due(self, step: int) -> Command | None:  # noqa: ARG002  (the signature of the port)
        """Return the command that ends the skipping once its updates are over, else None."""
        over = next((when for when, skipping in self._now.items() if skipping.left <= 0), None)
        if over is None:
            return None
        why = f"{plural(self._now[over].seen, 'update')} are over"
        args: dict[str, JSON] = {"steps": 0, "when": over}
        return Command(uuid.uuid4().hex[:16], "", self.kind, args, requested_by="rlwatch", why=why)

    def _wanted(self, optimizer: Optimizer) -> bool:
        skips = [self._one(when, skipping, optimizer) for when, skipping in self._now.items()]
        return any(skips)

    def _one(self, when: str, skipping: Skipping, optimizer: Optimizer) -> bool:
        first = optimizer is self._first
        if first:
            skipping.left -= 1
            skipping.seen += skipping.left >= 0
        if skipping.left < 0:
            return False
        skips = when != NONFINITE or not finite_on_all_ranks(optimizer)
        skipping.skipped += skips and first
        self.skipped += skips and first and when == NONFINITE
        return skips

    def _ended(self, when: str) -> Mapping[str, JSON]:
        when = when if when in self._now else next(iter(self._now))
        skipping = self._now.pop(when)
        if not self._now:
            self._drop.end()
            self._first = None
        summary = f"{skipping.skipped} of {plural(skipping.seen, 'update')} were left out; updates go on"
        return {"skipped": skipping.skipped, "of": skipping.seen, "summary": summary}


def finite_on_all_ranks(optimizer: Optimizer) -> bool:
    """Return whether all gradients are finite; it waits once for each device.

    Where gradients are sharded, a rank sees only its part, so all ranks exchange one flag: each of them must call this
    at the same step. Elsewhere every rank has the same gradients, and none is asked.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    cut = any(sharded(p) for group in optimizer.param_groups for p in group["params"])
    if not cut or not dist.is_initialized() or dist.get_world_size() < 2:
        return _finite(gradients)
    try:
        own = _finite([gradient.to_local() if sharded(gradient) else gradient for gradient in gradients])
    except RuntimeError:
        own = False  # the others wait for the flag
    device = next((g.device for g in gradients), optimizer.param_groups[0]["params"][0].device)
    flag = torch.tensor([1.0 if own else 0.0], device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item() > 0)


def _finite(gradients: Sequence[Tensor]) -> bool:
    finite: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        finite.setdefault(gradient.device, []).append(gradient.detach().isfinite().all())
    return all(bool(torch.stack(part).all()) for part in finite.values())
