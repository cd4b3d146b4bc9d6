"""Mismatch between the rollout engine and the trainer: the same weights, the same tokens, two sets of log-probs.

With d = log trainer - log rollout: k1 of KL(rollout || trainer) is -d, k3 is exp(d) - d - 1, and the raw weight of
a token is exp(d). Nothing is truncated first: statistics of truncated weights look healthy exactly when
truncation is heavy.

No single number is enough. KL is blind for hundreds of steps while the old log-probs are recomputed, and the share
of tokens that IcePop masks falls while the gap widens (KPop, ringtech.notion.site/kpop): read
``mismatch/icepop_masked`` only together with ``mismatch/logp_absdiff``. So there are the level (:func:`gap_stats`), the
kind of divergence (:func:`divergence_stats`), where it sits (:func:`tail_stats`), what it does to the gradient
(:func:`advantage_stats`), how it adds up over a response (:func:`response_gap_stats`), and one cause of it
(:func:`routing_stats`).

Of what verl reports of its own correction the stream holds what can be merged over micro-batches and does not depend on
a correction the run may not use: perplexities, KL, chi2, raw weights, and the shares that the usual thresholds
(:class:`Thresholds`) would cut. Statistics of weights after truncation, and of each of the eleven rejection rules,
are verl's own to log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.errors import ConfigError
from rlwatch.tensors.advantages import Sides
from rlwatch.tensors.importance import k3
from rlwatch.tensors.masked import indicator, keep, shared, widen
from rlwatch.tensors.mergeable import (
    Correlation,
    Ess,
    Max,
    Mean,
    Min,
    Quantile,
    ShareStat,
    Slope,
    Stat,
    Stats,
    Std,
    VarianceGrowth,
    nonfinite_stats,
)
from rlwatch.tensors.tokens import TokenBatch, tokens_of

__all__ = [
    "LogProbGap",
    "Thresholds",
    "advantage_stats",
    "divergence_stats",
    "gap_of",
    "gap_stats",
    "load_stats",
    "observe_mismatch",
    "observe_mismatch_detail",
    "response_gap_stats",
    "router_shift_stats",
    "routing_stats",
    "tail_stats",
]


# Thresholds of the usual corrections of the mismatch: the shares that they would cut depend on them.

Band = tuple[float, float]
"""Lowest and highest weight that is kept."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bounds of the importance weights trainer/rollout that common corrections use, unitless and > 0.

    Raises ``ConfigError`` if a bound is not positive, or a band is reversed.

    Parameters
    ----------
    cap
        Largest weight of truncated importance sampling; 2 as in https://fengyao.notion.site/off-policy-rl.
    token
        IcePop keeps the tokens whose weight lies in this band; [.5, 5] as in arXiv 2510.18855.
    sequence
        Sequence rejection keeps the responses whose product of weights lies in this band; [.5, 2] as verl's preset.
    geometric
        Geometric rejection keeps the responses whose geometric mean of weights lies in this band; [.999, 1.001] as
        verl's preset.
    """

    cap: float = 2.0
    token: Band = (0.5, 5.0)
    sequence: Band = (0.5, 2.0)
    geometric: Band = (0.999, 1.001)

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ConfigError(f"cap must be above 0, got {self.cap}")
        for name in ("token", "sequence", "geometric"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ConfigError(f"{name} must be (low, high) with 0 < low <= high, got {(low, high)}")

    def capped_as(self, truncation: float | None) -> Self:
        """Return these thresholds with the cap ``truncation`` of the run's own loss, if it has one."""
        return self if truncation is None else replace(self, cap=truncation)


USUAL = Thresholds()


# The gap between rollout engine and trainer on the sampled tokens.


