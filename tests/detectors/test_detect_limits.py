"""Every limit that is data, met exactly: a level just below it is nothing, one just above it is reported."""

import math

import pytest
from exact_runs import alarms, exact, then

from rlwatch.detectors import rises
from rlwatch.detectors.rise import RiseDetector
from rlwatch.detectors.rises import (
    MismatchTail,
    MoEImbalance,
    OffPolicyMask,
    RatioDrift,
    Repetition,
    RouterShift,
    RoutingMismatch,
    Staleness,
    WeightTail,
)
from rlwatch.detectors.rollouts.broken_output import GarbledOutput
from rlwatch.detectors.rollouts.lengths import LengthSurge, LongTail
from rlwatch.detectors.rollouts.token_ids import MaskLeakage, Retokenisation
from rlwatch.detectors.trust_region.clipping import ClipSaturation

PLAIN = (lambda value: value, lambda size: size)
SHARE = (lambda share: share / (1 - share), lambda odds: odds / (1 + odds))
INVERSE = (lambda value: 1 / value, lambda size: 1 / size)
MISSING = (lambda share: (1 - share) / share, lambda odds: 1 / (1 + odds))
DISTINCT = MISSING
WEIGHT = (math.log, math.exp)
CHI2 = (math.log1p, math.expm1)
"""The scale on which a metric is compared with its beginning, and back; of effective sample sizes as of distinct
n-grams: how much is missing, to what is there."""

LIMITS = [
    (MismatchTail, "mismatch/ess", 0.7, 4.0, DISTINCT),
    (MismatchTail, "mismatch/chi2", 0.5, 4.0, PLAIN),
    (MismatchTail, "mismatch/m2", 0.04, 4.0, PLAIN),
    (MismatchTail, "mismatch/factor2_frac", 0.02, 4.0, PLAIN),
    (MismatchTail, "mismatch/seq_ess", 0.1, 4.0, DISTINCT),
    (MismatchTail, "mismatch/seq_chi2", 20.0, 2.0, CHI2),
    (MismatchTail, "mismatch/seq_weight_max", 20.0, 2.0, WEIGHT),
    (MismatchTail, "mismatch/seq_rejected", 0.5, 2.0, PLAIN),
    (MoEImbalance, "mismatch/moe_avg_vio", 0.5, 1.6, PLAIN),
    (MoEImbalance, "mismatch/moe_max_vio", 2.0, 2.0, PLAIN),
    (MoEImbalance, "mismatch/moe_worst_vio", 4.0, 2.0, PLAIN),
    (RouterShift, "ratio/router_layer_frac", 0.03, 2.0, SHARE),
    (RouterShift, "ratio/router_token_frac", 0.3, 4.0, SHARE),
    (RoutingMismatch, "mismatch/routing_layer_frac", 0.02, 2.0, SHARE),
    (RoutingMismatch, "mismatch/routing_layers", 1.0, 2.0, PLAIN),
    (RoutingMismatch, "mismatch/routing_absdiff", 0.05, 2.0, PLAIN),
    (WeightTail, "ratio/ess", 0.5, 4.0, DISTINCT),
    (WeightTail, "ratio/seq_ess", 0.5, 4.0, DISTINCT),
    (WeightTail, "ratio/product_ess", 0.15, 4.0, DISTINCT),
    (WeightTail, "ratio/chi2", 1.0, 5.0, PLAIN),
    (WeightTail, "ratio/m2", 0.04, 4.0, PLAIN),
    (WeightTail, "ratio/p99", 2.0, 3.0, WEIGHT),
    (RatioDrift, "ratio/geo_mean", 1.02, 5.0, WEIGHT),
    (RatioDrift, "ratio/seq_mean", 1.1, 5.0, WEIGHT),
    (RatioDrift, "ratio/mean", 1.05, 5.0, WEIGHT),
    (OffPolicyMask, "offpolicy/masked", 0.15, 4.0, SHARE),
    (OffPolicyMask, "offpolicy/masked_neg", 0.3, 4.0, SHARE),
    (OffPolicyMask, "offpolicy/kl_neg_max", 1.0, 4.0, PLAIN),
    (Staleness, "staleness/mean", 3.0, 2.0, PLAIN),
    (Staleness, "staleness/worst_mean", 4.0, 2.0, PLAIN),
    (Staleness, "staleness/max", 8.0, 2.0, PLAIN),
    (Staleness, "staleness/spans_mean", 3.0, 2.0, PLAIN),
    (Staleness, "staleness/spans_max", 8.0, 2.0, PLAIN),
    (Staleness, "staleness/stale_frac", 0.5, 4.0, SHARE),
    (Repetition, "text/looping_frac", 0.1, 4.0, SHARE),
    (Repetition, "text/tail_loop", 0.1, 4.0, SHARE),
    (Repetition, "text/loop_cover", 0.15, 4.0, SHARE),
    (Repetition, "text/repetition_frac", 0.05, 4.0, SHARE),
    (Repetition, "text/repetition", 0.4, 3.0, SHARE),
    (Repetition, "text/distinct_2", 0.3, 4.0, DISTINCT),
    (Repetition, "text/zlib_ratio", 6.0, 2.0, PLAIN),
    (ClipSaturation, "ratio/clipfrac", 0.1, 4.0, SHARE),
    (ClipSaturation, "ratio/clipfrac_low", 0.1, 4.0, SHARE),
    (ClipSaturation, "ratio/clipfrac_high", 0.1, 4.0, SHARE),
    (ClipSaturation, "ratio/clipfrac_dual", 0.02, 4.0, SHARE),
    (LongTail, "len/tail_ratio", 4.0, 2.0, PLAIN),
    (LongTail, "len/max_over_mean", 5.0, 2.0, PLAIN),
    (LongTail, "len/bubble", 0.8, 2.0, SHARE),
    (LongTail, "len/gini", 0.6, 2.0, SHARE),
    (LongTail, "partial/frac", 0.4, 2.0, SHARE),
    (LongTail, "partial/retention_mean", 2.0, 2.0, PLAIN),
    (LongTail, "partial/retention_max", 6.0, 2.0, PLAIN),
    (LongTail, "len/budget_used", 0.6, 1.5, INVERSE),
    (LongTail, "time/rollout_idle", 0.5, 2.0, SHARE),
    (GarbledOutput, "text/garbled", 0.01, 5.0, SHARE),
    (GarbledOutput, "text/replacement", 0.005, 5.0, SHARE),
    (GarbledOutput, "text/script_switches", 4.0, 4.0, PLAIN),
    (GarbledOutput, "text/zlib_ratio", 1.5, 1.5, INVERSE),
    (LengthSurge, "len/mean", 32.0, 2.0, PLAIN),
    (LengthSurge, "len/clipped", 0.5, 9.0, SHARE),
    (LengthSurge, "text/eos_missing", 0.5, 9.0, SHARE),
]
SAMPLED = [
    ("text/retok_exact", 0.9, 3.0, MISSING),
    ("text/retok_edit", 0.005, 3.0, PLAIN),
    ("text/retok_naive", 0.05, 3.0, PLAIN),
    ("text/turn_prefix_kept", 0.98, 3.0, MISSING),
]
"""Limits of ids that nobody sampled: beyond them from the start is information, grown beyond them a warning."""
COSTS_TIME_ALONE = {"len/tail_ratio", "len/max_over_mean", "len/bubble", "len/gini"}
"""Metrics that are said without a warning."""
each = pytest.mark.parametrize(("detector", "metric", "floor", "factor", "scale"), LIMITS)


