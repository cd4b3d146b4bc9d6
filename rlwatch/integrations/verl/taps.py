"""Taps in one worker: on the registry of policy losses, on the actor's loss function, on its optimizer step.

Every wrapper calls what it replaces exactly once, with what it was given, and returns what that returned; only
then (for gradients and spikes: only just before) does it look. Nothing here waits for the device, but for spikes of
the gradient: where the engine itself waits next.
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
from rlwatch.integrations.knobs import rates
from rlwatch.integrations.level import Level
from rlwatch.integrations.step_tally import BEFORE, StepTally, core, everything
from rlwatch.integrations.verl.batch import Clipping, columns_beside, loss_batch
from rlwatch.integrations.verl.compat import STEPS
from rlwatch.integrations.verl.localise import RankLocalising
from rlwatch.tensors.entropy import Pairs
from rlwatch.tensors.gradnorm import GradNorms, Marked
from rlwatch.tensors.histogram import observe_distributions
from rlwatch.tensors.mergeable import Latest, Max, Mean, Stats, Total, nonfinite
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch

TAPPED = "rlwatch_tapped_by"
"""Attribute of a wrapped policy loss that holds its owner."""

SPIKE = "spike of the gradient"
"""Name of the tap that localises spikes."""

UNCOLLECTED = 2**24
"""Tokens whose statistics are kept for a driver that does not ask for them; then they go."""

Loss = Callable[..., Any]


class WorkerTaps:
    """Reads one worker's actor while it updates, into the tally of the current step.

    Parameters
    ----------
    actor
        verl's ``TrainingWorker`` of the actor: its ``loss_fn`` and ``engine`` are wrapped on the instance.
    registry
        verl's registry of policy losses, by name; all entries are wrapped, new ones at the next :meth:`take`.
    bypass
        Whether the old log-probs are the rollout engine's: then only the update knows the trainer's own.
    truncation
        Largest weight of verl's token-level importance sampling, if it has one.
    gradients
        Reads the gradients of an engine by layer before its optimizer's step; None where that cannot be done.
    localising
        Localises spikes of the gradient, if enabled.
    """

    def __init__(
        self,
        actor: Any,
        registry: MutableMapping[str, Loss],
        seam: ErrorBoundary,
        level: Level,
        *,
        bypass: bool = False,
        truncation: float | None = None,
        gradients: Callable[[Any], GradNorms | None] | None = None,
        localising: RankLocalising | None = None,
    ) -> None:
        self.tally = StepTally()
        self._actor = actor
        self._registry = registry
        self.seam = seam
        self._level = level
        self._bypass = bypass
        self._truncation = truncation
        self._gradients = gradients
        self._localising = localising
        self._data: Any = None
        self._inside = False
        self.tokens = 0
        """Tokens whose statistics wait to be taken."""
        self.uncollected = UNCOLLECTED
        self._before = False

    def attach(self) -> None:
        """Put the wrappers in place, on what this verl has."""
        if self._level.includes(Level.TOKENS):
            if callable(getattr(self._actor, "loss_fn", None)):
                self._wrap_loss_fn()
            self._wrap_registry()
        if self._localising is not None:
            self._localising.attach()
        reads = self._level.includes(Level.GRADIENTS) or self._localising is not None
        if reads and lacking(self._actor.engine, STEPS) is None:
            self._wrap_optimizer_step()

    def take(self, *, before: bool = False) -> StepTally:
        """Hand over what was measured since the last call.

        ``before``: from now on measure the policy before the update as well.
        """
        tally, self.tally, self.tokens = self.tally, StepTally(), 0
        self.seam.attempt("policy loss", tally.measure)
        if self._before:
            tally.stats = compacted(tally.stats)
        self._before = before and not self._bypass
        if self._level.includes(Level.TOKENS):
            self.seam.attempt("policy losses", self._wrap_registry)
        return tally

    def _wrap_loss_fn(self) -> None:
        """The loss function is given the whole micro-batch; the policy losses, which it calls, only a part."""
        original = self._actor.loss_fn

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            self._data = kwargs.get("data")
            if self._localising is not None and self.seam.works(SPIKE) and torch.is_grad_enabled():
                self.seam.attempt("loss pass", self._localising.keep, kwargs.get("model_output"), self._data)
            try:
                result = original(*args, **kwargs)
            finally:
                self._data = None
            if torch.is_grad_enabled():
                self.seam.attempt("loss", self._after_loss, result)
            return result

        self._actor.loss_fn = tapped

    def _wrap_registry(self) -> None:
        """All entries that are not ours yet; the wrapper of another actor that lived in this process goes."""
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
                self.seam.attempt("policy loss", self._after_policy_loss, mode, signature, args, kwargs)
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
        """Return statistics of the loss, and of the policy before the update where that is asked for."""
        full = self._level.includes(Level.FULL)
        known = batch if self._bypass else replace(batch, ids=None, ref_logp=None, rollout_logp=None, entropy=None)
        stats = everything(known) if full else core(known)
        return stats | (before_update(batch, full=full, truncation=self._truncation) if self._before else {})

    def _wrap_optimizer_step(self) -> None:
        """Gradients are complete and unclipped when the engine's step begins; it returns their norm."""
        engine = self._actor.engine
        original = engine.optimizer_step

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            self.seam.attempt("learning rate", self._read_rates, engine)
            norms = self.seam.attempt("gradients", self._read_gradients, engine)
            if self._localising is not None:
                self.seam.attempt(SPIKE, self._localising.check, norms)
            total = original(*args, **kwargs)
            if self._level.includes(Level.GRADIENTS):
                scaled = getattr(engine, "scaler", None) is not None
                self.seam.attempt("gradients", self._after_step, norms, total, scaled)
            return total

        engine.optimizer_step = tapped

    def _read_rates(self, engine: Any) -> None:
        """Read the learning rates of this step; verl logs those of its scheduler after the scheduler's step."""
        for name, rate in rates(getattr(engine, "optimizer", None)).items():
            self.tally.add_stats({name: Latest.of(torch.tensor(rate), torch.ones(()))})

    def _read_gradients(self, engine: Any) -> GradNorms | None:
        return None if self._gradients is None else self._gradients(engine)

    def _after_step(self, norms: GradNorms | None, total: Any, scaled: bool) -> None:
        """``total`` is the norm over all ranks; ``scaled`` gradients carry a loss scale."""
        device = "cpu" if norms is None else norms.squares.device
        whole = total.detach().float() if isinstance(total, Tensor) else torch.full((), float(total), device=device)
        self.tally.add_stats(step_stats(whole))
        if norms is not None:
            self.tally.add_stats(gradient_stats(norms, whole, scaled=scaled))


