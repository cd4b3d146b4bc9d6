"""From a spike of the gradient to a record of the tokens that did it, between the backward and the optimizer's step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.clipping.skip import skip_step
from rlwatch.errors import RLWatchError
from rlwatch.gradloc.distributed import Alone, World
from rlwatch.gradloc.locate import Located, LocateOptions, locate
from rlwatch.gradloc.passes import LossPass, Passes
from rlwatch.gradloc.recording import Context, save_recording
from rlwatch.gradloc.trigger import Budget, Trigger, TriggerDecision
from rlwatch.integrations.localising.recording import Recorded, record
from rlwatch.integrations.localising.settings import Localise
from rlwatch.integrations.localising.usual import UsualShares
from rlwatch.integrations.spike_rows import Decode
from rlwatch.seam import Seam
from rlwatch.tensors.gradnorm import grad_norms
from rlwatch.tensors.transfer import Transfer

OVERFLOWS = 16
"""Overflows in a row from which they no longer are the search for a loss scale: each halves it."""

NO_MORE = "this rank or another one failed or is gone, so spikes are localised no more"


@dataclass(frozen=True, slots=True)
class Spike:
    """The step in question: its gradient is in ``model``, complete, and not used yet.

    ``norm`` is its norm before clipping and without any loss scale, where it is known. ``scale`` is the loss scale of
    float16: the coefficients carry it, and the gradients still ``left`` of it; None where there is none.
    """

    model: nn.Module
    step: int
    norm: Tensor | float | None = None
    scale: float | None = None
    left: float = 1.0


class Localiser:
    """Keeps the loss passes of the step under way, and localises its gradient if that spiked.

    A step costs one wait for the device, for the norm; a localised one what :class:`Localise` allows. With several
    ranks every rank makes one and calls :meth:`check` at the same steps; a rank that fails leaves for good, and the
    others with it.

    ``rewards`` fills in the rewards of the passes of a step that is to be localised, and ``contexts`` says what their
    forwards read, if somebody knows; ``autocast`` is the type they computed in, if not that of the weights.
    """

    def __init__(
        self,
        seam: Seam,
        settings: Localise,
        *,
        decode: Decode | None = None,
        world: World | None = None,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.passes = Passes(seam)
        self.usual = UsualShares()
        self.rewards: Callable[[list[LossPass]], None] | None = None
        self.contexts: Callable[[], Sequence[Context]] | None = None
        self.autocast = ""
        self._seam = seam
        self._settings = settings
        self._decode = decode
        self._world: World | None = world or Alone()
        self._seconds = seconds
        self._trigger = Trigger(token_threshold=settings.threshold)
        self._budget = Budget(share=settings.share, allowance_s=settings.allowance_s)
        self._took = 0.0
        self._overflows = 0
        self._culprit: nn.Module | None = None

    def check(self, spike: Spike) -> Located | None:
        """Look at the step that is complete; forgets its passes. None where there is nothing to say.

        May raise: call it through the seam. With several ranks that is ``RLWatchError``, once, and the end of it.
        """
        world = self._world
        try:
            return self._check(spike, world) if world is not None and (self.passes.all or world.size > 1) else None
        except BaseException as error:
            self.leave()
            if world is None or world.size == 1 or not isinstance(error, Exception):
                raise
            raise RLWatchError(f"{NO_MORE} ({type(error).__name__}: {error})") from error
        finally:
            self.passes.clear()

    def delivered(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a step have arrived: what its layers usually do is learnt from them."""
        self.usual.update(metrics)

    @property
    def refused(self) -> int:
        """Spikes that the budget did not allow to localise; counted on rank 0."""
        return self._budget.refused

    def leave(self) -> None:
        """Localise no more: something failed on this rank, and of several ranks none can go on without the others."""
        world = self._world
        if world is not None and world.size > 1:
            self._world = None
            world.leave()

    def _check(self, spike: Spike, world: World) -> Located | None:
        read = self._read(spike, world)
        if read is None:
            return None
        norm, tokens = read
        if self._overflowed(spike, norm):
            return None
        decision = self._trigger.check(spike.step, norm, tokens)
        if not decision.fires or not self._allowed(norm, world):
            return None
        begun = self._seconds()
        try:
            return self._localise(spike, norm, decision, world)
        finally:
            self._took = self._seconds() - begun
            self._budget.spent(self._took)

    def _read(self, spike: Spike, world: World) -> tuple[float, int] | None:
        """The norm, and the tokens of all ranks, with one wait for the device.

        None where no rank has gradients, or a coefficient is missing on one: its tokens could not be blamed.
        """
        part = _part_of_norm(spike, world.rank)
        counts = [one.tokens.mask.sum() for one in self.passes.all]
        read = [float(each) for each in Transfer([*counts, *([] if part is None else [part.reshape(())])]).read()]
        ours = 0.0 if part is None else read.pop()
        tokens, there, total, broken = _over(world, sum(read), float(part is not None), ours, float(self.passes.broken))
        if not there or broken:
            return None
        return total if spike.norm is not None else math.sqrt(total) / spike.left, int(tokens)

    def _overflowed(self, spike: Spike, norm: float) -> bool:
        """Whether this is how a loss scale is found, and no trouble of the run: not if it goes on and on."""
        self._overflows = self._overflows + 1 if spike.scale is not None and not math.isfinite(norm) else 0
        return 0 < self._overflows < OVERFLOWS

    def _allowed(self, norm: float, world: World) -> bool:
        """Whether the budget allows it: that of rank 0, because clocks differ. A refusal is counted."""
        allowed = world.rank == 0 and self._budget.may(self._took, non_finite=not math.isfinite(norm))
        agreed = _over(world, float(allowed)) != [0.0]
        if not agreed and self._seam.run is not None:
            self._seam.run.counters.add("localisations_refused")
        return agreed

    def _localise(self, spike: Spike, norm: float, decision: TriggerDecision, world: World) -> Located:
        if spike.scale is not None:
            _unscale(self.passes, spike.scale)
        if self.rewards is not None:
            self._seam.attempt("rewards of a spike", self.rewards, self.passes.all)
        options = LocateOptions(culprits=self._settings.culprits)
        located = locate(
            spike.model,
            self.passes,
            world=world,
            options=options,
            norm=norm,
            threshold=decision.threshold,
            usual=self.usual.shares,
        )
        record(Recorded(spike.step, located, self._settings, self._decode), world, self._seam.run)
        self._seam.attempt("inputs of a spike", self._keep_inputs, spike, located, world)
        self._judge(spike, located)
        return located

    def _keep_inputs(self, spike: Spike, located: Located, world: World) -> None:
        """No collective: each rank writes its own."""
        folder = self._settings.directory
        if folder is None or self.contexts is None or located.report.why_not:
            return
        save_recording(
            folder,
            spike.step,
            located.report,
            model=spike.model,
            passes=self.passes,
            contexts=self.contexts(),
            contributions=located.contributions,
            rank=world.rank,
            ranks=world.size,
            autocast=self.autocast,
        )

    def _judge(self, spike: Spike, located: Located) -> None:
        """Whether to leave the step out: the report is the same on all ranks, and so is the decision."""
        skip = self._settings.skip
        decision = None if skip is None else skip.decide(located.report, spike.step)
        if decision is not None and decision.skip:
            self._culprit = spike.model
            if self._seam.run is not None:
                self._seam.run.event("step_skipped", spike.step, reason=decision.reason)

    def skip_culprit(self) -> None:
        """Leave the optimizer's step out, if the step just looked at is to be: call it once gradients were clipped."""
        model, self._culprit = self._culprit, None
        if model is not None:
            skip_step(model)


def _over(world: World, *numbers: float) -> list[float]:
    """The sum of each number over the ranks."""
    return list(numbers) if world.size == 1 else world.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()


def _part_of_norm(spike: Spike, rank: int) -> Tensor | None:
    """What this rank adds, 0-d: to the norm if it is known, which is then that of rank 0; else to its square.

    So all ranks have the same number. Whole gradients count on rank 0, and shards where they are.
    """
    if spike.norm is not None:
        norm: Any = torch.as_tensor(spike.norm).detach()
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole if rank == 0 else None
    norms = grad_norms(spike.model.named_parameters(), rank=rank)
    return None if norms is None else norms.squares.sum()


def _unscale(passes: Passes, scale: float) -> None:
    for one in passes.all:
        one.coefficients.update({name: part / scale for name, part in one.coefficients.items()})
