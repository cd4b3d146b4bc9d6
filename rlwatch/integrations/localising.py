"""Localising gradient spikes during training: triggers, budget, and records of the result.

:mod:`rlwatch.gradloc` computes the attribution; this module connects it to the run and the trainer.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlwatch import codec
from rlwatch.clipping.skip import SkipOnSpike, skip_step
from rlwatch.error_boundary import LIMIT, ErrorBoundary, Reported
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.gradloc.distributed import Alone, Processes, World, gather_bytes, whole_gradients
from rlwatch.gradloc.locate import Located, LocateOptions, locate
from rlwatch.gradloc.loss_form import sample_of
from rlwatch.gradloc.passes import LossPass, RecordedPasses
from rlwatch.gradloc.recording import Context, save_recording
from rlwatch.gradloc.report import Localisation
from rlwatch.gradloc.rows import culprit_batches, event_body, response_batch
from rlwatch.gradloc.trigger import (
    FIXED,
    LocalisationBudget,
    ScaleHistory,
    Trigger,
    TriggerDecision,
    added_up,
    measured,
    scales_of,
)
from rlwatch.integrations.ranks import all_agree
from rlwatch.integrations.step_tally import Decode
from rlwatch.metrics import LAYER_PREFIX
from rlwatch.records import LOCALISED, SpikeBatch
from rlwatch.tensors.megatron import model_norms
from rlwatch.tensors.transfer import Transfer

if TYPE_CHECKING:
    from rlwatch.run import Run


# Settings: what a user may choose.


@dataclass(frozen=True, slots=True)
class Localise:
    """Settings of localisation: when the gradient of a step is attributed to tokens, how closely, and at what cost.

    Parameters
    ----------
    culprits
        Largest number of tokens to report for a step. None: all tokens that stand out, up to a quarter of a megabyte.
    context
        Tokens kept on each side of a reported token, from its response, to show that part of the response.
    share, allowance_s
        Part of the training time that localisation may take, amortised (0.01 is 1 %), and seconds that it may take
        beyond that part before much training time has passed.
    threshold
        Fixed threshold for the norm of a single token's gradient, in place of a threshold relative to the run's own
        history (METHODS: T_tok). Published runs use 100 to 640 (GradLoc, Tencent Hunyuan 2026).
    keep_inputs
        Directory into which every localised step is written with all its token ids, so that it can be replayed. None:
        nothing is written.
    skip
        Rule by which the optimizer step of a batch with such a token is left out. None: no step is left out, and
        training is not changed.

    Raises
    ------
    ConfigError
        For a value out of range.
    """

    culprits: int | None = None
    context: int = 256
    share: float = 0.01
    allowance_s: float = 30.0
    threshold: float | None = None
    keep_inputs: str | os.PathLike[str] | None = None
    skip: SkipOnSpike | None = None

    def __post_init__(self) -> None:
        for name, least in (("culprits", 1), ("context", 0)):
            value = getattr(self, name)
            if name == "culprits" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"localise: {name} must be an integer of at least {least}, got {value!r}")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < 1:
            raise ConfigError(f"localise: share is a part of the training time within (0, 1), got {self.share!r}")
        if self.threshold is not None and not (isinstance(self.threshold, int | float) and self.threshold > 0):
            raise ConfigError(f"localise: threshold must be a number above 0, got {self.threshold!r}")
        if self.skip is not None and not isinstance(self.skip, SkipOnSpike):
            raise ConfigError(f"localise: skip must be SkipOnSpike(...) or None, got {self.skip!r}")

    @classmethod
    def of(cls, wish: bool | Localise) -> Localise | None:
        """Return the settings for ``wish``: None for False, the defaults for True, and ``Localise`` objects unchanged.

        Raises ``ConfigError`` for any other value.
        """
        if isinstance(wish, cls):
            return wish
        if isinstance(wish, bool):
            return cls() if wish else None
        raise ConfigError(f"localise must be True, False or Localise(...), got {wish!r}")

    @property
    def directory(self) -> Path | None:
        """Return the directory into which localised steps are written for replay, or None if none is written."""
        return None if self.keep_inputs is None else Path(self.keep_inputs)


# From a spike of the gradient to a record of the responsible tokens, between backward and optimizer step.

OVERFLOWS = 16
"""Number of overflows in a row from which a non-finite gradient counts as a spike. Fewer belong to the search for a
float16 loss scale, which each overflow halves.
"""

UNKEPT = "no forward pass of this step was kept"
UNREAD = "the backward pass could not be read, for lack of memory most likely: a coefficient of the loss is missing"
NO_MORE = "this rank or another one failed or is gone, so spikes are localised no more"


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose gradient is to be examined.

    The gradient is in ``model``, complete, and no optimizer has used it yet. ``norm`` is its norm before clipping and
    without loss scale, if known. ``scale`` is the float16 loss scale that the coefficients of the loss carry (None: no
    scale). ``left`` is the part of that scale that the gradients still carry. Tensors stay on the device until the norm
    is read.
    """

    model: nn.Module
    step: int
    norm: Tensor | float | None = None
    scale: Tensor | float | None = None
    left: Tensor | float = 1.0