@dataclass(frozen=True, slots=True)
class LogProbGap:
    """Log-probs (B, T) of the sampled tokens by trainer and rollout engine, nats, and which tokens to compare.

    ``scored`` leaves out what the engine could not score (NaN in ``rollout``); a NaN of the trainer shows. ``d`` is
    trainer - rollout, ``weight`` its exponential (inf where that overflows).
    """

    trainer: Tensor
    rollout: Tensor
    scored: Tensor
    d: Tensor
    weight: Tensor

    @classmethod
    def of(cls, trainer_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Self:
        """Compare log-probs (B, T), in nats, of trainer and rollout engine for the tokens inside ``mask`` (B, T)."""
        trainer, rollout = widen(trainer_logp), widen(rollout_logp)
        d = trainer - rollout
        return cls(trainer, rollout, mask.bool() & ~rollout.isnan(), d, d.exp())

    def outside(self, band: Band) -> Tensor:
        """Return 1.0 (B, T) where the weight lies outside ``band``, else 0.0; NaN where it is NaN."""
        low, high = band
        return indicator((self.weight < low) | (self.weight > high), self.weight)


@shared
def gap_of(trainer_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> LogProbGap:
    """Return :meth:`LogProbGap.of` the arguments, computed once for all statistics of a batch."""
    return LogProbGap.of(trainer_logp, rollout_logp, mask)


def gap_stats(gap: LogProbGap, at: Thresholds = USUAL) -> Stats:
    """Return statistics of the size of the mismatch between trainer and rollout engine over the scored tokens of
    ``gap``.

    They are those of the log-probs, of the raw weights (with the shares that corrections with thresholds ``at`` would
    cut), and of the probabilities. Tokens the engine could not score are left out here and counted by
    :func:`rlwatch.tensors.mergeable.nonfinite_stats`.
    """
    return {**_log_prob_stats(gap), **_weight_stats(gap, at), **_probability_stats(gap)}


def _log_prob_stats(gap: LogProbGap) -> Stats:
    """Return statistics of d, the difference of log-probs, in nats; ``mult_prob_error`` is NeMo-RL's mean of exp |d|,
    >= 1.
    """
    distance = gap.d.abs()
    return {
        "mismatch/kl": Mean.of(-gap.d, gap.scored),
        "mismatch/k3": Mean.of(k3(-gap.d), gap.scored),
        "mismatch/logp_absdiff": Mean.of(distance, gap.scored),
        "mismatch/logp_absdiff_max": Max.of(distance, gap.scored),
        "mismatch/mult_prob_error": Mean.of(distance.exp(), gap.scored),
    }


def _weight_stats(gap: LogProbGap, at: Thresholds) -> Stats:
    """Return statistics of the raw weights, and the shares that truncation and IcePop with thresholds ``at`` would cut.

    ``chi2`` is E[weight^2] - 1.
    """
    return {
        "mismatch/weight_mean": Mean.of(gap.weight, gap.scored),
        "mismatch/weight_max": Max.of(gap.weight, gap.scored),
        "mismatch/weight_min": Min.of(gap.weight, gap.scored),
        "mismatch/chi2": Mean.of(torch.expm1(2 * gap.d), gap.scored),
        "mismatch/ess": Ess.of(gap.d, gap.scored),
        "mismatch/tis_truncated": Mean.of(indicator(gap.d > math.log(at.cap), gap.d), gap.scored),
        "mismatch/icepop_masked": Mean.of(gap.outside(at.token), gap.scored),
    }


def _probability_stats(gap: LogProbGap) -> Stats:
    """Return statistics of the probabilities, as verl's ``training/rollout_probs_diff_*`` (correlation: arXiv
    2506.13585).
    """
    trainer, rollout = gap.trainer.exp(), gap.rollout.exp()
    distance = (trainer - rollout).abs()
    return {
        "mismatch/prob_absdiff": Mean.of(distance, gap.scored),
        "mismatch/prob_absdiff_max": Max.of(distance, gap.scored),
        "mismatch/prob_absdiff_std": Std.of(distance, gap.scored),
        "mismatch/prob_corr": Correlation.of(trainer, rollout, gap.scored),
    }


# Divergences between rollout engine and trainer that KL(rollout || trainer) does not show.
#
# The tokens were sampled by the rollout engine, so each is an estimate of its kind, not its exact value.

_EDGE = 1e-6
"""Probabilities are kept this far from 0 and 1 in the binary KL, as OpenRLHF 0.11 does."""


def jensen_shannon(d: Tensor) -> Tensor:
    """Return NeMo-RL's estimate of the Jensen-Shannon divergence per token, nats, >= 0; symmetric in trainer and
    rollout.

    ``d``: log trainer - log rollout, nats. The estimate is (k3(trainer || m) + k3(rollout || m)) / 2 with the mixture m
    of both. That equals log cosh(d / 2), and is computed so that it is accurate near 0 and never overflows.
    """
    # NeMo-RL's k3 is exp(x) - x - 1 of x = log p - log m and of x = log q - log m. As p / m + q / m = 2, all but the x
    # cancels in half their sum, which is log m - (log p + log q) / 2 = log cosh(d / 2). Near 0 cosh y - 1 =
    # 2 sinh^2(y / 2), so that log1p keeps the digits; far out log cosh y = y - log 2 to the last digit.
    half = d.abs() / 2
    near = torch.log1p(2 * torch.sinh(half.clamp(max=20.0) / 2).square())
    return torch.where(half > 20.0, half - math.log(2), near)


def binary_kl(rollout_logp: Tensor, trainer_logp: Tensor) -> Tensor:
    """Return the KL between "this token" and "any other", rollout || trainer, per token, nats, >= 0.

    The log-probs are in nats, of any one shape. p log(p/q) + (1-p) log((1-p)/(1-q)) is the exact divergence that one
    sampled token reveals. It is the trust region of DPPO (arXiv 2602.04879) and of OpenRLHF's
    ``is_correction_gating="binary_kl"``.
    """
    p, q = (logp.exp().clamp(_EDGE, 1 - _EDGE) for logp in (rollout_logp, trainer_logp))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def reverse_kl(d: Tensor) -> Tensor:
    """Return an estimate of KL(trainer || rollout) per token, nats, >= 0, although the rollout engine sampled.

    ``d``: log trainer - log rollout, nats. The estimate is k3 of the other direction under the weight w = exp(d): w d -
    w + 1, which tends to 1 if the trainer finds the token impossible. The two signs of d are computed separately, so
    that neither overflows nor loses its digits near 0.
    """
    # w d - w + 1 with w = exp(d): for d < 0 it is w d - expm1(d), for d > 0 w (d - 1 + exp(-d)) = w k3(d), and the
    # other part is 0. Below -100 w d is 4e-42, negligible against 1, and at -inf it would be 0 * -inf.
    below, above = d.clamp(-100.0, 0.0), d.clamp(min=0.0)
    return below.exp() * below - torch.expm1(below) + above.exp() * k3(above)


def divergence_stats(gap: LogProbGap) -> Stats:
    """Return token means of several divergences between trainer and rollout engine, nats per token.

    ``k3_reverse`` is NeMo-RL's ``policy_kl_error``: k3 with the roles exchanged and no weight. It estimates nothing
    exactly, but a token the trainer finds impossible (-5 against -15 nats) makes it 22,015 where k3 is 9. The others
    are means of :func:`reverse_kl`, :func:`jensen_shannon` and :func:`binary_kl`.
    """
    return {
        "mismatch/k3_reverse": Mean.of(k3(gap.d), gap.scored),
        "mismatch/kl_reverse": Mean.of(reverse_kl(gap.d), gap.scored),
        "mismatch/js": Mean.of(jensen_shannon(gap.d), gap.scored),
        "mismatch/binary_kl": Mean.of(binary_kl(gap.rollout, gap.trainer), gap.scored),
    }


# The largest divergence of a response from the policy that sampled it: all bounds over long responses rest on it.

DISTANT = 0.05
"""Largest token divergence from which a response counts as far, nats: rlwatch's own, 50 times the rounding of
engines.
"""


def response_divergence_stats(logp: Tensor, sampling_logp: Tensor, mask: Tensor) -> Stats:
    """Return statistics of each response's largest token divergence from the policy that sampled it, nats.

    ``ratio/token_kl`` is its mean over responses, ``ratio/far_responses`` the share beyond ``DISTANT``. ``logp``,
    ``sampling_logp`` and ``mask`` are (B, T). The divergence is that of the sampled token against any other, which the
    token alone determines. Tokens the engine could not score (NaN) are left out; a NaN of ``logp`` shows.
    """
    scored = mask.bool() & ~sampling_logp.isnan()
    each = binary_kl(widen(sampling_logp), widen(logp))
    largest = keep(each, scored, 0.0).amax(-1) if each.shape[-1] else each.sum(-1)
    measured = scored.any(-1)
    return {
        "ratio/token_kl": Mean.of(largest, measured),
        "ratio/far_responses": Mean.of(indicator(largest > DISTANT, largest), measured),
    }


def observe_divergence(batch: TokenBatch) -> Stats:
    """Return the largest divergence of responses from the policy that sampled them; empty if that is not known."""
    sampling = batch.old_logp if batch.rollout_logp is None else batch.rollout_logp
    return {} if sampling is None else response_divergence_stats(batch.logp, sampling, batch.mask)


# Tails: the mismatch of few tokens or all, sure ones or unsure ones, early or late in a response.

BUCKETS = ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, math.inf))
"""Ranges of the trainer's probability of a token, low included, high excluded."""
SURE, UNSURE = 0.9, 0.5
"""If the rollout engine's probability of a token is above ``SURE`` and the trainer's below ``UNSURE``, they
contradict.
"""