def severities(detector, metric, before, after):
    """Of a run whose level changes once, at step 40."""
    return list(alarms(detector(), exact({metric: then(before, after, 40)}, length=80)))


def reported(metric):
    """The severity of its finding."""
    return ["info" if metric in COSTS_TIME_ALONE else "warning"]


def test_every_limit_that_is_data_has_a_row():
    """A limit that nobody crosses may be anything."""
    data = [each for each in vars(rises).values() if isinstance(each, type) and issubclass(each, RiseDetector)]

    assert {metric for _, metric, *_ in LIMITS} >= {
        limit.metric for each in data for limit in getattr(each, "limits", ())
    }


@each
def test_the_floor_of_a_run_that_began_at_next_to_nothing(detector, metric, floor, factor, scale):
    """Three per cent to each side of it, on the scale it is compared on."""
    on, back = scale
    began = back(on(floor) / factor / 4)

    assert severities(detector, metric, began, back(0.97 * on(floor))) == []
    assert severities(detector, metric, began, back(1.03 * on(floor))) == reported(metric)


@each
def test_the_factor_of_a_run_that_began_higher(detector, metric, floor, factor, scale):
    """At twice the floor over the factor: three per cent to each side of twice the floor."""
    on, back = scale
    began = back(2 * on(floor) / factor)

    assert severities(detector, metric, began, back(0.97 * 2 * on(floor))) == []
    assert severities(detector, metric, began, back(1.03 * 2 * on(floor))) == reported(metric)


@pytest.mark.parametrize(("metric", "floor", "factor", "scale"), SAMPLED)
def test_what_was_never_sampled_is_information_from_the_start_and_a_warning_where_it_grew(metric, floor, factor, scale):
    """Just below the limit neither."""
    on, back = scale
    below, beyond = back(0.97 * on(floor)), back(1.03 * on(floor))
    least, grown, most = (back(size * on(floor)) for size in (2 / factor, 1.94, 2.06))

    assert severities(Retokenisation, metric, below, below) == []
    assert severities(Retokenisation, metric, beyond, beyond) == ["info"]
    assert severities(Retokenisation, metric, back(0.0), below) == []
    assert "warning" in severities(Retokenisation, metric, back(on(floor) / 100), beyond)
    assert "warning" not in severities(Retokenisation, metric, least, grown)
    assert "warning" in severities(Retokenisation, metric, least, most)


@pytest.mark.parametrize(("leak", "said"), [(0.00097, []), (0.00103, ["warning"])])
def test_a_thousandth_of_what_tools_wrote_is_a_leak(leak, said):
    """From the first rows on, and when it begins."""
    assert severities(MaskLeakage, "tokens/environment_leak", leak, leak) == said
    assert severities(MaskLeakage, "tokens/environment_leak", 0.0, leak) == said
