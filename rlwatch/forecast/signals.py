"""Input signals of the forecaster: recent values of metrics relative to the level at the start of the run.

Each signal is read from the first of several metrics that the run logs. All are relative to the run's own first steps,
so only the shape of a change matters. Level, step, learning rate and size of the weights are not used, since they
distinguish recipes and not runs in trouble.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlwatch.records import ByNames
from rlwatch.stats import median


class ChangeScale(StrEnum):
    """Units for the change of a signal against its baseline b.

    ``RATIO``: log((x + e) / (b + e)), with e = max(b / 20, ``floor``), for positive values that may be near 0.
    ``SHARE``: x - b, for shares in [0, 1]. ``NATS``: (x - b) / ``floor``, for log-probs. ``SPREAD``: (x - b) / spread
    of the rewards at the start, for rewards, whose unit is unknown.
    """

    RATIO = "ratio"
    SHARE = "share"
    NATS = "nats"
    SPREAD = "spread"


@dataclass(frozen=True, slots=True)
class Signal:
    """One input signal. ``metrics``: canonical names, the first available of which is read;
    ``complement``: as 1 - x.
    """

    name: str
    metrics: tuple[str, ...]
    scale: ChangeScale
    floor: float = 1.0
    complement: bool = False


def _ratio(name: str, floor: float, *metrics: str, complement: bool = False) -> Signal:
    return Signal(name, metrics, ChangeScale.RATIO, floor, complement)


def _share(name: str, *metrics: str) -> Signal:
    return Signal(name, metrics, ChangeScale.SHARE)


def _nats(name: str, unit: float, *metrics: str) -> Signal:
    return Signal(name, metrics, ChangeScale.NATS, unit)


SIGNALS: tuple[Signal, ...] = (
    Signal("reward", ("reward/mean",), ChangeScale.SPREAD, 0.02),
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
"""Input signals in the order of the feature vector; adding one requires training a new model."""
SPREAD_METRICS = ("reward/std", "reward/group_std")
"""Metrics that give the spread of the rewards, the unit for changes of the reward."""
BY_SIGNAL = {signal.name: signal for signal in SIGNALS}


def _places_of(names: tuple[str, ...]) -> tuple[tuple[int, str, bool], ...]:
    """Signals that a row with these names has, with the metric of each: rows of a run nearly all name the same."""
    there = set(names)
    firsts = (next((name for name in signal.metrics if name in there), None) for signal in SIGNALS)
    return tuple((i, name, SIGNALS[i].complement) for i, name in enumerate(firsts) if name is not None)


_places = ByNames(_places_of)


# The last rows of a run's signals, and the level they started from.

Floats = npt.NDArray[np.float64]

ROWS = 64
"""Rows kept: 60 steps at one row a step, and more than that at a coarser cadence."""
WARM_FROM, WARM_UNTIL = 10, 40
"""First and last of the steps, counted from the run's first, that make its baseline."""
LEAST_WARM = 5
"""Rows that a baseline needs; for a coarse log it extends past ``WARM_UNTIL`` until it has them."""
LEAST_SPARSE, SPARSE_UNTIL = 3, 60
"""Rows that suffice for the baseline of a very coarse log, and the step from which they do."""

_RATIO = np.array([each.scale is ChangeScale.RATIO for each in SIGNALS])
_FLOOR = np.array([each.floor for each in SIGNALS])
_UNIT = np.array([each.floor if each.scale is ChangeScale.NATS else 1.0 for each in SIGNALS])
_SPREAD = np.array([each.scale is ChangeScale.SPREAD for each in SIGNALS])
_KL = np.array([each.name.startswith("kl_ref") for each in SIGNALS])


class SignalNames(NamedTuple):
    """Names of the metrics read up to a row: one for each signal (None: not logged), and the last that
    was not finite.
    """

    source: tuple[str | None, ...]
    broken: str