def tail_stats(gap: LogProbGap, at: Thresholds = USUAL, entropy: Tensor | None = None) -> Stats:
    """Return statistics of where the mismatch occurs, over the scored tokens of ``gap``.

    ``factor2_frac``: share of tokens whose probabilities differ by more than a factor of 2. ``overconfident_frac``:
    share to which the engine gave more than .9 and the trainer less than .5. ``absdiff_per_1k``: growth of |d| over
    1,000 tokens of a response. ``ess_truncated``: the effective sample size after truncation, which looks better than
    the raw one. ``at``: thresholds of corrections. ``entropy``: (B, T) in nats, or None.
    """
    distance = gap.d.abs()
    position = torch.arange(gap.d.shape[-1], device=gap.d.device, dtype=gap.d.dtype) / 1000
    contradicted = (gap.rollout > math.log(SURE)) & (gap.trainer < math.log(UNSURE))
    return {
        "mismatch/logp_absdiff_p99": Quantile.of(distance, gap.scored, 0.99),
        "mismatch/m2": Mean.of(gap.d.square(), gap.scored),
        "mismatch/factor2_frac": Mean.of(indicator(distance > math.log(2), distance), gap.scored),
        "mismatch/overconfident_frac": Mean.of(indicator(contradicted, gap.d), gap.scored),
        "mismatch/absdiff_per_1k": Slope.of(position, distance, gap.scored),
        "mismatch/ess_truncated": Ess.of(gap.d.clamp(max=math.log(at.cap)), gap.scored),
        **_by_probability(gap),
        **_masked_entropy(gap, at, entropy),
        **_per_entropy(gap, entropy),
    }


