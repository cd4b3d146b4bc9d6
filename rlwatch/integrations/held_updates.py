"""Batches and updates that change nothing: ``hold`` and ``skip-step``.

Both drop the gradients when an optimizer begins its step. Optimizers of torch leave a parameter without a gradient
alone, its moments and its weight decay included: so weights and optimizer stay as they are, bit for bit, and nothing
has to be restored afterwards. The trainer samples, measures, logs and counts its steps as ever.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.weights import inner_optimizer, sharded
from rlwatch.records import JSON, Command
from rlwatch.wording import number, plural

REWARD = "reward/mean"
NO_OPTIMIZER = "there is no optimizer whose step could be left out"
NONFINITE = "nonfinite"
FEW = 3
"""Rewards at the beginning and at the end of a hold in its answer; the event has all of them."""


class GradientDrop:
    """Drops the gradients of optimizers at the beginning of their steps if ``wanted`` returns True."""

    def __init__(self, seam: ErrorBoundary, what: str, wanted: Callable[[Optimizer], bool]) -> None:
        self._seam = seam
        self._what = what
        self._wanted = wanted
        self._hooks: list[Any] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Start dropping gradients."""
        self.end()
        hook = self._seam.hook(self._what, lambda optimizer, *_: self._look(optimizer))
        self._hooks = [optimizer.register_step_pre_hook(hook) for optimizer in optimizers]

    def end(self) -> None:
        """Let the optimizers step again."""
        while self._hooks:
            self._hooks.pop().remove()

    def _look(self, optimizer: Optimizer) -> None:
        if self._wanted(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def steppable(optimizers: Sequence[Any]) -> list[Optimizer]:
    """Return the torch optimizers inside wrappers. Raises ``RLWatchError`` if there is none, or one is another's."""
    inner = [inner_optimizer(one) for one in optimizers]
    if not inner:
        raise RLWatchError(NO_OPTIMIZER)
    for one in inner:
        if not isinstance(one, Optimizer):
            kind = f"{type(one).__module__}.{type(one).__name__}"
            raise RLWatchError(f"the optimizer is a {kind}, whose steps rlwatch cannot leave out")
    return inner


class Hold:
    """Handles ``hold`` with ``{"batches": n}``; 0 ends it.

    A batch is what is sampled between two boundaries. At its end the answer's event holds the reward of each:
    if it comes back with restored weights, the fault was in the policy; if not, it lies outside.

    Parameters
    ----------
    find
        The optimizers now.
    step
        The step that has ended.
    latest
        The metrics measured last.
    """

    kind: str = "hold"

    def __init__(
        self,
        find: Callable[[], Sequence[Any]],
        seam: ErrorBoundary,
        step: Callable[[], int],
        latest: Callable[[], Mapping[str, float]],
    ) -> None:
        self._find = find
        self._step = step
        self._latest = latest
        self._drop = GradientDrop(seam, "hold", lambda _optimizer: True)
        self._batches = 0
        self._boundary = 0
        self._seen = 0
        self._rewards: list[float] = []

    def check(self, command: Command) -> None:
        """Refuse if no optimizer can be held, or an end if nothing is held."""
        batches = COMMAND_KINDS[self.kind].read(command.args)["batches"]
        steppable(self._find())
        if not batches and not self._batches:
            raise RLWatchError("no batch is held")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin, or end."""
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
        """Return the command that ends the hold, once its batches were sampled."""
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


class SkipStep:
    """Handles ``skip-step`` with ``{"steps": n, "when": "always" | "nonfinite"}``; 0 steps end it."""

    kind: str = "skip-step"

    def __init__(self, find: Callable[[], Sequence[Any]], seam: ErrorBoundary) -> None:
        self._find = find
        self._drop = GradientDrop(seam, "updates that are left out", self._wanted)
        self._first: Optimizer | None = None
        self._left = self._skipped = self._seen = 0
        self._active = False
        self._when = ""

    def check(self, command: Command) -> None:
        """Refuse if no step can be skipped, or an end if none is."""
        args, optimizers = COMMAND_KINDS[self.kind].read(command.args), steppable(self._find())
        if not args["steps"] and not self._active:
            raise RLWatchError("no update is left out")
        cut = any(
            sharded(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]
        )
        if args["when"] == NONFINITE and cut:
            raise RLWatchError("gradients are sharded over ranks, and one rank alone does not know if they are finite")

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin, or end."""
        args = COMMAND_KINDS[self.kind].read(command.args)
        if not args["steps"]:
            return self._ended()
        optimizers = steppable(self._find())
        self._first, self._when = optimizers[0], str(args["when"])
        self._left, self._skipped, self._seen, self._active = int(args["steps"]), 0, 0, True
        self._drop.begin(optimizers)
        which = " if their gradient is not finite" if self._when == NONFINITE else ""
        summary = f"{plural(self._left, 'update')} from now on are left out{which}"
        return {**args, "summary": summary, "undo": {"kind": self.kind, "args": {"steps": 0}}}

    def due(self, step: int) -> Command | None:  # noqa: ARG002  (the signature of the port)
        """Return the command that ends the skipping, once its updates are over."""
        if not self._active or self._left > 0:
            return None
        why = f"{plural(self._seen, 'update')} are over"
        return Command(uuid.uuid4().hex[:16], "", self.kind, {"steps": 0}, requested_by="rlwatch", why=why)

    def _wanted(self, optimizer: Optimizer) -> bool:
        if optimizer is self._first:
            self._left -= 1
            self._seen += self._left >= 0
        if self._left < 0:
            return False
        skips = self._when != NONFINITE or not _finite(optimizer)
        self._skipped += skips and optimizer is self._first
        return skips

    def _ended(self) -> Mapping[str, JSON]:
        self._drop.end()
        skipped, seen, self._active, self._first = self._skipped, self._seen, False, None
        summary = f"{skipped} of {plural(seen, 'update')} were left out; updates go on"
        return {"skipped": skipped, "of": seen, "summary": summary}


def _finite(optimizer: Optimizer) -> bool:
    """Return whether all gradients are finite; it waits once for each device."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    finite: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        finite.setdefault(gradient.device, []).append(gradient.detach().isfinite().all())
    return all(bool(torch.stack(part).all()) for part in finite.values())
