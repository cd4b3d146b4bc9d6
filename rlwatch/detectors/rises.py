"""Detectors that are only data: a metric that is near zero in a healthy run rises, and the rise itself is the failure.

Each lists its metrics with their limits and the text of the finding; :class:`~rlwatch.detectors.rise.RiseDetector` does
the rest. A failure that needs more (another metric's confirmation, another severity) has its own file in the package of
its family.
"""

from __future__ import annotations

import math

from rlwatch.detectors.rise import MOST, FormattedNumber, Rise, RiseDetector, RiseLimit, log_size, odds, spread_of_ess


def log_of_chi2(chi2: float) -> float:
    """Return log(1 + chi^2) in nats, as the scale of products of many weights, which span decades in healthy runs.

    An estimate of chi^2 below 0, which a sample can give, counts as 0.
    """
    return math.log1p(min(max(chi2, 0.0), MOST))


def log_above_one(weight: float) -> float:
    """Return the logarithm of a weight above 1, in nats; 0 for weights up to 1."""
    return math.log(min(max(weight, 1.0), MOST))


def repeated(distinct: float) -> float:
    """Return the odds r / (1 - r) that an n-gram is a repetition, r = 1 - ``distinct``, the share of distinct
    n-grams.
    """
    return MOST if distinct <= 0.0 else odds(max(1.0 - distinct, 0.0))


class MismatchTail(RiseDetector):
    """Detector of heavy tails of the importance weights between trainer and rollout engine, compared with the start.

    It reads effective sample size, chi-squared and second moment. verl computes its effective sample size after
    truncation, which looks healthy if much is cut, so chi-squared and the weights of responses are read as well.
    Weights of whole responses vary by decades between healthy runs (sequence KL 7.6 in BF16, 0.3 in FP16: arXiv
    2510.26788), so theirs are compared on log scales.
    """

    name = "mismatch_tail"
    limits = (
        RiseLimit(
            "mismatch/ess",
            0.7,
            4.0,
            spread_of_ess,
            text="the effective sample size of the tokens' weights is {level} of their number",
        ),
        RiseLimit("mismatch/chi2", 0.5, 4.0, text="chi-squared of the tokens' weights is {level}"),
        RiseLimit("mismatch/m2", 0.04, 4.0, text="the mean squared log-weight is {level} nats^2"),
        RiseLimit(
            "mismatch/factor2_frac",
            0.02,
            4.0,
            text="a share of {level} of the tokens have probabilities more than a factor of 2 apart",
        ),
        RiseLimit(
            "mismatch/seq_ess",
            0.1,
            4.0,
            spread_of_ess,
            text="the effective sample size of the responses' weights is {level} of their number",
        ),
        RiseLimit("mismatch/seq_chi2", 20.0, 2.0, log_of_chi2, text="chi-squared of the responses' weights is {level}"),
        RiseLimit(
            "mismatch/seq_weight_max", 20.0, 2.0, log_above_one, text="the largest weight of a response is {level}"
        ),
        RiseLimit(
            "mismatch/seq_rejected",
            0.5,
            2.0,
            text="a share of {level} of the responses have weights outside the usual bounds",
        ),
    )
    factor = ", {} times its start on the scale it is judged by"
    message = (
        "{text}{factor}: a small part of what the rollout engine sampled carries the correction for it, or is cut by it"
    )


class MoEImbalance(RiseDetector):
    """Detector of uneven loads of experts in a mixture of experts, compared with the start.

    A load violation is an expert's share of tokens times the number of experts, less 1: 0 if even. Experts specialise,
    so the level differs between models; only its growth is judged.
    """

    name = "moe_imbalance"
    limits = (
        RiseLimit("mismatch/moe_avg_vio", 0.5, 1.6),
        RiseLimit("mismatch/moe_max_vio", 2.0, 2.0),
        RiseLimit("mismatch/moe_worst_vio", 4.0, 2.0),
    )
    message = (
        "the load of experts has become uneven: {metric} {level}, at the start {start} (0 is even): routing differs "
        "more between trainer and engine, and some experts are hardly trained"
    )
    baseline = "start"