def _per_entropy(gap: LogProbGap, entropy: Tensor | None) -> Stats:
    """Return the sum of k3 over that of ``entropy`` (B, T): a policy that is nearly certain cannot afford as much
    mismatch.
    """
    if entropy is None:
        return {}
    return {"mismatch/kl_entropy": ShareStat.of(k3(-gap.d), widen(entropy).clamp(min=0.0), gap.scored)}


def _by_probability(gap: LogProbGap) -> Stats:
    """``mismatch/diff_p<low>``: mean d of the tokens in each bucket of the trainer's probability, nats.

    A token whose probability is NaN is outside none of them: it shows in all.
    """
    p = gap.trainer.exp()
    inside = {low: gap.scored & ~((p < low) | (p >= high)) for low, high in BUCKETS}
    return {f"mismatch/diff_p{round(100 * low):02d}": Mean.of(gap.d, mask) for low, mask in inside.items()}


def _masked_entropy(gap: LogProbGap, at: Thresholds, entropy: Tensor | None) -> Stats:
    """Return the mean entropy of the tokens that IcePop masks: high for forks in the text, low for noise."""
    if entropy is None:
        return {}
    low, high = at.token
    masked = gap.scored & ~((gap.weight >= low) & (gap.weight <= high))
    return {"mismatch/icepop_entropy": Mean.of(entropy, masked)}


