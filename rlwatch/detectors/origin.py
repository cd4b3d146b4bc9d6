"""Where non-finite values began, as far as one row can tell.

The first tensor that is broken names the culprit: in the order rollout, old policy, reference, loss,
gradient. A NaN old log-prob beside a finite reference means the policy's weights are broken; a NaN
rollout log-prob beside a finite old one means the engine is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlwatch.records import ClosedStep

SAYS = {
    "rollout_engine": "the rollout engine returns them while the trainer's own log-probs are finite: look at "
    "weight sync and the engine's precision",
    "policy_weights": "the policy's log-probs are broken while the reference is fine: the policy weights "
    "themselves are non-finite, go back to the last good checkpoint",
    "reward": "the reward or advantage is the first to break: look at the reward function and the "
    "normalisation of groups without variance",
    "backward": "the forward pass is finite but the gradient is not: an overflow in the loss (ratio or KL "
    "exponent) or in the backward pass",
    "everything": "nearly everything is broken at once: the weights have most likely become NaN at an earlier update",
    "unknown": "too little is logged to say where they began",
}


def suspect(step: ClosedStep, bad: Sequence[str], counts: Mapping[str, float]) -> tuple[str, str]:
    """The suspected origin (a key of ``SAYS``) and what to tell a person."""
    origin = _origin(step, set(bad), counts)
    return origin, SAYS[origin]


def _origin(step: ClosedStep, bad: set[str], counts: Mapping[str, float]) -> str:
    broken = {name for name in ("rollout", "old", "ref") if f"nonfinite/{name}_logp" in counts}
    clean = {name for name in ("rollout", "old", "ref") if step.metrics.get(f"nonfinite/{name}_logp") == 0.0}
    if "rollout" in broken and "old" in clean:
        return "rollout_engine"
    if "old" in broken and "ref" in clean:
        return "policy_weights"
    if bad & {"reward/mean", "adv/mean", "adv/max"} or "nonfinite/advantage" in counts:
        return "reward" if "policy/entropy" not in bad and "nonfinite/logp" not in counts else "everything"
    if len(bad) >= 3:
        return "everything"
    forward = bad & {"policy/entropy", "policy/logp_mean", "loss/policy", "loss/raw"}
    if not forward and ("optim/grad_norm" in bad or "nonfinite/grad" in counts):
        return "backward"
    return "unknown"