# Of a step that is too large for the driver the workers measure the policy before the update as well: together they see
# every token, once an epoch, and where it lies.

MOST_VALUES = 1024
"""Values a rank sends of a quantile: any quantile of theirs is exact for some q' within 1 / 1024 of q."""


def before_update(batch: TokenBatch, *, full: bool, truncation: float | None = None) -> Stats:
    """Measure what the driver does of tokens, as far as the ``batch`` of a loss holds it, under names of their own.

    Not the ids: their repetitions are for the driver, in the rows that it reads.
    """
    if batch.old_logp is None:
        return {}
    own = replace(batch, logp=batch.old_logp, old_logp=None, ids=None, clip=None, dual_clip=None, truncation=truncation)
    stats = {**observe(own, full=full), **observe_distributions(own)}
    return {BEFORE + name: stat for name, stat in stats.items() if not isinstance(stat, Pairs)}


def compacted(stats: Stats) -> Stats:
    """``stats`` with at most :data:`MOST_VALUES` values of each quantile: the driver puts those of all ranks in order.

    Without pairs, which are many: the driver has pairs of the rows that it reads.
    """
    with torch.no_grad():
        return {name: stat.compact(MOST_VALUES) for name, stat in stats.items() if not isinstance(stat, Pairs)}


# verl makes several optimizer steps in one of its global steps: what is kept of each.


@dataclass(frozen=True, slots=True)
class EverMarked(Marked):
    """Number of P tensors that were marked at any of several times."""

    @override
    def merge(self, other: Self) -> Self:
        return replace(other, kept=self.together(other.kept))


def gradient_stats(norms: GradNorms, total: Tensor, *, scaled: bool) -> Stats:
    """Per-layer norms of the last step, and how many parameters were not finite in any of them.

    ``total`` is the norm of all layers and ranks, 0-d; ``scaled`` gradients still carry a loss scale.
    """
    stats = norms.unscaled_stats(total) if scaled else norms.stats()
    marked = stats.get("nonfinite/grad")
    if isinstance(marked, Marked):
        stats["nonfinite/grad"] = EverMarked(marked.count, marked.kept, marked.held, marked.size)
    return {name: stat for name, stat in stats.items() if name not in ("optim/grad_norm", "optim/step_skipped")}


def step_stats(total: Tensor) -> Stats:
    """Statistics of a step with gradient norm ``total`` over all ranks, 0-d: verl skips it if that is not finite."""
    one, skipped = torch.ones_like(total, dtype=torch.bool), (~total.isfinite()).float()
    return {
        "optim/grad_norm": Latest.of(total, one),
        "optim/grad_norm_max": Max.of(total, one),
        "optim/step_skipped": Mean.of(skipped, one),
    }
