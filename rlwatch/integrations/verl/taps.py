"""Hooks (taps) in one worker of verl: on the registry of policy losses, on the actor's loss function, on its optimizer
step.

Every wrapper calls the function that it replaces exactly once, with unchanged arguments, and returns its result. It
measures after the call, and just before the call for gradients and spikes. Nothing waits for the device, except the
localisation of spikes, where the engine itself waits next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.compat import lacking
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import BEFORE, StepTally, core, everything
from rlwatch.integrations.trainer_settings import rates
from rlwatch.integrations.verl.batch import Clipping, columns_beside, loss_batch
from rlwatch.integrations.verl.compat import STEPS
from rlwatch.integrations.verl.localise import RankLocalising
from rlwatch.integrations.weight_sync import TAP as SYNC_TAP
from rlwatch.integrations.weight_sync import SyncComparison
from rlwatch.tensors.entropy import Pairs
from rlwatch.tensors.gradnorm import GradNorms, Marked
from rlwatch.tensors.histogram import observe_distributions
from rlwatch.tensors.mergeable import Latest, Max, Mean, Stats, Total, nonfinite
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.weight_gap import UpdateSample

UPDATE_TAP = "size of the update"
TAPPED = "rlwatch_tapped_by"
"""Attribute of a wrapped policy loss that holds the object which wrapped it."""

SPIKE = "spike of the gradient"
"""Name, in error counts, of the hook that localises spikes."""

UNCOLLECTED = 2**24
"""Number of tokens whose statistics are kept for a driver that does not collect them; then they are dropped."""

Loss = Callable[..., Any]

SENDS = "get_per_tensor_param"
"""Method of an engine that returns the pairs of name and whole tensor that a weight sync sends, and the adapter."""


class WorkerTaps:
    """Hooks that measure one worker's actor while it updates, into the tally of the current step.

    Parameters
    ----------
    actor
        verl's ``TrainingWorker`` of the actor: its ``loss_fn`` and ``engine`` are wrapped on the instance.
    registry
        verl's registry of policy losses, by name; all entries are wrapped, new ones at the next :meth:`take`.
    error_boundary
        Error boundary that contains errors of the measurement.
    level
        Level of detail of the measurements.
    bypass
        True if the old log-probs are the rollout engine's; then only the update knows the trainer's own.
    truncation
        Largest weight of verl's token-level importance sampling, if it has one.
    gradients
        Reads the gradients of an engine by layer before its optimizer's step; None if that is not possible.
    localising
        Localises spikes of the gradient, if enabled.
    """

    def __init__(
        self,
        actor: Any,
        registry: MutableMapping[str, Loss],
        error_boundary: ErrorBoundary,
        level: Level,
        *,
        bypass: bool = False,
        truncation: float | None = None,
        gradients: Callable[[Any], GradNorms | None] | None = None,
        localising: RankLocalising | None = None,
        weights: Callable[[Any, int], UpdateSample | None] | None = None,
    ) -> None:
        self.tally = StepTally()
        self._actor = actor
        self._registry = registry
        self.error_boundary = error_boundary
        self._level = level
        self._bypass = bypass
        self._truncation = truncation
        self._gradients = gradients
        self._localising = localising
        self._weights = weights
        self._updates = 0
        self._data: Any = None
        self._inside = False
        self.tokens = 0
        """Number of tokens whose statistics wait to be collected."""
        self.uncollected = UNCOLLECTED
        self._before = False
        self._comparison = SyncComparison()

    def attach(self) -> None:
        """Install the wrappers on the parts that this verl has, as far as the level needs them."""
        if self._level.includes(Level.TOKENS):
            if callable(getattr(self._actor, "loss_fn", None)):
                self._wrap_loss_fn()
            self._wrap_registry()
        if self._localising is not None:
            self._localising.attach()
        reads = self._level.includes(Level.GRADIENTS) or self._localising is not None
        if reads and lacking(self._actor.engine, STEPS) is None:
            self._wrap_optimizer_step()
        if callable(getattr(self._actor.engine, SENDS, None)):
            self._wrap_sending()

    def take(self, *, before: bool = False) -> StepTally:
        """Return the measurements since the last call.

        ``before``: from now on measure the policy before the update as well.
        """
        tally, self.tally, self.tokens = self.tally, StepTally(), 0
        self.error_boundary.attempt("policy loss", tally.measure)
        if self._before:
            tally.stats = compacted(tally.stats)
        self._before = before and not self._bypass
        if self._level.includes(Level.TOKENS):
            self.error_boundary.attempt("policy losses", self._wrap_registry)
        return tally

    def _wrap_loss_fn(self) -> None:
        """Wrap the loss function, which gets the whole micro-batch; the policy losses that it calls get only a part."""
        original = self._actor.loss_fn

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            self._data = kwargs.get("data")
            if self._localising is not None and self.error_boundary.works(SPIKE) and torch.is_grad_enabled():
                self.error_boundary.attempt("loss pass", self._localising.keep, kwargs.get("model_output"), self._data)
            try:
                result = original(*args, **kwargs)
            finally:
                self._data = None
            if torch.is_grad_enabled():
                self.error_boundary.attempt("loss", self._after_loss, result)
            return result

        self._actor.loss_fn = tapped

    def _wrap_registry(self) -> None:
        """Wrap all entries that this object has not wrapped; replace wrappers of an earlier actor in this process."""
        for mode, loss in list(self._registry.items()):
            owner = getattr(loss, TAPPED, None)
            if owner is not self:
                self._registry[mode] = self._tapped(mode, loss if owner is None else inspect.unwrap(loss))

    def _tapped(self, mode: str, original: Loss) -> Loss:
        signature = inspect.signature(original)

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            outermost, self._inside = not self._inside, True  # a loss may call another one of the registry
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = not outermost
            if outermost and torch.is_grad_enabled():
                self.error_boundary.attempt("policy loss", self._after_policy_loss, mode, signature, args, kwargs)
            return result

        setattr(tapped, TAPPED, self)
        return tapped

    def _after_loss(self, result: Any) -> None:
        loss = result[0].detach()
        self.tally.add_stats({"nonfinite/loss": Total.of(nonfinite(loss), torch.ones_like(loss, dtype=torch.bool))})

    def _after_policy_loss(
        self, mode: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.tokens > self.uncollected:
            self.take()
            raise RLWatchError("nobody asks for what is measured; it is thrown away")
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        with torch.no_grad():
            more = {} if self._data is None else columns_beside(self._data, tuple(given["log_prob"].shape))
            batch = loss_batch(given, Clipping.of(mode, given.get("config")), more)
            self.tally.add_batch(batch, by=self._measured)
            self.tokens += batch.logp.numel()

    def _measured(self, batch: TokenBatch) -> Stats:
        """Return statistics of the loss, and of the policy before the update if the driver requested it."""
        full = self._level.includes(Level.FULL)
        known = batch if self._bypass else replace(batch, ids=None, ref_logp=None, rollout_logp=None, entropy=None)
        stats = everything(known) if full else core(known)
        return stats | (before_update(batch, full=full, truncation=self._truncation) if self._before else {})

    def _wrap_optimizer_step(self) -> None:
        """Wrap the engine's step: gradients are complete and unclipped when it begins, and it returns their norm."""
        engine = self._actor.engine
        original = engine.optimizer_step

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            self.error_boundary.attempt("learning rate", self._read_rates, engine)
            norms = self.error_boundary.attempt("gradients", self._read_gradients, engine)
            if self._localising is not None:
                self.error_boundary.attempt(SPIKE, self._localising.check, norms)
            before = self.error_boundary.attempt(UPDATE_TAP, self._sample_weights, engine)
            total = original(*args, **kwargs)
            if before is not None:
                self.error_boundary.attempt(UPDATE_TAP, self._measure_update, before)
            if self._level.includes(Level.GRADIENTS):
                scaled = getattr(engine, "scaler", None) is not None
                self.error_boundary.attempt("gradients", self._after_step, norms, total, scaled)
            return total

        engine.optimizer_step = tapped

    def _wrap_sending(self) -> None:
        """Compare the weights that the engine hands to a weight sync with those it trains, as they are sent.

        Of a whole sync only: adapters that are sent by themselves are not compared.
        """
        engine = self._actor.engine
        original = getattr(engine, SENDS)

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            sent = self.error_boundary.attempt(SYNC_TAP, self._sent, engine, result)
            return result if sent is None else sent

        setattr(engine, SENDS, tapped)

    def _sent(self, engine: Any, result: Any) -> Any:
        pairs, adapter = result
        if adapter is not None:
            return None
        return self._comparison.sent(engine.module, pairs, self.error_boundary, self._add_sent), adapter

    def _add_sent(self, stats: Stats) -> None:
        self.tally.add_stats(stats)

    def _read_rates(self, engine: Any) -> None:
        """Read the learning rates of this step; verl logs those of its scheduler after the scheduler's step."""
        for name, rate in rates(getattr(engine, "optimizer", None)).items():
            self.tally.add_stats({name: Latest.of(torch.tensor(rate), torch.ones(()))})

    def _read_gradients(self, engine: Any) -> GradNorms | None:
        return None if self._gradients is None else self._gradients(engine)

    def _sample_weights(self, engine: Any) -> UpdateSample | None:
        """Sample the weights before the step, as far as they count on this rank; None if nothing asks for them."""
        if self._weights is None or not self._level.includes(Level.GRADIENTS):
            return None
        self._updates += 1
        return self._weights(engine, self._updates)

    def _measure_update(self, before: UpdateSample) -> None:
        with torch.no_grad():
            self.tally.add_stats(before.stats())

    def _after_step(self, norms: GradNorms | None, total: Any, scaled: bool) -> None:
        """Add gradient statistics; ``total`` is the norm over all ranks, ``scaled`` gradients carry a loss scale."""
        device = "cpu" if norms is None else norms.squares.device
        whole = total.detach().float() if isinstance(total, Tensor) else torch.full((), float(total), device=device)
        self.tally.add_stats(step_stats(whole))
        if norms is not None:
            self.tally.add_stats(gradient_stats(norms, whole, scaled=scaled))


