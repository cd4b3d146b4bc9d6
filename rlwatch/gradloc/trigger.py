"""Decision whether to localise a step: its gradient norm is a spike compared with this run's usual norms, and time is
left.

The history of scales shows which parts of the loss have grown.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlwatch.clock import Clock, SystemClock
from rlwatch.gradloc.passes import LossPass
from rlwatch.gradloc.verification import screen
from rlwatch.stats import Stateful, mad, median, quantile
from rlwatch.tensors.masked import widen

# Scales of a step's loss, and their values in the steps of the run that were no spikes.
#
# They cost a few reductions on the device at every step and are copied with its norm. A batch whose advantages are all
# twelve times as large as usual looks like any other batch by itself: only the run's own history shows the difference.


HEALTHY = 8
"""Number of steps without a spike from which on the usual size of a scale is known."""
KEPT = 100
"""Number of steps from which the usual size of a scale is learnt."""
FORMS = 16
"""Number of the newest steps of which some tokens are kept, too."""

SUMS = (
    "tokens", "pushed", "coefficient", "summed", "informative", "advantage", "rated", "ratio", "entropy coefficient",
    "aux coefficient",
)  # fmt: skip
"""Parts of the scales that are summed over micro-batches and ranks; medians are weighted with their number of
tokens.
"""
TOPS = ("largest coefficient", "largest screen", "largest advantage")
"""Parts of the scales of which the largest over a rank's micro-batches counts; over several ranks their mean."""


def measured(one: LossPass) -> Tensor:
    """Return sums and largest values of one micro-batch, (SUMS + TOPS,), from which the scales of the step are computed
    (:func:`scales_of`).

    The result stays on the device: the call does not wait for it, and draws no random number.
    """
    on = one.tokens.mask.bool()
    a = torch.where(on, one.coefficient().detach().float().nan_to_num(0.0, 0.0, 0.0), 0.0)
    zero = torch.zeros((), device=a.device)
    pushed = a != 0
    screened = torch.where(on, screen(one).detach().float().nan_to_num(0.0, 0.0, 0.0), 0.0)
    parts = dict.fromkeys((*SUMS, *TOPS), zero)
    parts |= {
        "tokens": on.sum(),
        "pushed": pushed.sum(),
        "coefficient": _weighted_median(a.abs(), pushed),
        "summed": a.abs().sum(),
        "entropy coefficient": one.coefficient("entropy").detach().float().abs().nan_to_num(0.0, 0.0, 0.0).sum(),
        "aux coefficient": one.coefficient("aux").detach().float().abs().nan_to_num(0.0, 0.0, 0.0),
        "largest coefficient": _largest(a),
        "largest screen": _largest(screened),
    }
    parts |= _of_advantages(one, on) | _of_ratio(one, on)
    wide = torch.float64 if a.device.type == "cpu" else torch.float32
    return torch.stack([x if x.is_floating_point() else x.to(wide) for x in parts.values()]).to(wide)


def _of_advantages(one: LossPass, on: Tensor) -> dict[str, Tensor]:
    advantages = one.tokens.token_advantages
    if advantages is None:
        return {}
    size = torch.where(on, widen(advantages).expand(on.shape).float().nan_to_num(0.0, 0.0, 0.0), 0.0)
    informative = size != 0
    return {
        "informative": informative.sum(),
        "advantage": _weighted_median(size.abs(), informative),
        "largest advantage": _largest(size),
    }


def _of_ratio(one: LossPass, on: Tensor) -> dict[str, Tensor]:
    if one.tokens.old_logp is None:
        return {}
    apart = (widen(one.tokens.logp) - widen(one.tokens.old_logp)).float().nan_to_num(0.0, 0.0, 0.0)
    return {"rated": on.sum(), "ratio": _weighted_median(apart.abs(), on)}


def _weighted_median(values: Tensor, where: Tensor) -> Tensor:
    """Return the median of the selected ``values``, times how many they are; 0 if there are none."""
    return torch.where(where, values, torch.nan).flatten().nanmedian().nan_to_num(0.0) * where.sum()


def _largest(values: Tensor) -> Tensor:
    return values.abs().amax() if values.numel() else torch.zeros((), device=values.device)


def added_up(parts: Sequence[Sequence[float]]) -> list[float]:
    """Return the sums and largest values of this rank, combined from those of its micro-batches (``parts``, see
    :func:`measured`).
    """
    sums = [math.fsum(one[i] for one in parts) for i in range(len(SUMS))]
    tops = [max((one[i] for one in parts), default=0.0) for i in range(len(SUMS), len(SUMS) + len(TOPS))]
    return [*sums, *tops]


Scales = Mapping[str, float]
"""Scales of a step by name; scales that are not known are absent."""