# The gradient: the mismatch matters where it goes along with the advantage.


def advantage_stats(gap: LogProbGap, advantages: Tensor) -> Stats:
    """Return statistics of mismatch together with advantage over the scored tokens; ``advantages`` (B, T) or (B, 1).

    ``bias_pos`` and ``bias_neg``: mean of C = -(w - 1) A over the tokens with A > 0 and with A < 0, w = exp(d), in
    units of the advantage (VeXact, arXiv 2605.14220, eq. 5). The two signs are kept apart because they cancel in a mean
    while each distorts its own side. ``adv_corr``: Pearson's correlation of d and A, in [-1, 1]. A NaN advantage has no
    sign; it shows on both sides.
    """
    a, sides = widen(advantages), Sides.of(advantages, gap.scored)
    shift = -torch.expm1(gap.d) * a
    return {
        "mismatch/bias_pos": Mean.of(shift, sides.positive),
        "mismatch/bias_neg": Mean.of(shift, sides.negative),
        "mismatch/adv_corr": Correlation.of(gap.d, a, gap.scored),
    }


# Whole responses: the mismatch of their tokens adds up.


@dataclass(frozen=True, slots=True)
class ResponseGaps:
    """Sums over the scored tokens of each response, (B,): log-probs of trainer and rollout, and their difference ``d``;
    nats.

    ``tokens``: number of scored tokens. A response without one is not ``measured``, while verl counts it as weight 1
    and perplexity 1.
    """

    tokens: Tensor
    measured: Tensor
    trainer: Tensor
    rollout: Tensor
    d: Tensor

    @classmethod
    def of(cls, gap: LogProbGap) -> Self:
        """Sum the token gaps between trainer and rollout engine over each response of a batch."""
        tokens = gap.scored.sum(-1).to(gap.d.dtype)
        sums = [keep(x, gap.scored, 0.0).sum(-1) for x in (gap.trainer, gap.rollout, gap.d)]
        return cls(tokens, tokens > 0, *sums)

    def per_token(self, total: Tensor) -> Tensor:
        """Return ``total`` (B,) divided by the number of scored tokens of each response; NaN for one without tokens."""
        return total / self.tokens


def response_gap_stats(gap: LogProbGap, at: Thresholds = USUAL) -> Stats:
    """Return mismatch statistics of whole responses; each response counts once, while verl weighs it by its tokens.

    ``at``: thresholds of corrections.
    """
    responses = ResponseGaps.of(gap)
    return {
        **_response_weight_stats(responses, at),
        **_perplexity_stats(responses),
        "mismatch/seq_m2": _growth(responses),
        "mismatch/log_var_growth": VarianceGrowth.of(gap.d, gap.scored),
    }


def _response_weight_stats(responses: ResponseGaps, at: Thresholds) -> Stats:
    """Return statistics of a response's product of raw weights (inf on overflow), and the shares that rejection would
    drop.
    """
    total, measured = responses.d, responses.measured
    mean = responses.per_token(total)
    return {
        "mismatch/seq_weight_mean": Mean.of(total.exp(), measured),
        "mismatch/seq_weight_max": Max.of(total.exp(), measured),
        "mismatch/seq_chi2": Mean.of(torch.expm1(2 * total), measured),
        "mismatch/seq_ess": Ess.of(total, measured),
        "mismatch/seq_rejected": Mean.of(_outside(total, at.sequence), measured),
        "mismatch/geo_rejected": Mean.of(_outside(mean, at.geometric), measured),
    }


def _outside(log_weight: Tensor, band: Band) -> Tensor:
    low, high = (math.log(bound) for bound in band)
    return indicator((log_weight < low) | (log_weight > high), log_weight)