# If a step is too large for the driver, the workers measure the policy before the update as well. Together they see
# every token, once an epoch.

MOST_VALUES = 1024
"""Number of values that a rank sends for a quantile: any quantile of them is exact for some q' within 1 / 1024 of q."""


def before_update(batch: TokenBatch, *, full: bool, truncation: float | None = None) -> Stats:
    """Return statistics of the policy before the update from ``batch``, the batch of a loss, under the prefix
    ``BEFORE``.

    ``full``: also statistics that sort or compare tokens. ``truncation`` is the largest importance weight. Token ids
    are not used: the driver computes repetition from the responses that it reads. Empty if the batch has no old
    log-probs.
    """
    if batch.old_logp is None:
        return {}
    own = replace(batch, logp=batch.old_logp, old_logp=None, ids=None, clip=None, dual_clip=None, truncation=truncation)
    stats = {**observe(own, full=full), **observe_distributions(own)}
    return {BEFORE + name: stat for name, stat in stats.items() if not isinstance(stat, Pairs)}


def compacted(stats: Stats) -> Stats:
    """Return ``stats`` with at most :data:`MOST_VALUES` values for each quantile, because the driver sorts those of all
    ranks.

    Statistics of pairs are left out, because they are many, and the driver has pairs of the responses that it reads.
    """
    with torch.no_grad():
        return {name: stat.compact(MOST_VALUES) for name, stat in stats.items() if not isinstance(stat, Pairs)}