def scales_of(parts: Sequence[float], norm: float, *, ranks: int = 1, scale: float = 1.0) -> dict[str, float]:
    """Return the scales of a step from ``parts``, combined over its micro-batches and summed over its ``ranks``.

    ``norm`` is that of its gradient and ``scale`` the loss scale that coefficients still carry. Gradients are means
    over ranks, and so are the scales of coefficients.

    - ``tokens``: their number; ``norm``; ``norm per token``: norm * sqrt(tokens), as the trigger compares it;
    - ``coefficient``, ``largest coefficient``: median and largest |dL/dlogp| of those that are not 0; ``summed
      coefficients``; ``largest screen``: the largest |dL/dlogp| (1 - p);
    - ``advantage``, ``largest advantage``: median and largest |A|; ``ratio``: median |log-ratio| to the old policy,
      nats;
    - ``entropy coefficient``, ``auxiliary coefficient``: summed |dL/dentropy| and |dL/daux|;
    - ``reach``: norm / summed coefficients, the gradient of a log-prob as far as tokens agree.
    """
    known = dict(zip((*SUMS, *TOPS), parts, strict=True))
    unit = 1 / (scale * ranks)
    scales = {"tokens": known["tokens"], "norm": norm, "norm per token": norm * math.sqrt(max(1.0, known["tokens"]))}
    scales |= {
        "summed coefficients": known["summed"] * unit,
        "entropy coefficient": known["entropy coefficient"] * unit,
        "auxiliary coefficient": known["aux coefficient"] * unit,
    }
    if known["pushed"]:
        scales["coefficient"] = known["coefficient"] / known["pushed"] * unit
        scales |= {name: known[name] / ranks * unit for name in TOPS[:2]}
        scales["reach"] = norm / scales["summed coefficients"]
    if known["informative"]:
        scales["advantage"] = known["advantage"] / known["informative"]
        scales["largest advantage"] = known["largest advantage"] / ranks
    if known["rated"]:
        scales["ratio"] = known["ratio"] / known["rated"]
    return {name: value for name, value in scales.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True)
class Usual:
    """Usual size of a quantity in a run (coefficient, advantage, ratio...): its median, and a robust standard deviation
    of its logarithm.
    """

    middle: float
    spread: float = 0.0

    def times(self, value: float) -> float:
        """Return the factor between ``value`` and the usual size; Inf if only the usual size is 0, 1 if both are."""
        if self.middle > 0:
            return abs(value) / self.middle
        return math.inf if value else 1.0

    def upper(self, factor: float, deviations: float = 3.0) -> float:
        """Return the largest usual value: ``factor`` times the median, or ``deviations`` standard deviations above it
        if that is more.
        """
        return self.middle * math.exp(max(math.log(factor), deviations * self.spread))


class ScaleHistory(Stateful):
    """Scales (sizes of coefficients, advantages, ratios...) of the last steps that were no spikes; equal on all ranks
    that are given the same numbers.

    Some tokens of the newest steps are kept as well (:func:`rlwatch.gradloc.loss_form.sample_of`), those of this rank:
    they show how the loss weighted its terms. ``kept`` is the number of steps.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("_steps",)

    def __init__(self, kept: int = KEPT) -> None:
        self._steps: deque[tuple[int, dict[str, float]]] = deque(maxlen=kept)
        self._samples: deque[tuple[int, np.ndarray]] = deque(maxlen=FORMS)

    def learn(self, step: int, scales: Scales, sample: np.ndarray | None = None) -> None:
        """Add the scales (sizes of coefficients, advantages...) of ``step``, which was no spike, with a ``sample`` of
        its tokens (n, COLUMNS).

        A step that is lower than before (back to a checkpoint) removes the later ones.
        """
        for rows in (self._steps, self._samples):
            while rows and rows[-1][0] > step:
                rows.pop()
        if scales.get("norm", 0.0) > 0:  # a step without a signal has no information on sizes
            self._steps.append((step, dict(scales)))
            if sample is not None:
                self._samples.append((step, sample))

    @property
    def samples(self) -> list[np.ndarray]:
        """Return the kept tokens (n, COLUMNS) of each of the newest steps."""
        return [sample for _, sample in self._samples]

    def usual(self) -> dict[str, Usual]:
        """Return name of a scale -> its usual size, for each scale that at least :data:`HEALTHY` steps had."""
        every = [scales for _, scales in self._steps]
        names = dict.fromkeys(name for scales in every for name in scales)
        columns = {name: [abs(scales[name]) for scales in every if name in scales] for name in names}
        return {name: usual_of(values) for name, values in columns.items() if len(values) >= HEALTHY}


def usual_of(values: Sequence[float]) -> Usual:
    """Return the usual size of a quantity that had these ``values`` >= 0 (at least one)."""
    positive = [math.log(value) for value in values if value > 0]
    return Usual(median(values), mad(positive) if positive else 0.0)


# The decision to localise a step: its gradient norm is a spike, and there is time left to look.


PUBLISHED = 640.0
"""Threshold of a single token in GradLoc's published run (Qwen3-4B, GRPO, token mean)."""
RELEASED = 100.0
"""Default of the same threshold in GradLoc's released code."""
SILENT = 20.0
"""Factor below the upper decile under which norms do not count for the level: batches whose groups mostly agree."""
EARLY = 8
"""Number of rows from which a preliminary level exists while the run's own is learnt; the detector of spikes uses as
many.
"""
EARLY_FACTOR = 6.0
"""Factor over the upper decile that is a spike in any case, so that every spike that the detector reports is
localised.
"""
LASTING = 20
"""Number of rows of which more than half must be above the level for a new level to be adopted."""
FIXED = "above the fixed threshold"
"""Reason of a decision to localise a step that is within the run's own level, as far as that is known."""