def _perplexity_stats(responses: ResponseGaps) -> Stats:
    """Perplexities as in verl's ``rollout_corr``; ``log_ppl_diff`` is log perplexity of the trainer minus rollout's.

    That is what verl 0.9.1 computes, although its documentation states the opposite sign: above 0 the trainer is the
    less confident one.
    """
    per_token, measured = responses.per_token, responses.measured
    trainer, rollout, diff = -per_token(responses.trainer), -per_token(responses.rollout), -per_token(responses.d)
    return {
        "mismatch/ppl_trainer": Mean.of(trainer.exp(), measured),
        "mismatch/ppl_rollout": Mean.of(rollout.exp(), measured),
        "mismatch/ppl_ratio": Mean.of(diff.exp(), measured),
        "mismatch/log_ppl_trainer": Mean.of(trainer, measured),
        "mismatch/log_ppl_rollout": Mean.of(rollout, measured),
        "mismatch/log_ppl_diff": Mean.of(diff, measured),
        "mismatch/log_ppl_diff_max": Max.of(diff, measured),
        "mismatch/log_ppl_diff_min": Min.of(diff, measured),
        "mismatch/log_ppl_absdiff": Mean.of(diff.abs(), measured),
    }


def _growth(responses: ResponseGaps) -> Mean:
    """Return the sum of the squared log-weights of responses over the sum of their lengths, nats^2 per token.

    It equals ``mismatch/m2`` if errors of tokens are independent; if they compound, it is up to n times that. Unlike
    the regression of :class:`~rlwatch.tensors.mergeable.VarianceGrowth` it exists if all lengths are equal.
    """
    return Mean(responses.tokens.sum(), keep(responses.d.square(), responses.measured, 0.0).sum())


# Mixture of experts: tokens that trainer and rollout engine sent to different experts.
#
# Routing is discrete, so a rounding error can change the experts, and with them the log-prob by far more than
# rounding. R3 (arXiv 2510.11370) found 94 % of tokens differ in at least one layer, and about 10 % of the routers.


def differing_layers(experts: Tensor, rollout_experts: Tensor) -> Tensor:
    """Return the number of layers in which a token's sets of experts differ, (B, T) int64.

    ``experts``, ``rollout_experts``: (B, T, layers, k) expert ids of trainer and rollout engine, in any order within
    the k. Works layer by layer, because a long batch holds millions of ids.
    """
    different = torch.zeros(experts.shape[:2], dtype=torch.int64, device=experts.device)
    for layer in range(experts.shape[2]):
        trained, rolled = experts[:, :, layer].sort(-1).values, rollout_experts[:, :, layer].sort(-1).values
        different += (trained != rolled).any(-1)
    return different


def recorded(experts: Tensor, rollout_experts: Tensor, mask: Tensor) -> Tensor:
    """Return a mask of the tokens (B, T) inside ``mask`` (B, T) whose experts both trainer and rollout engine recorded.

    The last token of a response was sampled but never fed back, so the engine has no routing of it. Its slot holds -1,
    or zeros in verl, which read as a route to expert 0: it is left out whatever it holds. So is any token with a
    negative id.
    """
    on = mask.bool()
    later = on.flip(-1).cumsum(-1).flip(-1)
    known = (experts >= 0).flatten(2).all(-1) & (rollout_experts >= 0).flatten(2).all(-1)
    return on & (later > 1) & known


def routing_stats(
    experts: Tensor, rollout_experts: Tensor, mask: Tensor, distance: Tensor | None = None, scored: Tensor | None = None
) -> Stats:
    """Compare the experts (B, T, layers, k) that trainer and rollout engine chose, over ``mask`` (B, T).

    ``routing_layer_frac``: share of (token, layer) pairs whose sets of experts differ. ``routing_token_frac``: share of
    tokens that differ in at least one layer. ``routing_layers``: mean number of such layers of a token. With
    ``distance`` = |d| (B, T) over ``scored`` (B, T) also ``routing_absdiff``: the mean |d| of the tokens that differ,
    to be compared with that of all. Empty if the two differ in shape, or do not lie on the device of ``mask``, because
    a copy would wait.
    """
    alike = experts.shape == rollout_experts.shape and experts.device == rollout_experts.device == mask.device
    if not alike or experts.dim() != 4 or not experts.shape[2]:
        return {}
    on, layers = recorded(experts, rollout_experts, mask), differing_layers(experts, rollout_experts).float()
    moved = layers > 0
    stats: Stats = {
        "mismatch/routing_layer_frac": Mean.of(layers / experts.shape[2], on),
        "mismatch/routing_token_frac": Mean.of(moved.float(), on),
        "mismatch/routing_layers": Mean.of(layers, on),
    }
    if distance is not None and scored is not None:
        stats["mismatch/routing_absdiff"] = Mean.of(widen(distance), on & moved & scored)
    return stats