class SignalHistory:
    """Changes of every signal in the last rows against the run's start; missing and non-finite values are NaN.

    Each signal keeps to the metric it was first read from, since another estimator has another level. ``broken``: for
    each row, True if a signal that had been a number no longer was; ``broken_metric``: the metric that last was. A
    signal that never was a number is switched off (TRL's ``kl`` at beta = 0), not broken. :attr:`at`, :attr:`changes`
    and :attr:`broken` hold :data:`ROWS` rows before the newest ones; if the run has had fewer, the first of them are
    placeholders at step -inf, NaN, unbroken.
    """

    def __init__(self) -> None:
        self.at: Floats = np.full(ROWS, -math.inf)
        self.changes: Floats = np.full((ROWS, len(SIGNALS)), math.nan)
        """(rows, signals), raw values before the baseline is known."""
        self.broken: Floats = np.zeros(ROWS)
        self.broken_metric = ""
        self.source: tuple[str | None, ...] = (None,) * len(SIGNALS)
        """Metric from which each signal is read; None where the run has logged none so far."""
        self._numbers = [False] * len(SIGNALS)
        self._warm: list[Floats] = []
        self._spread: list[float] = []
        self._first: int | None = None
        self._baseline: Floats | None = None
        self._edge: Floats = _FLOOR
        self._start_ratio: Floats = _FLOOR
        self._unit: Floats = _UNIT

    @property
    def steps(self) -> Floats:
        """Steps of the rows that are kept."""
        return self.at[np.isfinite(self.at)]

    @property
    def warm_rows(self) -> int:
        """Number of rows in the baseline so far."""
        return len(self._warm)

    @property
    def baseline(self) -> Floats | None:
        """Median of each signal over the first steps; None before it is complete."""
        return self._baseline

    def since_start(self, step: int) -> int:
        """Return the number of steps from the run's first row to ``step``."""
        return 0 if self._first is None else step - self._first

    def extend(self, steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> list[SignalNames]:
        """Add rows of ascending ``steps``, and return the names read for each; one row a call before the baseline is
        complete.

        A step that is not beyond the last one discards all rows from that step on.
        """
        self._first = steps[0] if self._first is None else min(self._first, steps[0])
        kept = slice(0, len(self.at) if self.at[-1] < steps[0] else int((self.at < steps[0]).sum()))
        raw, broken, read = np.full((len(rows), len(SIGNALS)), math.nan), np.zeros(len(rows)), []
        for i, metrics in enumerate(rows):
            broken[i] = self._read(metrics, raw[i])
            read.append(SignalNames(self.source, self.broken_metric))
        new = raw if self._baseline is None else self.change(raw)
        self.at = _joined(self.at[kept], np.array(steps, dtype=np.float64), -math.inf)
        self.changes = _joined(self.changes[kept], new, math.nan)
        self.broken = _joined(self.broken[kept], broken, 0.0)
        if self._baseline is None:
            self._learn(steps[0], raw[0], rows[0])
        return read

    def forget_reference(self) -> None:
        """Forget the KL to the reference model after a reset of it: the KL to the new one is unrelated."""
        self.changes[:, _KL] = math.nan

    def change(self, rows: Floats) -> Floats:
        """Return the change of the raw values ``rows`` against the baseline, in the unit of each signal: (rows,
        signals).
        """
        base, edge = self._baseline, self._edge
        if base is None:
            return np.full_like(rows, math.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(np.maximum(rows + edge, 1e-12) / self._start_ratio)
        return np.where(_RATIO, ratio, (rows - base) / self._unit)

    @property
    def start(self) -> Floats:
        """Baseline in the unit of the changes; NaN before it is complete."""
        base = self._baseline
        return np.full(len(SIGNALS), math.nan) if base is None else base / self._unit

    def warm_changes(self) -> Floats:
        """Return the changes of the baseline's own rows."""
        return self.change(np.array(self._warm))

    def scatter(self) -> float:
        """Return the spread of the reward between rows at the start, in spreads of the rewards; NaN without a reward.

        It is computed from differences between rows, so a rising reward does not increase it.
        """
        rewards = self.warm_changes()[:, _SPREAD].ravel() if self._baseline is not None else np.empty(0)
        jumps = np.abs(np.diff(rewards[np.isfinite(rewards)]))
        return 1.4826 * median(jumps.tolist()) / math.sqrt(2.0) if len(jumps) else math.nan

    def _read(self, metrics: Mapping[str, float], row: Floats) -> bool:
        """Put the values of a row into ``row``; whether a signal that had been a number no longer is."""
        broken = False
        for i, name, complement in _places.of(metrics):
            value = 1.0 - metrics[name] if complement else metrics[name]
            mine = self.source[i]
            if mine is None:
                mine = name
                self.source = (*self.source[:i], name, *self.source[i + 1 :])
            if math.isfinite(value):
                self._numbers[i] = True
                if name == mine:
                    row[i] = value
            elif self._numbers[i]:
                broken, self.broken_metric = True, name
        return broken

    def _learn(self, step: int, row: Floats, metrics: Mapping[str, float]) -> None:
        since = self.since_start(step)
        if since < WARM_FROM:
            return
        rows = len(self._warm)
        if since >= WARM_UNTIL and (rows >= LEAST_WARM or (since >= SPARSE_UNTIL and rows >= LEAST_SPARSE)):
            self._freeze()
            return
        self._warm.append(row)
        spread = next((metrics[name] for name in SPREAD_METRICS if name in metrics), math.nan)
        self._spread += [spread] if math.isfinite(spread) else []

    def _freeze(self) -> None:
        warm = np.array(self._warm)
        seen = np.isfinite(warm).sum(0) >= min(LEAST_WARM, 3)
        self._baseline = np.full(len(SIGNALS), math.nan)
        # np.median and np.nanmedian would load numpy.ma, which takes longer than all else here.
        self._baseline[seen] = [median(column[np.isfinite(column)].tolist()) for column in warm[:, seen].T]
        self._edge = np.maximum(0.05 * np.abs(self._baseline), _FLOOR)
        self._start_ratio = np.maximum(self._baseline + self._edge, 1e-12)
        logged_spread = median(self._spread) if self._spread else 0.0
        self._unit = np.where(_SPREAD, max(logged_spread, self._own_spread(warm), 1e-6), _UNIT)
        self.changes = self.change(self.changes)

    @staticmethod
    def _own_spread(warm: Floats) -> float:
        """Return the spread of the rows' means, where the run logs no spread, or none within a row."""
        values = warm[:, _SPREAD]
        values = values[np.isfinite(values)]
        return float(np.std(values)) if values.size else 0.0


def _joined(kept: Floats, new: Floats, nothing: float) -> Floats:
    """The last :data:`ROWS` of ``kept`` before ``new``, filled up in front."""
    last = kept[-ROWS:]
    if len(last) == ROWS:
        return np.concatenate((last, new))
    front = np.full((ROWS - len(last), *last.shape[1:]), nothing)
    return np.concatenate((front, last, new))
