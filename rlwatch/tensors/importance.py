"""KL estimators, and importance ratios r = pi / pi_old of tokens and whole responses.

The estimators k1, k2 and k3 of KL(pi || ref) are those of http://joschu.net/blog/kl-approx.html, from tokens sampled by
pi. All take the log-ratio x = log pi - log ref per token, in nats, any shape. E[k1] = E[k3] = KL; k2 is biased
but low in variance. k1 may be negative; k2 and k3 never are.

As a loss they differ again: the gradient of k2 is that of KL(pi || ref), that of k3 the one of KL(ref || pi), that of
k1 zero in expectation (arXiv 2510.01555). So all three are recorded, whichever the run puts into its loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlwatch.tensors.advantages import response_advantages
from rlwatch.tensors.masked import difference, exponential, indicator, keep, shared, widen
from rlwatch.tensors.mergeable import Ess, Max, Mean, Min, Quantile, ShareStat, Stats, VarianceGrowth, nonfinite_stats
from rlwatch.tensors.tokens import TokenBatch, tokens_of

FAR = math.log(2)
"""Nats. If |x| is above this, the reference gives a token more than twice, or less than half, the probability."""
UNLIKELY = math.log(0.1)
"""Log-prob (nats) of a token below which the policy that sampled it hardly expected it."""

SATURATED = 10.0
"""Nats. verl clamps k3 here (and |x| at 20, which is further out): beyond it the penalty has no gradient."""
_FINITE = -1e30
"""Added to the infinity of exp(-x), where -inf would make NaN of it."""


def k1(x: Tensor) -> Tensor:
    """Return the estimate k1 of KL(pi || ref): the log-ratio ``x`` = log pi - log ref itself, nats."""
    return x


def k2(x: Tensor) -> Tensor:
    """Return the estimate k2 of KL(pi || ref): half the square of the log-ratio ``x`` = log pi - log ref, nats."""
    return x.square() / 2


@shared
def k3(x: Tensor) -> Tensor:
    """Return the estimate k3 of KL(pi || ref): exp(-x) - 1 + x with the log-ratio ``x`` = log pi - log ref, nats.

    It is accurate near 0, and inf where exp(-x) overflows: nothing is clamped, so that an overflow shows.
    """
    # Near 0 the value is x^2 / 2. In float32 exp(-x) - 1 is off by 6e-8, more than the whole value at x = 1e-4; expm1
    # is off by 6e-12. The clamp touches x = -inf only (a token the policy itself finds impossible), where inf + -inf is
    # NaN.
    return torch.expm1(-x) + x.clamp(min=_FINITE)


def kl_of_responses(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Return the mean k3 of the tokens of each response, nats per token, (B,); 0 for a response without tokens.

    ``logp``, ``ref_logp`` (nats) and ``mask`` are (B, T).
    """
    on = mask.bool()
    return keep(k3(difference(logp, ref_logp)), on, 0.0).sum(-1) / on.sum(-1).clamp(min=1)