# verl makes several optimizer steps in one of its global steps: statistics that combine them.


@dataclass(frozen=True, slots=True)
class EverMarked(Marked):
    """Number of P tensors that were marked (as not finite) in any of several optimizer steps."""

    @override
    def merge(self, other: Self) -> Self:
        return replace(other, kept=self.together(other.kept))


def gradient_stats(norms: GradNorms, total: Tensor, *, scaled: bool) -> Stats:
    """Return each layer's gradient norm in the last optimizer step, and the number of parameters with NaN or Inf in
    any.

    ``total`` is the norm over all layers and ranks, 0-d; ``scaled`` gradients still carry a loss scale.
    """
    stats = norms.unscaled_stats(total) if scaled else norms.stats()
    marked = stats.get("nonfinite/grad")
    if isinstance(marked, Marked):
        stats["nonfinite/grad"] = EverMarked(marked.count, marked.kept, marked.held, marked.size)
    return {name: stat for name, stat in stats.items() if name not in ("optim/grad_norm", "optim/step_skipped")}


def step_stats(total: Tensor) -> Stats:
    """Return statistics of an optimizer step with gradient norm ``total`` over all ranks, 0-d.

    verl skips the step if the norm is not finite.
    """
    one, skipped = torch.ones_like(total, dtype=torch.bool), (~total.isfinite()).float()
    return {
        "optim/grad_norm": Latest.of(total, one),
        "optim/grad_norm_max": Max.of(total, one),
        "optim/step_skipped": Mean.of(skipped, one),
    }