def router_shift_stats(experts: Tensor, old_experts: Tensor, mask: Tensor) -> Stats:
    """Compare the experts chosen by the policy being updated with those of the policy that the update began with.

    ``experts`` and ``old_experts`` are (B, T, layers, k), ``mask`` (B, T). ``ratio/router_token_frac``: share of tokens
    that differ in at least one layer. ``ratio/router_layer_frac``: share of (token, layer) pairs. Such a shift makes
    ratios volatile and precedes collapse (arXiv 2510.23027). Empty if the two differ in shape, or do not lie on the
    device of ``mask``.
    """
    alike = experts.shape == old_experts.shape and experts.device == old_experts.device == mask.device
    if not alike or experts.dim() != 4 or not experts.shape[2]:
        return {}
    known = mask.bool() & (experts >= 0).flatten(2).all(-1) & (old_experts >= 0).flatten(2).all(-1)
    layers = differing_layers(experts, old_experts).float()
    return {
        "ratio/router_layer_frac": Mean.of(layers / experts.shape[2], known),
        "ratio/router_token_frac": Mean.of((layers > 0).float(), known),
    }


MOST_EXPERTS = 512
"""Most experts of a layer that are counted; if there are more, nothing is reported."""


@dataclass(frozen=True, slots=True)
class MeanLoadViolation(Stat):
    """Mean imbalance ``|load * experts - 1|`` over experts and layers; ``load`` is the share of tokens that an expert
    gets.

    ``loads`` (layers, MOST_EXPERTS) int64 counts the tokens that went to each expert. The number of experts follows
    from the highest index that was seen.
    """

    loads: Tensor

    @classmethod
    def of(cls, experts: Tensor, mask: Tensor) -> Self:
        """Count the ``experts`` (B, T, layers, k) of the tokens inside ``mask`` (B, T)."""
        on, layers = mask.bool(), experts.shape[2]
        known = (on[..., None, None] & (experts >= 0) & (experts < MOST_EXPERTS)).transpose(0, 2).flatten()
        ids = experts.clamp(0, MOST_EXPERTS - 1).long()
        places = (ids + MOST_EXPERTS * torch.arange(layers, device=ids.device)[:, None]).transpose(0, 2).flatten()
        empty = torch.zeros(layers * MOST_EXPERTS, dtype=torch.int64, device=ids.device)
        loads = empty.scatter_add_(0, places, known.long()).view(layers, MOST_EXPERTS)
        fits = (torch.where(on[..., None, None], experts, 0) < MOST_EXPERTS).all()
        return cls(torch.where(fits, on.sum().to(torch.float32), 0.0), loads)

    @override
    def merge(self, other: Self) -> Self:
        both = (self.count > 0) & (other.count > 0) | (self.loads.sum() == 0) | (other.loads.sum() == 0)
        return replace(self, count=torch.where(both, self.count + other.count, 0.0), loads=self.loads + other.loads)

    def violations(self) -> tuple[Tensor, Tensor]:
        """Return how far each expert's load is from an even load, load * experts - 1 (layers, MOST_EXPERTS).

        Also returns a mask of the experts that exist, of the same shape.
        """
        number = torch.arange(1, MOST_EXPERTS + 1, device=self.loads.device)
        experts = torch.where(self.loads.any(0), number, 0).amax()
        loads = self.loads.double()
        return loads / loads.sum(1, keepdim=True) * experts - 1, (number <= experts).expand_as(self.loads)

    @override
    def value(self) -> Tensor:
        violations, there = self.violations()
        return torch.where(there, violations.abs(), 0.0).sum() / there.sum()