def scale_of(scaler: Any) -> Tensor | float:
    """Return the current loss scale of ``scaler``, a ``torch.amp.GradScaler``, as a tensor on its device if it has one.

    Reading the number itself would wait for the device.
    """
    there = getattr(scaler, "_scale", None)
    return there if isinstance(there, Tensor) else float(scaler.get_scale())


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Numbers of one optimizer step, summed over all ranks, and a sample of this rank's tokens.

    ``norm`` is the gradient's norm before clipping, ``tokens`` the number of tokens in the loss. ``broken`` is True if
    the coefficients of a loss could not be read. ``scales`` maps the name of a quantity to its size. ``sample`` has
    shape (n, COLUMNS), one row a token, or is None. ``scale`` is the loss scale, 1 without one.
    """

    norm: float
    tokens: int
    broken: bool
    scales: Mapping[str, float]
    sample: np.ndarray | None
    scale: float = 1.0

    @property
    def healthy(self) -> bool:
        """Return True if the step may count towards the usual gradient norms of the run."""
        return math.isfinite(self.norm) and self.tokens > 0 and not self.broken


class Localiser:
    """Recorder of the forward passes of the loss in the current step, which attributes the step's gradient to tokens if
    its norm spikes.

    A step waits once for the device, to read the norm. A localised step costs what :class:`Localise` allows. With
    several ranks every rank creates a localiser and calls :meth:`check` at the same steps. If one rank fails, all ranks
    stop localising for good.

    Attributes that a trainer's integration sets: ``rewards`` fills in the rewards of the passes of a step that is
    localised. ``contexts``, if given, returns the inputs of their forward passes. ``autocast`` is the dtype of the
    forward passes if it differs from that of the weights. ``missing`` is the reason why a step has no passes, and
    ``expects`` is True if steps should have passes.
    """

    def __init__(
        self,
        error_boundary: ErrorBoundary,
        settings: Localise,
        *,
        decode: Decode | None = None,
        world: World | None = None,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.passes = RecordedPasses(error_boundary)
        self.usual = UsualShares()
        self.rewards: Callable[[list[LossPass]], None] | None = None
        self.contexts: Callable[[], Sequence[Context]] | None = None
        self.autocast = ""
        self.missing = UNKEPT
        self.expects = False
        self._error_boundary = error_boundary
        self._settings = settings
        self._decode = decode
        self._world: World | None = world or Alone()
        self._seconds = seconds
        self._trigger = Trigger(token_threshold=settings.threshold)
        self._history = ScaleHistory()
        self.budget = LocalisationBudget(share=settings.share, allowance_s=settings.allowance_s)
        self._took = 0.0
        self._tokens = 0
        self._overflows = 0
        self._culprit: nn.Module | None = None

    def check(self, spike: Spike) -> Located | None:
        """Examine the gradient of the step in ``spike``, then forget the step's passes.

        Call it before the optimizer steps. Returns the localised gradient, or None if there is nothing to report. A
        spike that is not localised is reported and recorded with the reason. Steps are not examined until passes are
        expected or kept.

        May raise, so call it through the error boundary. With several ranks it raises ``RLWatchError`` once, and is
        then disabled.
        """
        world = self._world
        if world is None or not (self.passes.all or self.expects or world.size > 1):
            self.passes.clear()
            return None

        def failed(error: BaseException) -> None:
            self.leave()
            if world.rank == 0 and isinstance(error, Exception):
                why = f"it failed ({type(error).__name__}: {error}); after {LIMIT} failures no spike is localised"
                self._record(spike.step, Localisation(math.nan, why_not=why))
            if world.size > 1 and isinstance(error, Exception):
                raise RLWatchError(f"{NO_MORE} ({type(error).__name__}: {error})") from error

        try:
            with Reported(failed):
                return self._check(spike, world)
        finally:
            self.passes.clear()

    def delivered(self, metrics: Mapping[str, float]) -> None:
        """Update the usual share of each layer in the gradient from ``metrics``, the measured layer norms of a step."""
        self.usual.update(metrics)

    @property
    def refused(self) -> int:
        """Return the number of spikes that were not localised because the time budget was used up.

        They are counted on rank 0.
        """
        return self.budget.refused

    def leave(self) -> None:
        """Stop localising on this rank after a failure, and let the other ranks know, which cannot continue without
        it.
        """
        world = self._world
        if world is not None and world.size > 1:
            self._world = None
            world.leave()

    def _check(self, spike: Spike, world: World) -> Located | None:
        read = self._read(spike, world)
        if read is None:
            return None
        norm, tokens = read.norm, read.tokens
        if self._overflowed(spike, norm):
            return None
        self._tokens = tokens or self._tokens
        decision = self._trigger.check(spike.step, norm, self._tokens or 1)
        try:
            why = self._why_not(decision, read, world)
            if why:
                return self._refused(spike.step, Localisation(norm, decision.threshold, tokens, why_not=why), world)
            return self._timed(spike, read, decision, world) if decision.fires else None
        finally:
            if read.healthy and decision.reason in {"", FIXED}:
                self._history.learn(spike.step, read.scales, read.sample)

    def _timed(self, spike: Spike, read: StepNumbers, decision: TriggerDecision, world: World) -> Located:
        begun = self._seconds()
        try:
            return self._localise(spike, read, decision, world)
        finally:
            self._took = self._seconds() - begun
            self.budget.spent(self._took)

    def _why_not(self, decision: TriggerDecision, read: StepNumbers, world: World) -> str:
        """Return why a spike is not localised, the same on all ranks; empty if it is, or if there is no spike."""
        if not decision.fires:
            return decision.reason
        if read.broken:
            return UNREAD
        if not read.tokens:
            return self.missing
        if self._allowed(read.norm, world):
            return ""
        share, spent = self._settings.share, self.budget.spent_s
        return f"the budget of {share:.2%} of the training time is used up, {spent:.3g} s so far"

    def _refused(self, step: int, report: Localisation, world: World) -> Located:
        """Record a spike that is not localised, with the reason in the report."""
        report = replace(report, message=f"not localised: {report.why_not}")
        if world.rank == 0:
            self._record(step, report)
        return Located(report)

    def _record(self, step: int, report: Localisation) -> None:
        if self._error_boundary.run is not None:
            self._error_boundary.run.event(LOCALISED, step, **event_body(report))

    def _read(self, spike: Spike, world: World) -> StepNumbers | None:
        """Read the norm, the loss scales of all ranks, and whether a coefficient is missing, with one wait.

        Returns None if no rank has gradients.
        """
        part = _part_of_norm(spike, world.rank)
        # Exclude NaN and Inf coefficients from the scales: a step that has any is not healthy.
        scales = [measured(one) for one in self.passes.all]
        samples = [sample_of(one) for one in self.passes.all]
        factors = [x for x in (spike.scale, spike.left) if isinstance(x, Tensor)]
        read = Transfer([*scales, *samples, *factors, *([] if part is None else [part.reshape(())])]).read()
        part_here = 0.0 if part is None else float(read.pop())
        left, scale = (float(read.pop() if isinstance(x, Tensor) else x or 1.0) for x in (spike.left, spike.scale))
        parts = added_up([one.tolist() for one in read[: len(scales)]])
        numbers = [float(part is not None), part_here, float(self.passes.broken), *parts]
        there, total, broken, *every = _over(world, *numbers)
        if not there:
            return None
        norm = total if spike.norm is not None else math.sqrt(total) / left
        sample = np.concatenate(read[len(scales) :]) if samples else None
        if sample is not None:
            sample[:, 0] /= scale
        known = scales_of(every, norm, ranks=world.size, scale=scale)
        return StepNumbers(norm, int(every[0]), broken > 0, known, sample, scale)

    def _overflowed(self, spike: Spike, norm: float) -> bool:
        """Return True for an overflow in the search for a loss scale, unless too many follow each other."""
        self._overflows = self._overflows + 1 if spike.scale is not None and not math.isfinite(norm) else 0
        return 0 < self._overflows < OVERFLOWS

    def _allowed(self, norm: float, world: World) -> bool:
        """Check the budget of rank 0, because clocks differ between ranks. Refusals are counted."""
        allowed = world.rank == 0 and self.budget.may(self._took, non_finite=not math.isfinite(norm))
        agreed = _over(world, float(allowed)) != [0.0]
        if not agreed and self._error_boundary.run is not None:
            self._error_boundary.run.counters.add("localisations_refused")
        return agreed

    def _localise(self, spike: Spike, read: StepNumbers, decision: TriggerDecision, world: World) -> Located:
        if spike.scale is not None:
            _unscale(self.passes, read.scale)
        if self.rewards is not None:
            self._error_boundary.attempt("rewards of a spike", self.rewards, self.passes.all)
        options = LocateOptions(culprits=self._settings.culprits)
        with whole_gradients(spike.model):
            located = locate(
                spike.model,
                self.passes,
                world=world,
                options=options,
                norm=read.norm,
                threshold=decision.threshold,
                usual=self.usual.shares,
                scales=read.scales,
                history=self._history,
            )
        record_located(LocatedStep(spike.step, located, self._settings, self._decode), world, self._error_boundary.run)
        self._error_boundary.attempt("inputs of a spike", self._keep_inputs, spike, located, world)
        self._judge(spike, located)
        return located

    def _keep_inputs(self, spike: Spike, located: Located, world: World) -> None:
        """Write the inputs of this rank; not a collective."""
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
        """Decide whether to skip the step; all ranks have the same report, so they decide alike."""
        skip = self._settings.skip
        decision = None if skip is None else skip.decide(located.report, spike.step)
        if decision is not None and decision.skip:
            self._culprit = spike.model
            if self._error_boundary.run is not None:
                self._error_boundary.run.event("step_skipped", spike.step, reason=decision.reason)

    def skip_culprit(self) -> None:
        """Drop the gradients, so that the optimizer step changes nothing, if :meth:`check` decided so.

        Call it after gradients were clipped and before the optimizer steps.
        """
        model, self._culprit = self._culprit, None
        if model is not None:
            skip_step(model)


def _over(world: World, *numbers: float) -> list[float]:
    """Return the sum of each number over the ranks."""
    return (
        list(numbers)
        if world.size == 1
        else world.sum(torch.tensor(numbers, dtype=torch.float64, device="cpu")).tolist()
    )


def _part_of_norm(spike: Spike, rank: int) -> Tensor | None:
    """Return this rank's part, 0-d: of the norm of rank 0 if it is known, else of the squared norm.

    Their sum is the same on all ranks. Whole gradients count on rank 0, shards on their own rank.
    """
    if spike.norm is not None:
        known = spike.norm
        norm: Any = known.detach() if isinstance(known, Tensor) else torch.as_tensor(known, device="cpu")
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole if rank == 0 else None
    norms = model_norms(spike.model, rank=rank)
    return None if norms is None else norms.squares.sum()


def _unscale(passes: RecordedPasses, scale: float) -> None:
    for one in passes.all:
        one.coefficients.update({name: part / scale for name, part in one.coefficients.items()})


# The usual share of each layer in the gradient, in this run.

ALPHA = 0.05
"""Weight of a new step in the running mean of a layer's share; the mean covers about 20 steps."""


