"""Scales of a step's loss, and how large they were in the steps of the run that were no spikes.

They cost a few reductions on the device at every step and travel with its norm. A batch whose advantages are all twelve
times as large as ever looks like any other batch from inside: only the run's own history tells.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rlwatch.gradloc.passes import LossPass
from rlwatch.gradloc.verification import screen
from rlwatch.stats import Stateful, mad, median
from rlwatch.tensors.masked import widen

HEALTHY = 8
"""Steps from which on there is a usual scale."""
KEPT = 100
"""Steps it is learnt of."""
FORMS = 16
"""The newest of them, of which tokens are kept too."""

SUMS = (
    "tokens", "pushed", "coefficient", "summed", "informative", "advantage", "rated", "ratio", "entropy coefficient",
    "aux coefficient",
)  # fmt: skip
"""Parts that add up over micro-batches and ranks; medians are weighted with the number of tokens they are of."""
TOPS = ("largest coefficient", "largest screen", "largest advantage")
"""Parts of which the largest of a rank's micro-batches counts; of several ranks their mean."""


def measured(one: LossPass) -> Tensor:
    """Parts of the scales of a micro-batch, (SUMS + TOPS,), on its device. Nothing is waited for, no number drawn."""
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
    return torch.stack([parts[name].to(torch.float64 if a.device.type == "cpu" else torch.float32) for name in parts])


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
    """Median of the ``values`` there, times how many they are; 0 of none."""
    return torch.where(where, values, torch.nan).flatten().nanmedian().nan_to_num(0.0) * where.sum()


def _largest(values: Tensor) -> Tensor:
    return values.abs().amax() if values.numel() else torch.zeros((), device=values.device)


def added_up(parts: Sequence[Sequence[float]]) -> list[float]:
    """The parts of this rank, of those of its micro-batches."""
    sums = [math.fsum(one[i] for one in parts) for i in range(len(SUMS))]
    tops = [max((one[i] for one in parts), default=0.0) for i in range(len(SUMS), len(SUMS) + len(TOPS))]
    return [*sums, *tops]


Scales = Mapping[str, float]
"""Scales of a step by name; what is not known is absent."""


def scales_of(parts: Sequence[float], norm: float, *, ranks: int = 1, scale: float = 1.0) -> dict[str, float]:
    """Scales of a step of the ``parts`` of all its ``ranks``, added up.

    ``norm`` is that of its gradient and ``scale`` the loss scale that coefficients still carry. Gradients are means
    over ranks, and so are the scales of coefficients.

    - ``tokens``; ``norm``; ``norm per token``: norm * sqrt(tokens), as the trigger compares it;
    - ``coefficient``, ``largest coefficient``: median and largest |dL/dlogp| of those that are not 0; ``summed
      coefficients``; ``largest screen``: of |dL/dlogp| (1 - p);
    - ``advantage``, ``largest advantage``: of |A|; ``ratio``: median |log-ratio| to the old policy, nats;
    - ``entropy coefficient``, ``auxiliary coefficient``: summed sizes of dL/dentropy and dL/daux;
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
    """Usual size of a scale: its median, and a robust standard deviation of its logarithm."""

    middle: float
    spread: float = 0.0

    def times(self, value: float) -> float:
        """Factor between ``value`` and the usual size; Inf where only the usual is 0, 1 where both are."""
        if self.middle > 0:
            return abs(value) / self.middle
        return math.inf if value else 1.0

    def upper(self, factor: float, deviations: float = 3.0) -> float:
        """Limit of what is usual: ``factor`` times the middle, or so many deviations where it scatters more."""
        return self.middle * math.exp(max(math.log(factor), deviations * self.spread))


class ScaleHistory(Stateful):
    """Scales of the last steps that were no spikes. Equal on all ranks if they are given the same numbers.

    Of the newest steps some tokens are kept as well (:func:`rlwatch.gradloc.loss_form.sample_of`), those of this rank:
    they tell how the loss weighed its terms.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("_steps",)

    def __init__(self, kept: int = KEPT) -> None:
        self._steps: deque[tuple[int, dict[str, float]]] = deque(maxlen=kept)
        self._samples: deque[tuple[int, np.ndarray]] = deque(maxlen=FORMS)

    def learn(self, step: int, scales: Scales, sample: np.ndarray | None = None) -> None:
        """A step that was no spike; one that is lower than before (back to a checkpoint) forgets what lay after it."""
        for rows in (self._steps, self._samples):
            while rows and rows[-1][0] > step:
                rows.pop()
        if scales.get("norm", 0.0) > 0:  # a step without a signal says nothing of sizes
            self._steps.append((step, dict(scales)))
            if sample is not None:
                self._samples.append((step, sample))

    @property
    def samples(self) -> list[np.ndarray]:
        """(n, COLUMNS) tokens of each of the newest steps."""
        return [sample for _, sample in self._samples]

    def usual(self) -> dict[str, Usual]:
        """Usual size of each scale that :data:`HEALTHY` steps have had."""
        every = [scales for _, scales in self._steps]
        names = dict.fromkeys(name for scales in every for name in scales)
        columns = {name: [abs(scales[name]) for scales in every if name in scales] for name in names}
        return {name: usual_of(values) for name, values in columns.items() if len(values) >= HEALTHY}


def usual_of(values: Sequence[float]) -> Usual:
    """Usual size of what had these ``values`` >= 0 (at least one)."""
    positive = [math.log(value) for value in values if value > 0]
    return Usual(median(values), mad(positive) if positive else 0.0)