def weighted_k3(estimate: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ``estimate`` (k3) times the importance ratio pi / pi_old = exp(``log_ratio``), in any shape.

    It is unbiased for KL(pi || ref) on samples of the old policy (DeepSeek-V3.2, arXiv 2512.02556). TRL logs it as
    ``kl`` with ``use_bias_correction_kl``.
    """
    return exponential(log_ratio) * estimate


def _estimates(x: Tensor, estimate: Tensor, mask: Tensor) -> Stats:
    return {
        "policy/kl_ref_k1": Mean.of(k1(x), mask),
        "policy/kl_ref_k2": Mean.of(k2(x), mask),
        "policy/kl_ref_k3": Mean.of(estimate, mask),
        "policy/kl_ref_max": Max.of(estimate, mask),
        "policy/kl_ref_far": Mean.of(indicator(x.abs() > FAR, x), mask),
        "policy/kl_ref_saturated": Mean.of(indicator(estimate > SATURATED, x), mask),
    }


def observe_kl(batch: TokenBatch) -> Stats:
    """Return estimates of the KL to the reference policy, and its concentration on few tokens; empty without a
    reference.
    """
    batch = tokens_of(batch)
    if batch.ref_logp is None:
        return {}
    x = difference(batch.logp, batch.ref_logp)
    estimate = k3(x)
    stats = _estimates(x, estimate, batch.mask) | nonfinite_stats("ref_logp", batch.ref_logp, batch.mask)
    if batch.old_logp is not None:
        weighted = weighted_k3(estimate, difference(batch.logp, batch.old_logp))
        stats["policy/kl_ref_weighted"] = Mean.of(weighted, batch.mask)
    return stats | _shares(batch, estimate)


def _shares(batch: TokenBatch, estimate: Tensor) -> Stats:
    """Return shares of the sum of k3 over tokens: that of tokens with negative advantage, and with old probability
    below 0.1.

    ``estimate`` (B, T): k3 of each token.
    """
    old = widen(batch.trainer_logp)
    part = indicator(old < UNLIKELY, old) * estimate
    stats: Stats = {"policy/kl_ref_unlikely_share": ShareStat.of(part, estimate, batch.mask)}
    if batch.token_advantages is not None:
        a = batch.token_advantages
        stats["policy/kl_ref_neg_share"] = ShareStat.of(indicator(a < 0, a) * estimate, estimate, batch.mask)
    return stats


def observe_kl_quantiles(batch: TokenBatch) -> Stats:
    """Return ``policy/kl_ref_p99``: the 99th percentile of k3 over tokens, nats; empty without a reference."""
    batch = tokens_of(batch)
    if batch.ref_logp is None:
        return {}
    return {"policy/kl_ref_p99": Quantile.of(k3(difference(batch.logp, batch.ref_logp)), batch.mask, 0.99)}


# Importance ratios r = pi / pi_old of tokens and whole responses: raw, where the loss clips them, and off-policy.


def ratio_stats(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Stats:
    """Return statistics of token ratios r = exp(x), x = ``logp`` - ``old_logp``; all arguments (B, T), log-probs in
    nats.

    ``ratio/mean``, ``max``, ``min`` are unitless and >= 0 (inf where exp overflows); ``ratio/ess`` is the effective
    sample size over the number of tokens; ``ratio/chi2`` is <r^2> - 1, which may be negative on a sample; ``ratio/m2``
    is <x^2> (M2PO, arXiv 2510.01161) and ``ratio/log_absmax`` the largest |x|, in nats; ``policy/kl_old`` is <-x>, nats
    per token; ``ratio/tv`` and ``tv_max`` are mean and maximum of |pi - pi_old|, in [0, 1].
    """
    x = difference(logp, old_logp)
    ratio, moved = exponential(x), (_probability(logp) - _probability(old_logp)).abs()
    return {
        "ratio/tv": Mean.of(moved, mask),
        "ratio/tv_max": Max.of(moved, mask),
        "ratio/mean": Mean.of(ratio, mask),
        "ratio/max": Max.of(ratio, mask),
        "ratio/min": Min.of(ratio, mask),
        "ratio/ess": Ess.of(x, mask),
        "ratio/chi2": Mean.of(chi2(x), mask),
        "ratio/m2": Mean.of(x.square(), mask),
        "ratio/log_absmax": Max.of(x.abs(), mask),
        "policy/kl_old": Mean.of(-x, mask),
    }


def _probability(logp: Tensor) -> Tensor:
    return exponential(logp).clamp(max=1)


def chi2(log_weight: Tensor) -> Tensor:
    """Return w^2 - 1 of the weight w = exp(``log_weight``), any shape; its mean is chi^2(pi || pi_old) if <w> = 1."""
    # expm1: of ratios near 1, which a healthy run has, exp(2x) - 1 in float32 keeps two or three digits.
    return torch.expm1(2 * widen(log_weight))


@shared
def _sum_of_response(x: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of ``x`` (B, T) over each response's tokens inside ``mask``, (B,)."""
    return keep(x, mask, 0.0).sum(-1)


def sequence_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, *, per_token: bool = False) -> Tensor:
    """Return the sum over each response's tokens of log pi - log pi_old, (B,), nats; the arguments are (B, T).

    ``per_token`` divides by the number of tokens: the exponential is then the geometric mean of GSPO (arXiv
    2507.18071); NaN for a response without tokens.
    """
    total = _sum_of_response(difference(logp, old_logp), mask)
    return total / mask.bool().sum(-1) if per_token else total


def sequence_ratio_stats(log_ratio: Tensor, measured: Tensor) -> Stats:
    """Return statistics of the ratios of whole responses: ``ratio/seq_mean``, ``seq_max``, ``seq_ess``.

    ``log_ratio`` (B,) in nats. ``measured`` (B,): True for responses that have tokens. ``seq_ess`` is the effective
    sample size over the number of responses.
    """
    ratio = widen(log_ratio).exp()
    return {
        "ratio/seq_mean": Mean.of(ratio, measured),
        "ratio/seq_max": Max.of(ratio, measured),
        "ratio/seq_ess": Ess.of(log_ratio, measured),
    }