class UsualShares:
    """Running mean of each layer's share in the squared gradient norm.

    Only steps with a finite gradient norm above 0 count. ``shares`` maps the name of a layer to its mean share, in (0,
    1).
    """

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    def update(self, metrics: Mapping[str, float]) -> None:
        """Update the mean shares from ``metrics``, which hold the gradient norm of each layer in one step."""
        squares = {n.removeprefix(LAYER_PREFIX): v * v for n, v in metrics.items() if n.startswith(LAYER_PREFIX)}
        total = sum(squares.values())
        if not (math.isfinite(total) and total > 0):
            return
        for layer, square in squares.items():
            share = square / total
            before = self.shares.get(layer)
            self.shares[layer] = share if before is None else before + ALPHA * (share - before)


# The record of a localisation: token rows and an event.


@dataclass(frozen=True, slots=True)
class LocatedStep:
    """A localised step of this rank with all data needed to record it.

    ``located`` is the attribution, ``settings`` limits the text around a token, and ``decode`` turns token ids into
    text.
    """

    step: int
    located: Located
    settings: Localise
    decode: Decode | None = None


def record_located(what: LocatedStep, world: World, run: Run | None) -> None:
    """Record the localised tokens of all ranks through ``run``, which only rank 0 has; ``what`` is this rank's
    localised step.

    A collective: all ranks call it.
    """
    shares = gather_bytes(world, encoded_batches(batches_of(what, world.rank)))
    if run is None or world.rank != 0:
        return
    for data in shares:
        for batch in decoded_batches(data):
            run.log_spikes(batch)
    run.event(LOCALISED, what.step, **event_body(what.located.report))