class RoutingMismatch(RiseDetector):
    """Detector of tokens that trainer and rollout engine send to different experts, compared with the start.

    About a tenth of the (token, layer) pairs differ without replay in healthy runs, and nearly every token in some
    layer (R3, arXiv 2510.11370): growth is judged, the level is not.
    """

    name = "routing_mismatch"
    limits = (
        RiseLimit("mismatch/routing_layer_frac", 0.02, 2.0, odds),
        RiseLimit("mismatch/routing_layers", 1.0, 2.0),
        RiseLimit("mismatch/routing_absdiff", 0.05, 2.0),
    )
    factor = ", {} times its start"
    message = "trainer and rollout engine route tokens to other experts more often: {metric} {level}{factor}"
    baseline = "start"


class RouterShift(RiseDetector):
    """Detector of a growing share of tokens that an update routes to other experts than the policy it began with.

    It reads the share of (token, layer) pairs, and that of tokens. A router that moves during an update makes ratios
    volatile and clipping bursty, and precedes collapse (arXiv 2510.23027). The level depends on the model: growth
    against the start is judged.
    """

    name = "router_shift"
    limits = (
        RiseLimit("ratio/router_layer_frac", 0.03, 2.0, odds),
        RiseLimit("ratio/router_token_frac", 0.3, 4.0, odds),
    )
    factor = ", {} times its start"
    message = (
        "the router moves during the update: {metric} {level}{factor}; the ratios of these tokens compare two "
        "different sets of experts"
    )
    baseline = "start"


class WeightTail(RiseDetector):
    """Detector of heavy tails of the importance ratios pi / pi_old, compared with the start.

    It reads effective sample size (ESS), chi-squared, second moment and 99th percentile. Floors: alarm levels in use
    are 0.3 to 0.5 for ESS and 1 for chi-squared (verl's examples), 0.04 nats^2 for the second moment (arXiv
    2510.01161). Products over long responses lie at 0.55 in healthy multi-turn runs (arXiv 2602.17616), so their floor
    is lower.
    """

    name = "weight_tail"
    limits = (
        RiseLimit(
            "ratio/ess",
            0.5,
            4.0,
            spread_of_ess,
            text="the effective sample size of the tokens' importance ratios is {level} of their number",
        ),
        RiseLimit(
            "ratio/seq_ess",
            0.5,
            4.0,
            spread_of_ess,
            text="the effective sample size of the responses' ratios is {level} of their number",
        ),
        RiseLimit(
            "ratio/product_ess",
            0.15,
            4.0,
            spread_of_ess,
            text="the effective sample size of the products of responses' ratios is {level} of their number",
        ),
        RiseLimit("ratio/chi2", 1.0, 5.0, text="chi-squared of the importance ratios is {level}"),
        RiseLimit(
            "ratio/m2", 0.04, 4.0, text="the mean squared log-ratio is {level} nats^2 (M2PO holds it below 0.04)"
        ),
        RiseLimit(
            "ratio/p99",
            2.0,
            3.0,
            log_size,
            text="one token in a hundred is {level} times as likely as when it was sampled, or more",
        ),
    )
    factor = "; on the scale it is judged by, {} times its start"
    message = "{text}{factor}: a small part of the batch carries the update"


class RatioDrift(RiseDetector):
    """Detector of a mean importance ratio pi / pi_old that stays away from 1.

    It reads the means of responses' geometric means, of whole responses, and of tokens. The mean of pi / pi_old over
    samples of pi_old is 1 whatever pi is. A deviation beyond noise means that the samples are not from pi_old, or that
    a few of them dominate. The geometric mean follows no such law and drifts with the size of an update. All are
    compared with five times |log ratio| at the start.
    """

    name = "ratio_drift"
    limits = (
        RiseLimit("ratio/geo_mean", 1.02, 5.0, log_size),
        RiseLimit("ratio/seq_mean", 1.1, 5.0, log_size),
        RiseLimit("ratio/mean", 1.05, 5.0, log_size),
    )
    message = (
        "{metric} stands at {level}: in the update, responses are {way} than when they were sampled "
        "(|log| was {start} at the start)"
    )
    baseline = 1.0

    def fields(self, rise: Rise) -> dict[str, str | FormattedNumber]:
        """Return the values that the message's template is filled with, among them the direction of the drift.

        ``rise``: the metric's course so far.
        """
        way = "less likely" if (rise.level or 0.0) < 1.0 else "likelier"
        return super().fields(rise) | {"way": way}