def response_ratio_stats(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Stats:
    """Return statistics of both ratios that a response can have, whatever the loss uses; all arguments are (B, T).

    The two are the geometric mean of its tokens' ratios (``ratio/geo_mean``, ``geo_max``, ``geo_min``) and their
    product. ``ratio/product_ess``: effective sample size of the products over their number. ``ratio/log_var_growth``:
    nats^2 per token, by which it falls with length. Ratios are unclipped.
    """
    total = sequence_log_ratio(logp, old_logp, mask)
    length, measured = mask.bool().sum(-1), mask.bool().any(-1)
    geometric = (total / length).exp()
    return {
        "ratio/geo_mean": Mean.of(geometric, measured),
        "ratio/geo_max": Max.of(geometric, measured),
        "ratio/geo_min": Min.of(geometric, measured),
        "ratio/product_ess": Ess.of(total, measured),
        "ratio/log_var_growth": VarianceGrowth.of(difference(logp, old_logp), mask),
    }


def observe_ratios(batch: TokenBatch) -> Stats:
    """Return statistics of the importance ratios of tokens and responses.

    Empty if the old policy's log-probs were not measured, because the ratios are then 1 by definition.
    """
    tokens = tokens_of(batch)
    if batch.old_logp is None or tokens.old_logp is None:
        return {}
    return {
        **ratio_stats(tokens.logp, tokens.old_logp, tokens.mask),
        **response_ratio_stats(batch.logp, batch.old_logp, batch.mask),
        **nonfinite_stats("old_logp", tokens.old_logp, tokens.mask),
    }


def observe_ratio_quantiles(batch: TokenBatch) -> Stats:
    """Return ``ratio/p99``: the 99th percentile of token ratios; empty if the old policy's log-probs were not
    measured.
    """
    batch = tokens_of(batch)
    if batch.old_logp is None:
        return {}
    return {"ratio/p99": Quantile.of(exponential(difference(batch.logp, batch.old_logp)), batch.mask, 0.99)}


# Clipping of importance ratios by the loss: on which side, and of how many tokens the gradient is gone.


def clip_stats(
    x: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float, dual: float | None = None
) -> Stats:
    """Return the fractions of tokens where the PPO clip [1 - low, 1 + high] binds r = exp(``x``): they get no gradient.

    ``ratio/clipfrac_low``: r < 1 - low and A < 0; ``clipfrac_high``: r > 1 + high and A > 0; ``clipfrac``: either
    (verl's ``pg_clipfrac``, TRL's ``clip_ratio/region_mean``). With ``dual`` = c > 1, of dual-clip PPO (arXiv
    1912.09729), ``clipfrac_dual``: r > c and A < 0 (verl's ``pg_clipfrac_lower``).

    ``x``: log-ratios (B, T) of tokens, or (B, 1) of whole responses, as GSPO clips them. In the second case ``mask``
    (B, T) weighs a response by its tokens as verl does, (B, 1) counts each once as TRL does. ``advantages`` (B, T) or
    (B, 1). For TRL's CISPO, which caps the ratio at c: ``low=inf, high=c - 1``, and no ``clipfrac_low``. NaN if a ratio
    or an advantage is.
    """
    ratio = exponential(x)
    below, above = clipped_sides(ratio, advantages, low, high)
    flags = {"ratio/clipfrac_high": above, "ratio/clipfrac": below | above}
    if low < math.inf:
        flags["ratio/clipfrac_low"] = below
    if dual is not None:
        flags["ratio/clipfrac_dual"] = (ratio > dual) & (advantages < 0)
    return {name: Mean.of(indicator(flag, ratio, advantages), mask) for name, flag in flags.items()}


@shared
def clipped_sides(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return masks of where the PPO clip [1 - low, 1 + high] binds: below with A < 0, and above with A > 0.

    Both are bool, in the common shape of ``ratio`` and ``advantages``.
    """
    # min(r A, clip(r) A) takes the clipped side, and so has no gradient, only where clipping lowers it: r beyond the
    # upper bound with A > 0, beyond the lower one with A < 0.
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


def truncated(x: Tensor, *, low: float = math.inf, high: float = math.inf) -> Tensor:
    """Return the log-ratios ``x`` clamped so that the weights lie in [1 - low, 1 + high]; same shape, NaN stays NaN."""
    return widen(x).clamp(math.log(1 - low) if low < 1 else -torch.inf, math.log(1 + high))


def observe_clipping(batch: TokenBatch) -> Stats:
    """Return clip fractions; empty unless the loss has a token-level clip and old log-probs and advantages are
    known.
    """
    batch = tokens_of(batch)
    advantages = batch.token_advantages
    if batch.old_logp is None or batch.clip is None or advantages is None:
        return {}
    low, high = batch.clip
    x = difference(batch.logp, batch.old_logp)
    return {
        **clip_stats(x, advantages, batch.mask, low=low, high=high, dual=batch.dual_clip),
        "ratio/ess_clipped": Ess.of(truncated(x, low=low, high=high), batch.mask),
    }


# Responses too far from the policy that sampled them: DeepSeek-V3.2's off-policy mask, and age in versions.

OFF_POLICY_DELTA = 0.5
"""Default threshold of the off-policy mask, nats per token, if the loss has none: V3.2 publishes no number; this is the
example in TRL's documentation.
"""


def sampling_kl(logp: Tensor, sampling_logp: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each response of log pi_sampling - log pi, (B,), nats per token; may be negative.

    ``sampling_logp`` (B, T) as the rollout engine recorded it (else the old policy's), so that staleness and mismatch
    both count. Tokens the engine could not score (NaN) add nothing, as in TRL; a NaN of ``logp`` shows. NaN for a
    response without tokens.
    """
    # A mean per token, as published: length does not matter, and one catastrophic token in a long response is hidden.
    # Therefore offpolicy/kl_neg_max complements the fractions.
    gap = difference(sampling_logp, logp)
    return keep(gap, mask.bool() & ~sampling_logp.isnan(), 0.0).sum(-1) / mask.bool().sum(-1)


def off_policy_masked(kl: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """Return 1.0 for a response that the off-policy sequence mask drops (A < 0 and ``kl`` > ``delta``), else 0.0; (B,).

    DeepSeek-V3.2 (arXiv 2512.02556), equation 9; ``kl`` (B,) of :func:`sampling_kl`, ``advantages`` (B,). NaN if either
    is.
    """
    return indicator((advantages < 0) & (kl > delta), kl, advantages)


def off_policy_stats(
    logp: Tensor, sampling_logp: Tensor, advantages: Tensor, mask: Tensor, *, delta: float = OFF_POLICY_DELTA
) -> Stats:
    """Return statistics of responses that are too far from the policy that sampled them.

    ``offpolicy/masked``: fraction that the mask with threshold ``delta`` drops of the responses with a scored token.
    ``offpolicy/masked_neg``: the same of those with A < 0. ``offpolicy/kl_neg_max``: their largest :func:`sampling_kl`,
    nats per token. ``logp``, ``sampling_logp``, ``mask`` (B, T); ``advantages`` (B,), (B, 1) or (B, T).
    """
    kl, a = sampling_kl(logp, sampling_logp, mask), response_advantages(advantages, mask)
    measured = (mask.bool() & ~sampling_logp.isnan()).any(-1)
    dropped = off_policy_masked(kl, a, delta)
    negative = measured & ((a < 0) | a.isnan())
    return {
        "offpolicy/masked": Mean.of(dropped, measured),
        "offpolicy/masked_neg": Mean.of(dropped, negative),
        "offpolicy/kl_neg_max": Max.of(kl.masked_fill(a.isnan(), torch.nan), negative),
    }


def observe_off_policy(batch: TokenBatch) -> Stats:
    """Return statistics of an off-policy sequence mask, and of staleness; each is left out if ``batch`` lacks its
    inputs.

    The mask needs the log-probs of the policy that sampled, and advantages.
    """
    stats: Stats = {}
    if batch.staleness is not None:
        age, measured = widen(batch.staleness), batch.mask.bool().any(-1)
        stale = torch.where(age.isnan(), age, (age > 0).to(age.dtype))
        stats = {
            "staleness/mean": Mean.of(age, measured),
            "staleness/max": Max.of(age, measured),
            "staleness/stale_frac": Mean.of(stale, measured),
        }
    logp, sampling = batch.logp, batch.rollout_logp
    if sampling is None and batch.old_logp is not None:
        broken = batch.old_logp.isnan()  # a NaN of the trainer's own is no unscored token
        logp, sampling = widen(logp).masked_fill(broken, torch.nan), batch.old_logp.masked_fill(broken, 0.0)
    if sampling is None or batch.advantages is None:
        return stats
    delta = OFF_POLICY_DELTA if batch.off_policy_delta is None else batch.off_policy_delta
    return stats | off_policy_stats(logp, sampling, batch.advantages, batch.mask, delta=delta)