@dataclass(frozen=True, slots=True)
class TriggerDecision:
    """Decision whether to localise a step. ``threshold`` is in the unit of the step's norm, None if none was compared.

    ``reason`` explains why the step is localised, or why a norm far above earlier ones cannot be judged yet; else it is
    empty.
    """

    fires: bool
    threshold: float | None
    reason: str = ""


class Trigger(Stateful):
    """Detector of spikes, which compares each step's gradient norm with the run's own level, per token.

    If token gradients are independent noise, the norm of their mean over n tokens falls as 1 / sqrt(n) (the noise
    model of GradLoc, Tencent Hunyuan 2026). So ``norm * sqrt(n)`` estimates the norm of a single token's gradient,
    whatever the batch size, and the level is learnt from it: median and median absolute deviation of its logarithm.
    Norms above the threshold do not enter the level until they are the rule; zero norms (no group with a signal) are
    ignored. It is plain arithmetic: ranks that are given the same numbers decide alike.

    Parameters
    ----------
    factor
        Smallest multiple of the level that is a spike, > 1; None: the fixed threshold only.
    deviations
        Smallest distance from the level in (robust, log) standard deviations, for runs whose norms scatter widely.
    token_threshold
        Fixed threshold T for ``norm * sqrt(n)``, as published (:data:`PUBLISHED`, :data:`RELEASED`); None: none. It
        needs no warm-up.
    window
        Number of steps from which the level is learnt.
    warm_up
        Number of steps after which ``factor`` and ``deviations`` apply. From :data:`EARLY` steps on a norm of
        :data:`EARLY_FACTOR` times the upper decile of earlier ones is a spike.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("_level", "_recent")

    def __init__(
        self,
        *,
        factor: float | None = 4.0,
        deviations: float = 5.0,
        token_threshold: float | None = None,
        window: int = 100,
        warm_up: int = 20,
    ) -> None:
        self.factor = factor
        self.deviations = deviations
        self.token_threshold = token_threshold
        self.warm_up = warm_up
        self._level: deque[tuple[int, float]] = deque(maxlen=window)
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=LASTING)

    def check(self, step: int, norm: float, tokens: int) -> TriggerDecision:
        """Decide whether to localise one optimizer step, then learn from its norm.

        Several optimizer steps may share a ``step``. A lower step than before (back to a checkpoint) removes the later
        ones.

        Parameters
        ----------
        step
            The trainer's global step.
        norm
            Gradient norm of all ranks before clipping, without any loss scale.
        tokens
            Number of response tokens in the step, over all ranks and micro-batches.
        """
        self._forget_after(step)
        if not math.isfinite(norm):
            return TriggerDecision(True, self._in_norms(self._limit(), tokens), "non-finite")
        if norm <= 0.0 or tokens <= 0:
            return TriggerDecision(False, self._in_norms(self._limit(), tokens))
        value = math.log(norm) + 0.5 * math.log(tokens)  # of norm * sqrt(n), the norm of a single token's gradient
        limit = self._limit()
        decision = self._judge(value, limit, tokens)
        self._learn(step, value, limit is not None and value > limit)
        return decision

    def _judge(self, value: float, own: float | None, tokens: int) -> TriggerDecision:
        if own is not None and value > own:
            times = math.exp(own - self._middle())
            return TriggerDecision(True, self._in_norms(own, tokens), f"above {times:.3g} times the run's own level")
        fixed = None if self.token_threshold is None else math.log(self.token_threshold)
        if fixed is not None and value > fixed:
            return TriggerDecision(True, self._in_norms(fixed, tokens), FIXED)
        lowest = min((limit for limit in (own, fixed) if limit is not None), default=None)
        return TriggerDecision(False, self._in_norms(lowest, tokens), self._too_early(value))

    def _too_early(self, value: float) -> str:
        """Return the reason why a norm far above all others is not judged yet; empty otherwise."""
        seen = len(self._level)
        if self.factor is None or not 0 < seen < min(EARLY, self.warm_up):
            return ""
        above = value - max(value for _, value in self._level)
        if not above > math.log(EARLY_FACTOR):
            return ""
        return f"it is {math.exp(above):.3g} times the largest so far, but {seen} steps tell no level: {EARLY} do"

    def _limit(self) -> float | None:
        """Return the run's own threshold as a logarithm, per token; None while it warms up."""
        if self.factor is None or len(self._level) < min(EARLY, self.warm_up):
            return None
        level = self._informative()
        plain = quantile(level, 0.9) + math.log(max(EARLY_FACTOR, self.factor))
        if len(self._level) < self.warm_up:
            return plain
        # Norms are multiplicative, hence logarithms; median and MAD, so that up to half of the rows may be spikes.
        return min(plain, median(level) + max(math.log(self.factor), self.deviations * mad(level)))

    def _middle(self) -> float:
        return median(self._informative())

    def _informative(self) -> Sequence[float]:
        """Return rows of the level that had a signal; others would draw it down to noise."""
        values = [value for _, value in self._level]
        least = quantile(values, 0.9) - math.log(SILENT)
        return [value for value in values if value >= least]

    def _learn(self, step: int, value: float, above: bool) -> None:
        self._recent.append((step, value, above))
        if not above:
            self._level.append((step, value))
        elif sum(above for _, _, above in self._recent) > LASTING // 2:
            adopted = [(step, value) for step, value, above in self._recent if above]
            self._level.clear()
            self._level.extend(adopted)
            self._recent.clear()

    def _forget_after(self, step: int) -> None:
        for rows in (self._level, self._recent):
            while rows and rows[-1][0] > step:
                rows.pop()

    @staticmethod
    def _in_norms(limit: float | None, tokens: int) -> float | None:
        return None if limit is None or tokens <= 0 else math.exp(limit - 0.5 * math.log(tokens))


