"""The signals a forecast goes by, and their last rows against the level that the run started from.

Each is read from the first of some metrics that the run logs. All are judged against the run's own first steps, so only
the shape of a value's change matters: never its level, never the step, the learning rate or the size of the weights
(they tell recipes apart, not runs in trouble).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Scale(StrEnum):
    """Measures of a change against the baseline b.

    ``RATIO``: log((x + e) / (b + e)), with e = max(b / 20, ``floor``), for what is positive and may be near 0.
    ``SHARE``: x - b, for shares in [0, 1]. ``NATS``: (x - b) / ``floor``, for log-probs.
    ``SPREAD``: (x - b) / spread of the rewards at the start, for rewards, whose unit nobody knows.
    """

    RATIO = "ratio"
    SHARE = "share"
    NATS = "nats"
    SPREAD = "spread"


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal. ``metrics``: canonical names, the best first; ``complement``: 1 - x is what is read."""

    name: str
    metrics: tuple[str, ...]
    scale: Scale
    floor: float = 1.0
    complement: bool = False

    def read(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """The metric there is, and its value (NaN and infinities as they are); None where none was measured."""
        for name in self.metrics:
            value = metrics.get(name)
            if value is not None:
                return name, 1.0 - value if self.complement else value
        return None


def _ratio(name: str, floor: float, *metrics: str, complement: bool = False) -> Signal:
    return Signal(name, metrics, Scale.RATIO, floor, complement)


def _share(name: str, *metrics: str) -> Signal:
    return Signal(name, metrics, Scale.SHARE)


def _nats(name: str, unit: float, *metrics: str) -> Signal:
    return Signal(name, metrics, Scale.NATS, unit)


SIGNALS: tuple[Signal, ...] = (
    Signal("reward", ("reward/mean",), Scale.SPREAD, 0.02),
    _ratio("reward_std", 0.02, "reward/std", "reward/group_std"),
    _share("zero_std", "reward/zero_std_frac"),
    _ratio("entropy", 0.01, "policy/entropy"),
    _ratio("entropy_pos", 0.01, "policy/entropy_pos"),
    _ratio("entropy_neg", 0.01, "policy/entropy_neg"),
    _ratio("entropy_p10", 0.003, "policy/entropy_p10"),
    _ratio("entropy_p90", 0.02, "policy/entropy_p90"),
    _nats("logp", 0.25, "policy/logp_mean"),
    _nats("logp_min", 2.0, "policy/logp_min"),
    _nats("logp_positive", 0.25, "lld/logp_positive"),
    _share("displaced", "lld/displaced_frac"),
    _ratio("negative_push", 0.02, "lld/negative_push"),
    _ratio("grad", 1e-4, "optim/grad_norm"),
    _ratio("kl_ref", 0.02, "policy/kl_ref_k3", "policy/kl_ref", "policy/kl_ref_k2", "policy/kl_ref_k1"),
    _ratio("kl_ref_tail", 0.1, "policy/kl_ref_p99", "policy/kl_ref_max"),
    _ratio("kl_old", 1e-4, "policy/kl_old"),
    _ratio("ratio_spread", 1e-3, "ratio/ess", complement=True),
    _ratio("ratio_max", 0.05, "ratio/max"),
    _share("clip_low", "ratio/clipfrac_low"),
    _share("clip_high", "ratio/clipfrac_high", "ratio/clipfrac"),
    _ratio("mismatch", 1e-4, "mismatch/k3", "mismatch/kl"),
    _ratio("mismatch_gap", 2e-3, "mismatch/logp_absdiff", "mismatch/log_ppl_absdiff"),
    _ratio("mismatch_tail", 0.01, "mismatch/logp_absdiff_p99", "mismatch/logp_absdiff_max"),
    _ratio("mismatch_prob", 0.01, "mismatch/prob_absdiff_max"),
    _ratio("mismatch_weights", 1e-3, "mismatch/ess", complement=True),
    _ratio("mismatch_sequences", 1e-3, "mismatch/seq_ess", complement=True),
    _share("mismatch_cut", "mismatch/tis_truncated", "mismatch/icepop_masked"),
    _ratio("length", 1.0, "len/mean"),
    _share("cut_off", "len/clipped"),
    _share("repetition", "text/repetition"),
    _ratio("advantage", 0.1, "adv/max"),
)
"""In the order of the feature vector. Adding one asks for a model trained anew."""
SPREAD_METRICS = ("reward/std", "reward/group_std")
"""What a change of the reward is measured in."""
BY_SIGNAL = {signal.name: signal for signal in SIGNALS}


# The last rows of a run's signals, and the level they started from.

Floats = npt.NDArray[np.float64]

ROWS = 64
"""Rows kept: 60 steps at one row a step, and more than that at a coarser cadence."""
WARM_FROM, WARM_UNTIL = 10, 40
"""Steps of a run, counted from its first, that make its baseline."""
LEAST_WARM = 5
"""Rows a baseline needs: a coarse log goes on past ``WARM_UNTIL`` until it has them."""

_RATIO = np.array([each.scale is Scale.RATIO for each in SIGNALS])
_FLOOR = np.array([each.floor for each in SIGNALS])
_UNIT = np.array([each.floor if each.scale is Scale.NATS else 1.0 for each in SIGNALS])
_SPREAD = np.array([each.scale is Scale.SPREAD for each in SIGNALS])
_KL = np.array([each.name.startswith("kl_ref") for each in SIGNALS])


class History:
    """Raw values of every signal in the last rows; missing and non-finite ones are NaN here, and counted.

    Each signal keeps to the metric it was first read from: another estimator has another level. ``broken``: of each
    row, whether a signal that had been a number no longer was; ``broken_metric``: the metric of which that was last so.
    What never was a number is switched off (TRL's ``kl`` at beta = 0), not broken.
    """

    def __init__(self) -> None:
        self.steps: Floats = np.empty(0)
        self.raw: Floats = np.empty((0, len(SIGNALS)))
        self.broken: Floats = np.empty(0)
        self.broken_metric = ""
        self._numbers = np.zeros(len(SIGNALS), dtype=bool)
        self._metric: list[str | None] = [None] * len(SIGNALS)
        self._warm: list[Floats] = []
        self._spread: list[float] = []
        self._first: int | None = None
        self._baseline: Floats | None = None
        self._unit: Floats = _UNIT

    @property
    def source(self) -> tuple[str | None, ...]:
        """Metric that each signal is read from; None where the run has none."""
        return tuple(self._metric)

    @property
    def warm_rows(self) -> int:
        """Rows that the baseline has so far."""
        return len(self._warm)

    @property
    def baseline(self) -> Floats | None:
        """Median of each signal over the first steps; None before it is complete."""
        return self._baseline

    def since_start(self, step: int) -> int:
        """Steps since the first."""
        return 0 if self._first is None else step - self._first

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a row. A step that is not beyond the last one takes back all from there on."""
        self._first = step if self._first is None else min(self._first, step)
        row, broken = self._read(metrics)
        kept = (self.steps < step).nonzero()[0][-(ROWS - 1) :]
        self.steps = np.append(self.steps[kept], float(step))
        self.raw = np.vstack((self.raw[kept], row))
        self.broken = np.append(self.broken[kept], float(broken))
        self._learn(step, row, metrics)

    def forget_reference(self) -> None:
        """The reference was reset: KL to the old one says nothing of KL to the new one."""
        self.raw[:, _KL] = math.nan

    def changes(self, rows: Floats | None = None) -> Floats:
        """Changes against the baseline, in the scale of each signal: (rows, signals)."""
        raw, base = self.raw if rows is None else rows, self._baseline
        if base is None:
            return np.full_like(raw, math.nan)
        edge = np.maximum(0.05 * np.abs(base), _FLOOR)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(np.maximum(raw + edge, 1e-12) / np.maximum(base + edge, 1e-12))
        return np.where(_RATIO, ratio, (raw - base) / self._unit)

    @property
    def start(self) -> Floats:
        """The baseline in the unit of the changes; NaN before it is complete."""
        base = self._baseline
        return np.full(len(SIGNALS), math.nan) if base is None else base / self._unit

    def warm_changes(self) -> Floats:
        """The same of the baseline's own rows."""
        return self.changes(np.array(self._warm))

    def _read(self, metrics: Mapping[str, float]) -> tuple[Floats, bool]:
        row, broken = np.full(len(SIGNALS), math.nan), False
        for i, signal in enumerate(SIGNALS):
            found = signal.read(metrics)
            if found is None:
                continue
            name, value = found
            self._metric[i] = self._metric[i] or name
            finite = math.isfinite(value)
            if not finite and self._numbers[i]:
                broken, self.broken_metric = True, name
            self._numbers[i] |= finite
            if name == self._metric[i] and finite:
                row[i] = value
        return row, broken

    def _learn(self, step: int, row: Floats, metrics: Mapping[str, float]) -> None:
        since = self.since_start(step)
        if self._baseline is not None or since < WARM_FROM:
            return
        if since >= WARM_UNTIL and len(self._warm) >= LEAST_WARM:
            self._freeze()
            return
        self._warm.append(row)
        spread = next((metrics[name] for name in SPREAD_METRICS if name in metrics), math.nan)
        self._spread += [spread] if math.isfinite(spread) else []

    def _freeze(self) -> None:
        warm = np.array(self._warm)
        seen = np.isfinite(warm).sum(0) >= min(LEAST_WARM, 3)
        self._baseline = np.full(len(SIGNALS), math.nan)
        self._baseline[seen] = np.nanmedian(warm[:, seen], axis=0)
        logged_spread = float(np.median(self._spread)) if self._spread else 0.0
        self._unit = np.where(_SPREAD, max(logged_spread, self._own_spread(warm), 1e-6), _UNIT)

    @staticmethod
    def _own_spread(warm: Floats) -> float:
        """Spread of the rows' means, where the run tells none, or none within a row."""
        values = warm[:, _SPREAD]
        values = values[np.isfinite(values)]
        return float(np.std(values)) if values.size else 0.0