class LoadViolation(MeanLoadViolation):
    """Imbalance load * experts - 1 of the busiest expert of a layer, mean over layers."""

    @override
    def value(self) -> Tensor:
        violations, there = self.violations()
        return torch.where(there, violations, -torch.inf).amax(1).mean()


class WorstLoadViolation(MeanLoadViolation):
    """Imbalance load * experts - 1 of the busiest expert of all layers."""

    @override
    def value(self) -> Tensor:
        violations, there = self.violations()
        return torch.where(there, violations, -torch.inf).max()


def load_stats(experts: Tensor, mask: Tensor) -> Stats:
    """Return the imbalance of the router's expert loads over the tokens inside ``mask`` (B, T), as trainers log it.

    ``experts``: (B, T, layers, k) expert ids. Empty if they do not lie on the device of ``mask``, because a copy would
    wait.
    """
    fits = experts.dim() == 4 and experts.shape[:2] == mask.shape and experts.shape[2]
    if not fits or experts.device != mask.device:
        return {}
    on = recorded(experts, experts, mask)
    return {
        "mismatch/moe_avg_vio": MeanLoadViolation.of(experts, on),
        "mismatch/moe_max_vio": LoadViolation.of(experts, on),
        "mismatch/moe_worst_vio": WorstLoadViolation.of(experts, on),
    }


# Observers of a batch.


def observe_mismatch(batch: TokenBatch) -> Stats:
    """Return statistics of the size of the mismatch between trainer and rollout engine; empty without the engine's
    log-probs.

    They are those of the log-probs, of the raw importance weights, and of the probabilities.
    """
    batch = tokens_of(batch)
    if batch.rollout_logp is None:
        return {}
    gap = gap_of(batch.trainer_logp, batch.rollout_logp, batch.mask)
    stats = {
        **gap_stats(gap, USUAL.capped_as(batch.truncation)),
        **nonfinite_stats("rollout_logp", batch.rollout_logp, batch.mask),
    }
    if batch.truncation is not None:
        stats["mismatch/is_ratio"] = Mean.of(gap.weight.clamp(max=batch.truncation), gap.scored)
    return stats


def observe_mismatch_detail(batch: TokenBatch) -> Stats:
    """Return statistics of where and how the mismatch between trainer and rollout engine occurs.

    These are divergences, tails, the effect on the gradient, whole responses, and routing to experts if it is known.
    """
    gap = None if batch.rollout_logp is None else gap_of(batch.trainer_logp, batch.rollout_logp, batch.mask)
    routes = batch.experts if batch.experts is not None else batch.rollout_experts
    loads = {} if routes is None else load_stats(routes, batch.mask)
    shift = (
        {}
        if batch.experts is None or batch.old_experts is None
        else router_shift_stats(batch.experts, batch.old_experts, batch.mask)
    )
    return {**_gap_stats(batch, gap), **loads, **shift, **_routing_stats(batch, gap)}


def _gap_stats(batch: TokenBatch, gap: LogProbGap | None) -> Stats:
    if gap is None:
        return {}
    at = USUAL.capped_as(batch.truncation)
    stats = {**tail_stats(gap, at, batch.entropy), **response_gap_stats(gap, at)}
    tokens = tokens_of(batch)
    if tokens.rollout_logp is not None:
        gap = gap_of(tokens.trainer_logp, tokens.rollout_logp, tokens.mask)
        stats |= divergence_stats(gap)
        if tokens.token_advantages is not None:
            stats |= advantage_stats(gap, tokens.token_advantages)
    return stats


def _routing_stats(batch: TokenBatch, gap: LogProbGap | None) -> Stats:
    if batch.experts is None or batch.rollout_experts is None:
        return {}
    if gap is None:
        return routing_stats(batch.experts, batch.rollout_experts, batch.mask)
    return routing_stats(batch.experts, batch.rollout_experts, batch.mask, gap.d.abs(), gap.scored)
