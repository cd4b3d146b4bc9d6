"""What a forecast looks at: signals, each read from the first of some metrics that the run logs.

All are judged against the run's own first steps, so only the shape of a value's change matters: never its level, never
the step, the learning rate or the size of the weights (they tell recipes apart, not runs in trouble).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Scale(StrEnum):
    """How a change against the baseline b is measured.

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
