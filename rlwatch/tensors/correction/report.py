"""The report as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from rlwatch.tensors.correction.offpolicy import offpolicy_metrics
from rlwatch.tensors.correction.rejection import rejection_metrics
from rlwatch.tensors.correction.thresholds import Threshold, rules
from rlwatch.tensors.correction.weights import weigh, weight_metrics
from rlwatch.tensors.masked import widen


def correction_report(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
) -> dict[str, Tensor]:
    """The ``rollout_corr/*`` metrics of verl 0.9.1 for one batch, under verl's names and for verl's settings.

    All numbers are those of ``compute_rollout_correction_and_rejection_mask``
    (verl/trainer/ppo/rollout_corr_helper.py), with two differences: they stay on their device, 0-d, and none waits
    for it; and a batch without a single token, which verl refuses, makes every number NaN. Where ``rollout_is``
    is set there are also ``rollout_corr/rollout_is_raw_{mean,std,max,min,eff_sample_size}``: the same of the weights
    before anything is truncated, zeroed or clamped.

    Parameters
    ----------
    old_logp, rollout_logp
        (B, T) log-probs of trainer and rollout engine, nats. A NaN inside ``mask`` shows wherever verl shows it.
    mask
        (B, T) 0 or 1.
    rollout_is, rollout_is_threshold
        ``"token"`` or ``"sequence"``; an upper bound (truncation) or ``"low_high"`` (IcePop).
    rollout_is_batch_normalize
        Report the factor verl would normalise by.
    rollout_rs, rollout_rs_threshold
        Rejection options, comma-separated, and their thresholds.

    Raises ``ValueError`` if a setting cannot be read or the shapes differ.
    """
    if not old_logp.shape == rollout_logp.shape == mask.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (old_logp, rollout_logp, mask))
        raise ValueError(f"old_logp, rollout_logp and mask must have the same shape, got {shapes}")
    if rollout_rs is not None and rollout_rs_threshold is None:
        raise ValueError("rollout_rs needs a rollout_rs_threshold")
    with torch.no_grad():
        old, rollout = widen(old_logp), widen(rollout_logp)
        metrics = offpolicy_metrics(old, rollout, mask)
        if rollout_is is not None:
            weights = weigh(old - rollout, mask, rollout_is, rollout_is_threshold)
            metrics |= weight_metrics(weights, rollout_is, batch_normalize=rollout_is_batch_normalize)
        if rollout_rs is not None and rollout_rs_threshold is not None:
            metrics |= rejection_metrics(old - rollout, mask, rules(rollout_rs, rollout_rs_threshold))
        some = mask.bool().any()
        return {f"rollout_corr/{name}": torch.where(some, value, torch.nan) for name, value in metrics.items()}