class OffPolicyMask(RiseDetector):
    """Detector of a growing share of responses that DeepSeek-V3.2's off-policy mask drops (arXiv 2512.02556, eq. 9).

    It also reads the largest distance of a response with a negative advantage from the policy that sampled it. No
    threshold is published, so the run's own beginning counts first. The mask averages over a response: one impossible
    token in a long answer shows in the largest distance only. Some trainers log a count of responses under the name of
    a share: without the batch size it cannot be used.
    """

    name = "off_policy_mask"
    limits = (
        RiseLimit(
            "offpolicy/masked",
            0.15,
            4.0,
            odds,
            most=1.0,
            text="the off-policy mask drops {level:.0%} of the responses, at the start {start_share:.1%}",
        ),
        RiseLimit(
            "offpolicy/masked_neg",
            0.3,
            4.0,
            odds,
            most=1.0,
            text="the off-policy mask drops {level:.0%} of the responses of negative advantage, at the start "
            "{start_share:.1%}",
        ),
        RiseLimit(
            "offpolicy/kl_neg_max",
            1.0,
            4.0,
            text="a response of negative advantage is {level} nats/token from the policy that sampled it, at the start "
            "{start}",
        ),
    )
    message = "{text}: sampling and training policy drift apart (staleness or engine mismatch)"


_VERSIONS = "{metric} is {level} policy versions, at the start {start}"


class Staleness(RiseDetector):
    """Detector of growing staleness: policy versions between sampling and update, versions one response was sampled
    under, and share of stale responses.
    """

    name = "staleness"
    limits = (
        RiseLimit("staleness/mean", 3.0, 2.0, text=_VERSIONS),
        RiseLimit("staleness/worst_mean", 4.0, 2.0, text=_VERSIONS),
        RiseLimit("staleness/max", 8.0, 2.0, text=_VERSIONS),
        RiseLimit("staleness/spans_mean", 3.0, 2.0, text=_VERSIONS),
        RiseLimit("staleness/spans_max", 8.0, 2.0, text=_VERSIONS),
        RiseLimit(
            "staleness/stale_frac",
            0.5,
            4.0,
            odds,
            text="{level:.0%} of the responses are of an older policy, at the start {start_share:.0%}",
        ),
    )
    message = "{text}: the trainer runs ahead of the rollouts it learns from"
    baseline = "start"


class Repetition(RiseDetector):
    """Detector of loops and repeated n-grams in responses, above the run's beginning.

    It includes slime's rule for text that compresses more than tenfold. Long responses repeat more n-grams than short
    ones, so distinct-n has wide limits. A warning: the critical finding is the reward that looping responses cost a
    run. ``info`` while the reward rises with it: some tasks ask for repetition.
    """

    name = "repetition"
    limits = (
        RiseLimit(
            "text/looping_frac",
            0.1,
            4.0,
            odds,
            text="responses are caught in loops: share at least half covered by one repeated block",
        ),
        RiseLimit(
            "text/tail_loop",
            0.1,
            4.0,
            odds,
            text="responses end in a repeated block: share of a response it covers",
        ),
        RiseLimit("text/loop_cover", 0.15, 4.0, odds, text="repeated blocks cover much of a response"),
        RiseLimit(
            "text/repetition_frac",
            0.05,
            4.0,
            odds,
            text="long texts compress more than tenfold at their end: share that does",
        ),
        RiseLimit("text/repetition", 0.4, 3.0, odds, text="much of a response is repeated 3-grams"),
        RiseLimit("text/distinct_2", 0.3, 4.0, repeated, text="few 2-grams of a response are distinct"),
        RiseLimit("text/zlib_ratio", 6.0, 2.0, text="responses compress like loops"),
    )
    message = "{text} ({level}){reward}"
    follows_reward = True
    paid_for = True
