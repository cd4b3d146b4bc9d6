"""Measurement of the inputs that a custom loop passes: gradients, micro-batches and generations, added to the current
step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlwatch.error_boundary import ErrorBoundary, raised_by, shown
from rlwatch.gradloc.passes import RandomState, RecordedPasses
from rlwatch.integrations.canaries import CanaryScorer
from rlwatch.integrations.compat import vocab_size_of
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import UNKEPT, Localiser, Spike, scale_of
from rlwatch.integrations.step_tally import Decode, SealedStep, StepTally
from rlwatch.integrations.tools import TAP as TOOL_TAP
from rlwatch.integrations.tools import ToolMeter
from rlwatch.integrations.torch.batch import NO_DATA, BatchReader, GenerationReader, LossSettings, Samples
from rlwatch.integrations.torch.commands import Means
from rlwatch.integrations.torch.localise import LoopCall, LossPasses
from rlwatch.integrations.verifiers import TAP, VerifierMeter
from rlwatch.integrations.weight_sync import SyncComparison
from rlwatch.recorder.intake import step_index
from rlwatch.tensors.grad_agreement import GradientTrail
from rlwatch.tensors.gradnorm import named_weights
from rlwatch.tensors.masked import sharing, widen
from rlwatch.tensors.megatron import first_of_copies, hindrance, model_norms
from rlwatch.tensors.mergeable import Mean, Stats, nonfinite
from rlwatch.tensors.responses import observe_responses
from rlwatch.tensors.transfer import freed
from rlwatch.tensors.weight_gap import UpdateSample

UPDATE_TAP = "size of the update"
AGREEMENT_TAP = "gradients of micro-batches"
IN_FLIGHT = 8
"""Largest number of steps whose copies from the device are pending; beyond that the oldest is waited for."""


@dataclass(slots=True, weakref_slot=True)
class StepCounter:
    """Counter of steps, which records each: ``tally`` is the current step's, ``last`` the number of the step before.

    ``delivered`` is called with the number and the metrics of every recorded step. ``decode`` converts token ids to
    text. ``error_boundary`` is the error boundary that leads to the run.
    """

    error_boundary: ErrorBoundary
    delivered: Callable[[int, dict[str, float]], None]
    decode: Decode | None = None
    tally: StepTally = field(default_factory=StepTally)
    last: int = 0
    _sealed: deque[SealedStep] = field(default_factory=deque)
    _begun: float | None = None

    def begin(self) -> None:
        """Start to time the step, at its first input; later calls in the step do nothing."""
        if self._begun is None:
            self._begun = time.monotonic()

    def add_all(self, numbers: Mapping[str, Any]) -> dict[str, str]:
        """Add ``numbers`` of the step (None: not measured); return the invalid ones with the reasons.

        The call does not wait for tensors of one element. With several ranks the mean over them is recorded.
        """
        refused = {}
        for name, value in numbers.items():
            if raised_by(self._add, name, value):
                refused[name] = f"it is not one number: got {_described(value)}"
        return refused

    def _add(self, name: str, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, str | bytes):
            raise TypeError(name)
        if isinstance(value, Tensor):
            self._add_tensor(name, value.detach())
        elif self.linked:
            self._add_tensor(name, torch.tensor(float(value), dtype=torch.float64, device="cpu"))
        else:
            self.tally.add_number(name, float(value))

    def _add_tensor(self, name: str, value: Tensor) -> None:
        """Add a mean, over all ranks if there are several; it replaces a measured statistic of the same name."""
        if hasattr(value, "full_tensor"):
            raise TypeError(name)
        if freed(value) or value.is_meta:
            raise ValueError(name)
        number = widen(value).reshape(())
        self.tally.stats[name] = Mean(torch.ones_like(number), number)

    @property
    def linked(self) -> bool:
        """Return True with several ranks, whose shares of a step are merged."""
        return self.error_boundary.run is not None and self.error_boundary.run.linked

    def seal(self, step: int) -> None:
        """End the current step as ``step``, start copying its measurements from the device, and begin the next step."""
        now = time.monotonic()
        if self._begun is not None:
            self.tally.add_number("time/step", now - self._begun)
        self._begun, self.last = now, step
        tally, self.tally = self.tally, StepTally()
        tally.end_stages(step, self.error_boundary.run)
        self.error_boundary.attempt("tokens", tally.measure)
        self._sealed.append(tally.seal(step, shared=self.linked))

    def deliver(self, *, wait: bool = False) -> None:
        """Record the ended steps in order; without ``wait`` only those whose copy from the device has arrived."""
        while self._sealed and (wait or len(self._sealed) > IN_FLIGHT or self._sealed[0].ready()):
            sealed = self._sealed.popleft()
            if self.error_boundary.run is not None:
                self.delivered(sealed.step, sealed.deliver(self.error_boundary.run, self.decode))


def _described(value: Any) -> str:
    if isinstance(value, Tensor) and hasattr(value, "full_tensor"):
        return "a DTensor; pass its full_tensor()"
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)


# Gradients per layer, without the loss scale of float16.


def read_gradients(model: nn.Module, optimizer: Any = None, scaler: Any = None, *, rank: int = 0) -> Stats:
    """Return norms of the current gradients of ``model`` that count on this ``rank``; empty if there are none.

    ``scaler`` is the loop's ``torch.amp.GradScaler``, before or after ``unscale_``. Either way norms are reported
    without its scale, and an overflow (by which it finds its scale) is a skipped step, not a measurement. If gradients
    are both scaled and sharded, nothing is reported: no rank can see an overflow.
    """
    norms = model_norms(model, rank=rank)
    if norms is None:
        return {}
    if scaler is None or not scaler.is_enabled():
        return norms.stats()
    if not norms.whole:
        return {}
    scale = _scale_left(scaler, optimizer)
    return norms.unscaled_stats(norms.total if scale is None else norms.total / scale)


def _scale_left(scaler: Any, optimizer: Any) -> Tensor | None:
    """Return the scale of the gradients, on the device; None after ``unscale_``."""
    state = scaler._per_optimizer_states.get(id(optimizer))  # noqa: SLF001  (asking it would wait for the device)
    stage = getattr(state["stage"], "name", "READY") if state else "READY"
    return scaler._get_scale_async() if stage == "READY" else None  # noqa: SLF001


def scales(optimizer: Any, scaler: Any) -> tuple[Tensor | float | None, Tensor | float]:
    """Return the loss scale of the coefficients, and the scale that the gradients still carry, both on the device.

    (None, 1) without an enabled ``scaler``.
    """
    if scaler is None or not scaler.is_enabled():
        return None, 1.0
    scale = scale_of(scaler)
    return scale, 1.0 if _scale_left(scaler, optimizer) is None else scale


# Adding the inputs of a loop to the current step. May raise: the watcher calls it through its error boundary.

TEXTS = ("prompts", "completions")
"""Inputs that never become tensors."""
UNREAD = (*TEXTS, "prompt_index", "responses")
"""Inputs from which no statistics are computed."""
BESIDE_TEXT = (*UNREAD, "reward_parts", "advantages", "kl")
"""Inputs of a generation from which no statistics are computed; they are recorded with its text."""
Refused = Mapping[str, str]
"""Input that was left out -> the reason."""


@dataclass(slots=True)
class UpdatePace:
    """Counter of the optimizer updates on each batch of rollouts, by which an age in policy versions becomes an age in
    updates.
    """

    batch: int = 0
    """Updates of the newest batch so far."""
    each: int = 1
    """Updates of the batch before."""

    def sampled(self) -> None:
        """Note that a new batch of rollouts begins; several generations before its first update count as one batch."""
        if self.batch:
            self.batch, self.each = 0, self.batch

    def updated(self) -> None:
        """Count an optimizer update on the newest batch of rollouts."""
        self.batch += 1

    def stats(self, staleness: Tensor | None) -> Stats:
        """Return the metric ``staleness/updates``: the age, in optimizer updates, of responses that are ``staleness``
        (B,) policy versions old.

        The result is empty if ``staleness`` is None.
        """
        if staleness is None:
            return {}
        updates = staleness * float(max(self.each, self.batch + 1)) + float(self.batch)
        return {"staleness/updates": Mean.of(updates, torch.ones_like(staleness, dtype=torch.bool))}


@dataclass(slots=True)
class Collector:
    """Measurement of the loop's inputs up to ``level``; the statistics are added to ``steps.tally``.

    ``settings`` describe the loss, ``means`` are the loop's objects. ``generation`` reads generations, ``samples``
    keeps and measures text. ``scaler`` is the loop's gradient scaler, ``localiser`` localises spikes (None: off).
    """

    steps: StepCounter
    level: Level
    settings: LossSettings
    means: Means
    generation: GenerationReader
    samples: Samples
    scaler: Any = None
    localiser: Localiser | None = None
    _rates: Mapping[str, float | Tensor] | None = field(default=None, init=False)
    _loss_passes: LossPasses = field(init=False)
    verifiers: VerifierMeter = field(init=False)
    tools: ToolMeter = field(init=False)
    canaries: list[CanaryScorer] = field(default_factory=list, init=False)
    _update: UpdateSample | None = field(default=None, init=False)
    _pace: UpdatePace = field(default_factory=UpdatePace, init=False)
    _trail: GradientTrail = field(default_factory=GradientTrail, init=False)
    comparison: SyncComparison = field(default_factory=SyncComparison, init=False)

    def __post_init__(self) -> None:
        self.verifiers = VerifierMeter(self.steps.error_boundary)
        self.tools = ToolMeter(self.steps.error_boundary)
        self._loss_passes = LossPasses(RecordedPasses() if self.localiser is None else self.localiser.passes)
        if self.localiser is not None:
            self.localiser.rewards = self._loss_passes.origin.identify

    @property
    def localises(self) -> bool:
        """Return True if forward passes must be kept, because spikes of the gradient are localised."""
        return self.localiser is not None and self.steps.error_boundary.works("localisation")

    def ran(self, call: LoopCall, result: Any, before: RandomState) -> None:
        """Keep a forward pass of the loss: the ``call`` by which it can be repeated, and its ``result``, whose
        log-probs are observed next.

        ``before`` are the random states before it.
        """
        if self.localiser is not None:
            self.localiser.expects = True
        self._loss_passes.ran(call, result, before)

    def rollouts(self, inputs: Mapping[str, Any]) -> Refused:
        """Measure a generation. Return the inputs that were left out, with the reasons."""
        self._begin()
        if not first_of_copies():
            return {}
        self._pace.sampled()
        self.steps.error_boundary.attempt("responses of a generation", self._loss_passes.origin.generated, inputs)
        batch = self.generation.read({name: value for name, value in inputs.items() if name not in BESIDE_TEXT})
        if batch is not None:
            self.steps.tally.add_stats(observe_responses(batch))
        self.steps.error_boundary.attempt("completions", self.samples.offer, self.steps.last + 1, inputs)
        return self.generation.refused

    def observe(self, inputs: Mapping[str, Any]) -> Refused:
        """Measure a micro-batch. Return the inputs that were left out, with the reasons."""
        self._begin()
        self.steps.error_boundary.attempt(AGREEMENT_TAP, self._look_at_gradients)
        if not self.level.includes(Level.TOKENS) or not first_of_copies():
            return {}
        reader = BatchReader(self.settings)
        full = self.level.includes(Level.FULL)
        with torch.no_grad():
            batch = reader.read({name: value for name, value in inputs.items() if name not in UNREAD})
            if batch is not None and batch.logp.is_meta:
                reader.refused["logp"], batch = NO_DATA, None
            if batch is not None:
                batch = self.steps.tally.add_batch(batch, full=full)
                self.steps.tally.add_stats(self._pace.stats(batch.staleness))
        if batch is not None and self.localises:
            reader.refused.update(self._loss_passes.observed(inputs, batch))
        return reader.refused

    def _look_at_gradients(self) -> None:
        """Read what the micro-batches so far left in ``.grad``: the next one has not been run backward yet."""
        if self.means.model is not None and self.level.includes(Level.GRADIENTS):
            with torch.no_grad():
                self._trail.look(_weights_of(self.means.model), self.steps.last)

    def _agree(self) -> None:
        """Measure how the micro-batches' gradients agree; over several ranks the last is a mean over them, left out."""
        if not self.steps.linked:
            self._look_at_gradients()
        with torch.no_grad():
            self.steps.tally.add_stats(self._trail.stats())
        self._trail.forget()

    def synced(self, engine: object) -> Refused:
        """Compare the rollout engine's weights with the model's after a sync.

        Return the reason if that is not possible.
        """
        self._begin()
        if self.means.model is None:
            return {"synced": "Watcher was made without model=, so there is nothing to compare with"}
        why = None if self.means.model is None else hindrance(self.means.model)
        if why is not None:
            return {"synced": why}
        try:
            self.steps.tally.add_stats(self.comparison.compare(self.means.model, engine))
        except TypeError as wrong:
            return {"engine": str(wrong)}
        return {}

    def gradients(self) -> Refused:
        """Measure the model's current gradients and learning rates, before the optimizer step.

        Return the reasons for measurements that are not possible, by the name of the input.
        """
        self._begin()
        self._rates = self.steps.error_boundary.attempt("learning rate", self.means.rates)
        with sharing():  # the walk over the model
            refused = self._measure_gradients()
        if not refused:
            self.steps.error_boundary.attempt("localisation", self._localise)
        return refused

    def _measure_gradients(self) -> Refused:
        why = None if self.means.model is None else hindrance(self.means.model)
        if why is not None:
            return {"gradients": f"{why}; step(grad_norm=) takes the norm that the optimizer's step returns"}
        if self.means.model is not None and self.level.includes(Level.GRADIENTS):
            with torch.no_grad():
                run = self.steps.error_boundary.run
                rank = 0 if run is None else run.rank
                stats = read_gradients(self.means.model, self.means.optimizer, self.scaler, rank=rank)
            self.steps.tally.add_stats(stats)
            self.steps.error_boundary.attempt(AGREEMENT_TAP, self._agree)
            self._update = self.steps.error_boundary.attempt(UPDATE_TAP, self._sampled, self.means.model, rank)
        return {}

    def _sampled(self, model: nn.Module, rank: int) -> UpdateSample | None:
        """Sample the weights before the step, as far as they count on this ``rank``."""
        return UpdateSample.of(named_weights(model), self.steps.last, rank=rank)

    def _measure_update(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            with torch.no_grad():
                self.steps.tally.add_stats(update.stats())

    def _score_canaries(self, step: int) -> None:
        """Score canaries on the process whose run records; the others continue."""
        run = self.steps.error_boundary.run
        for canaries in self.canaries if run is not None and run.rank == 0 else ():
            for name, value in canaries.numbers(step).items():
                self.steps.tally.add_number(name, value)

    def _count_verifiers(self) -> None:
        self.steps.tally.add_stats(self.verifiers.take())

    def _count_tools(self) -> None:
        self.steps.tally.add_stats(self.tools.take())

    def _localise(self) -> None:
        """Localise the gradient, which is complete and not used yet."""
        model, localiser = self.means.model, self.localiser
        if localiser is not None and model is not None:
            localiser.missing = self._loss_passes.missing or UNKEPT
            scale, left = scales(self.means.optimizer, self.scaler)
            localiser.check(Spike(model, self.steps.last + 1, scale=scale, left=left))
            localiser.skip_culprit()

    def end(self, step: int | None, inputs: Mapping[str, Any], scalars: Mapping[str, Any]) -> Refused:
        """End the step: add its loss and other numbers, and start its recording. Return the numbers that were left out.

        ``step`` is the step's number (None: one more than the last). ``inputs`` has loss, learning rate and gradient
        norm.
        """
        self._begin()
        broken = self.steps.error_boundary.attempt("loss", _broken, inputs["loss"])
        self.steps.error_boundary.attempt(TAP, self._count_verifiers)
        self.steps.error_boundary.attempt(TOOL_TAP, self._count_tools)
        self.steps.error_boundary.attempt(UPDATE_TAP, self._measure_update)
        self.steps.error_boundary.attempt("tokens", self.steps.tally.measure)
        refused = self.steps.add_all({**self._standing(), **_named(inputs, broken), **scalars})
        number = self.steps.last + 1
        if step is not None:
            try:
                number = step_index(step)
            except ValueError as wrong:
                refused["step"] = str(wrong)
        self.steps.error_boundary.attempt("canaries", self._score_canaries, number)
        self._rates = None
        self._pace.updated()
        self._trail.forget()
        self._loss_passes.forget()
        self.steps.seal(number)
        return refused

    def _begin(self) -> None:
        """Begin the step and read the current learning rate, before a scheduler changes it."""
        self.steps.begin()
        if self._rates is None:
            self._rates = self.steps.error_boundary.attempt("learning rate", self.means.rates)

    @property
    def _rank(self) -> int:
        return 0 if self.steps.error_boundary.run is None else self.steps.error_boundary.run.rank

    def _standing(self) -> dict[str, Any]:
        """Return numbers of the step that are read instead of passed."""
        return {
            **(self._rates or {}),
            "policy/kl_coef": self.steps.error_boundary.attempt("kl_coef", self.means.read_kl_coef),
            "policy/vocab_size": vocab_size_of(self.means.model),
            **(self.steps.error_boundary.attempt("text of completions", self.samples.take) or {}),
        }


def _weights_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of ``model``; it is walked only when the first is wanted."""
    for _, weight in named_weights(model):
        yield weight


def _named(inputs: Mapping[str, Any], broken: float | Tensor | None) -> dict[str, Any]:
    """Return the arguments of ``step`` by canonical names, with ``nonfinite/loss`` as ``broken``."""
    loss = {"loss/raw": inputs["loss"], "nonfinite/loss": broken}
    named = {**loss, "optim/lr": inputs["lr"], "optim/grad_norm": inputs["grad_norm"]}
    return {name: value for name, value in named.items() if value is not None}


def _broken(loss: Any) -> float | Tensor | None:
    """Return 1 for a NaN or infinite loss, else 0; None without a loss."""
    if isinstance(loss, Tensor):
        return None if freed(loss) else nonfinite(loss.detach())
    if isinstance(loss, int):
        return 0.0  # also one that is too large for a float
    return float(not math.isfinite(loss)) if isinstance(loss, float) else None
