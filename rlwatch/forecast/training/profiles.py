"""What runs log: the sets of signals that a model must get by with, each with thresholds of its own."""

from __future__ import annotations

from rlwatch.forecast.signals import SIGNALS

EVERYTHING = frozenset(signal.name for signal in SIGNALS)
ENGINE = frozenset(name for name in EVERYTHING if name.startswith("mismatch"))
"""What takes the log-probs of the rollout engine."""
PLAIN = frozenset({"reward", "entropy", "grad", "kl_ref", "clip_high", "length", "cut_off"})
"""What nearly every trainer's own log has."""
TRL_LOG = PLAIN | {"reward_std", "zero_std", "clip_low"}
"""What TRL writes without rlwatch's taps."""
VERL_LOG = PLAIN | {"kl_old", "mismatch", "mismatch_gap", "mismatch_prob", "mismatch_weights"}
"""What verl writes with its rollout correction on."""
PROFILES: dict[str, frozenset[str]] = {
    "taps": EVERYTHING,
    "taps without engine": EVERYTHING - ENGINE,
    "TRL's log": TRL_LOG,
    "verl's log": VERL_LOG,
    "plain log": PLAIN,
}
"""Name -> signals that such a run has at most; the richest first."""