def batches_of(what: LocatedStep, rank: int) -> list[SpikeBatch]:
    """Return the rows to record for the outlying tokens of ``what``, a localised step, on ``rank``, and for the
    responses that contain them.
    """
    located = what.located
    culprits = [culprit for culprit in located.report.culprits if culprit.at.rank == rank]
    report = replace(located.report, culprits=culprits)
    responses = response_batch(
        what.step,
        report,
        located.hosts,
        located.contributions,
        rank=rank,
        context=what.settings.context,
        decode=what.decode,
    )
    batches = culprit_batches(what.step, report, located.hosts, decode=what.decode)
    return batches if responses is None else [*batches, responses]


def encoded_batches(batches: Sequence[SpikeBatch]) -> bytes:
    """Encode ``batches`` as bytes that another rank can read, in numpy's format without pickle."""
    columns = {
        f"{i}/{name}": np.asarray(column) for i, one in enumerate(batches) for name, column in one.columns.items()
    }
    heads = [{**codec.encoded(one), "columns": list(one.columns)} for one in batches]
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, heads=np.array(json.dumps(heads, default=codec.nearest)), **columns)
    return buffer.getvalue()


def decoded_batches(data: bytes) -> list[SpikeBatch]:
    """Return the batches that :func:`encoded_batches` encoded as ``data``."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        heads = json.loads(str(stored["heads"]))
        return [
            codec.decoded(
                SpikeBatch, {**head, "columns": {name: _column(stored[f"{i}/{name}"]) for name in head["columns"]}}
            )
            for i, head in enumerate(heads)
        ]


def _column(column: np.ndarray) -> np.ndarray | list[str]:
    return column if column.dtype.kind in "biuf" else [str(text) for text in column]


# The ranks that localise a step together.

logger = logging.getLogger("rlwatch")

TIMEOUT_S = 60.0
"""Longest wait for a missing rank, in seconds. After it all ranks stop localising."""
OFF = "rlwatch does not localise gradient spikes over several ranks (training goes on): %s"


def localiser_of(error_boundary: ErrorBoundary, settings: Localise | None, decode: Decode | None) -> Localiser | None:
    """Return a localiser that all ranks of the run share.

    ``decode`` converts token ids to text; None: no text is kept. The result is None if ``settings`` is None or the
    ranks cannot be connected. A failure is logged as a warning. Call it on every rank at set-up. ``error_boundary`` is
    the error boundary that leads to the run.
    """
    if settings is None:
        return None
    link = None if error_boundary.run is None else error_boundary.run.ranks
    linked = link is not None and link.settled(TIMEOUT_S)
    try:
        world = world_of(linked, otherwise="they are not all linked to rank 0")
    except RLWatchError as error:
        logger.warning(OFF, error)
        return None
    return Localiser(error_boundary, settings, decode=decode, world=world)


def world_of(ready: bool, *, otherwise: str) -> World:
    """Return the ranks of ``torch.distributed`` that localise together. Every rank calls it at set-up, with ``ready``.

    All ranks first exchange ``ready``, so that none waits for a rank that is not. Returns a world of one rank without a
    process group. Raises ``RLWatchError`` on all ranks: with ``otherwise`` if one is not ready, or with the reason why
    the process group could not be created.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return Alone()
    try:
        if all_agree(ready, TIMEOUT_S):
            return Processes(TIMEOUT_S)
    except (RuntimeError, AttributeError) as error:  # DistBackendError, DistNetworkError; torch without gloo
        raise RLWatchError(f"a process group of their own could not be made: {error}") from None
    raise RLWatchError(otherwise)