# The time budget: a share of the training time.


class LocalisationBudget(Stateful):
    """Time budget that keeps localisation below a share of the training time.

    ``spent <= share * (elapsed - spent) + allowance`` holds at any time if no localisation takes longer than was
    estimated. Time beyond an estimate is a debt that later localisations wait for. The clock is this process's own: if
    several ranks localise together, one decides and sends the decision to the others.

    Parameters
    ----------
    share
        Share of the training time that may be spent, in [0, 1); 0.01 is 1 %.
    allowance_s
        Seconds that may be spent before any training time has passed. The first localisation, and the first of a
        non-finite gradient, are granted beyond it if need be: the allowance grows by what they lack.
    clock
        Returns the training time so far; only its intervals count.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("allowance_s", "spent_s", "granted", "refused", "traced")

    def __init__(self, *, share: float = 0.01, allowance_s: float = 30.0, clock: Clock | None = None) -> None:
        if not 0.0 <= share < 1.0:
            raise ValueError(f"share is a part of the training time within [0, 1), got {share:g}")
        self.share = share
        self.allowance_s = allowance_s
        self.spent_s = 0.0
        self.granted = 0
        self.refused = 0
        self.traced = False
        self._clock = clock or SystemClock()
        self._start = self._clock.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since training began, including the time spent on localisation."""
        return self._clock.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Return the seconds that may be spent on localisation now; negative while there is a debt."""
        return self.share * max(0.0, self.elapsed_s - self.spent_s) + self.allowance_s - self.spent_s

    def may(self, estimate_s: float, *, non_finite: bool = False) -> bool:
        """Return True if a localisation that takes about ``estimate_s`` seconds is within the budget.

        Refusals are counted. The first localisation, and the first of a ``non_finite`` gradient, are always granted.
        """
        due = self.granted == 0 or (non_finite and not self.traced)
        lacking = estimate_s - self.left_s
        if lacking > 0.0 and not due:
            self.refused += 1
            return False
        self.allowance_s += max(0.0, lacking)
        self.granted += 1
        self.traced = self.traced or non_finite
        return True

    def spent(self, seconds: float) -> None:
        """Add the ``seconds`` that a localisation took, once it is over."""
        self.spent_s += max(0.0, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers; when it is loaded, the elapsed time continues from there."""
        return {**super().state_dict(), "elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self._start = self._clock.monotonic() - state["elapsed_s"]
