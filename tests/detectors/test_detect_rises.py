"""Clip fractions, importance weights, off-policy shares, staleness: what rises above its own beginning is told once it
lasts, and nothing else is.
"""

import math
import random

import pytest
from exact_runs import alarms, always, exact, swinging, then, when
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.detectors.rise import Rise, RiseLimit, log_size, odds, size, spread_of_ess
from rlwatch.detectors.rises import OffPolicyMask, RatioDrift, Staleness, WeightTail
from rlwatch.detectors.trust_region.clipping import ClipSaturation
from rlwatch.detectors.trust_region.ratio_growth import RatioGrowth
from rlwatch.records import ClosedStep

CASES = [
    (ClipSaturation, "ratio/clipfrac", 0.002, 0.3),
    (ClipSaturation, "ratio/clipfrac_low", 0.001, 0.3),
    (ClipSaturation, "ratio/clipfrac_high", 0.001, 0.3),
    (ClipSaturation, "ratio/clipfrac_dual", 0.0, 0.05),
    (WeightTail, "ratio/ess", 0.99, 0.3),
    (WeightTail, "ratio/seq_ess", 0.9, 0.2),
    (WeightTail, "ratio/product_ess", 0.8, 0.05),
    (WeightTail, "ratio/chi2", 0.01, 3.0),
    (WeightTail, "ratio/m2", 0.002, 0.1),
    (WeightTail, "ratio/p99", 1.1, 4.0),
    (RatioDrift, "ratio/geo_mean", 1.001, 0.9),
    (RatioDrift, "ratio/seq_mean", 1.0, 1.5),
    (RatioDrift, "ratio/mean", 1.0, 1.3),
    (RatioGrowth, "ratio/log_var_growth", 2e-5, 5e-3),
    (OffPolicyMask, "offpolicy/masked", 0.01, 0.4),
    (OffPolicyMask, "offpolicy/masked_neg", 0.02, 0.6),
    (OffPolicyMask, "offpolicy/kl_neg_max", 0.05, 2.0),
    (Staleness, "staleness/mean", 1.0, 5.0),
    (Staleness, "staleness/worst_mean", 1.5, 6.0),
    (Staleness, "staleness/max", 2.0, 20.0),
    (Staleness, "staleness/spans_mean", 1.2, 5.0),
    (Staleness, "staleness/spans_max", 2.0, 20.0),
    (Staleness, "staleness/stale_frac", 0.2, 0.9),
]
each = pytest.mark.parametrize(("detector", "metric", "before", "after"), CASES)


def noisy(level, seed=0):
    """A curve that scatters by a tenth, towards 1 where it may not exceed it."""
    noise = random.Random(seed)
    return lambda step: level(step) * math.exp(-abs(noise.gauss(0.0, 0.1)))


def test_every_limit_has_a_case():
    """A limit nobody tests may be anything."""
    detectors = (ClipSaturation, WeightTail, RatioDrift, RatioGrowth, OffPolicyMask, Staleness)

    assert {metric for _, metric, _, _ in CASES} == {limit.metric for d in detectors for limit in d.limits}


@each
@pytest.mark.parametrize(("every", "within"), [(1, 8), (5, 30), (10, 50)])
def test_a_lasting_rise_is_a_warning_dated_to_its_beginning(detector, metric, before, after, every, within):
    """Within eight rows, in coarse logs five; never critical: by itself it ends no run."""
    rows = exact({metric: then(before, after, 40 * every)}, length=80, every=every)

    found = alarms(detector(), rows)

    assert list(found) == ["warning"]
    assert 40 * every < found["warning"].step <= 40 * every + within
    assert found["warning"].onset_step == 40 * every
    assert found["warning"].metric == metric
    assert found["warning"].score > 1.0
    assert all(isinstance(value, float) for value in found["warning"].evidence.values())


@each
@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_level_that_was_there_from_the_start_is_the_runs_own(detector, metric, before, after, every):
    """Between its first rows and the rest nothing changed, high as it is."""
    assert when(detector(), exact({metric: noisy(always(after))}, length=120, every=every)) == {}


@each
def test_single_spikes_and_short_blips_are_nothing(detector, metric, before, after):
    """One row in ten; and four rows of a learning rate, or of hard data, that came and went."""
    spikes = exact({metric: lambda s: after if s % 10 == 9 else before}, length=150)
    blip = exact({metric: lambda s: after if 60 <= s < 64 else before}, length=150)

    assert when(detector(), spikes) == {}
    assert when(detector(), blip) == {}


@each
def test_gaps_and_nan_change_nothing(detector, metric, before, after):
    """Rows without the metric, and rows in which it is NaN or infinite."""
    curve = then(before, after, 60)
    odd = {1: None, 2: math.nan, 3: math.inf}
    rows = exact({metric: lambda s: odd[s % 4] if s % 4 in odd else curve(s), "reward/mean": always(0.5)}, length=140)

    found = alarms(detector(), rows)

    assert list(found) == ["warning"]
    assert 60 <= found["warning"].onset_step <= 64
    assert found["warning"].step <= 60 + 40


@each
def test_what_fell_back_is_over(detector, metric, before, after):
    """Within a window of rows."""
    rows = exact({metric: lambda s: after if 40 <= s < 70 else before}, length=100)
    watch = detector()
    last = [row.step for row in rows if watch.update(row)][-1]

    assert 70 <= last <= 80


@each
def test_a_resume_keeps_the_beginning_and_forgets_what_was_undone(detector, metric, before, after):
    """The steps since the checkpoint never happened; a rise after it is found as ever."""
    watch = detector()
    for row in exact({metric: then(before, after, 40)}, length=60):
        watch.update(row)
    again = exact({metric: then(before, after, 70)}, length=100)[35:]
    said = [row.step for row in again if watch.update(row)]

    assert said
    assert said[0] >= 70


@each
def test_a_metric_that_is_no_longer_logged_is_no_longer_judged(detector, metric, before, after):
    """Others still are: what it last said holds for ten rows."""
    other = next(limit.metric for limit in (*detector.limits, RiseLimit("x", 1.0, 1.0)) if limit.metric != metric)
    curves = {metric: lambda s: None if s >= 60 else after if s >= 40 else before, other: always(0.0)}
    rows = exact(curves if other != "x" else {metric: curves[metric]}, length=100)
    watch = detector()
    last = [row.step for row in rows if any(f.metric == metric for f in watch.update(row))][-1]

    assert 60 <= last <= 70


@pytest.mark.parametrize(("level", "said"), [(0.095, {}), (0.11, {"warning": 47})])
def test_a_tenth_of_the_tokens_is_the_least_that_is_told(level, said):
    """However small the fraction was."""
    assert when(ClipSaturation(), exact({"ratio/clipfrac": then(1e-4, level, 40)}, length=80)) == said


@pytest.mark.parametrize(("level", "said"), [(0.39, {}), (0.43, {"warning": 47})])
def test_a_loss_that_clips_whole_responses_clips_more(level, said):
    """GSPO's 0.15 is healthy: fourfold odds, and at least 0.4 where sequence ratios tell what loss it is."""
    plain = {"ratio/clipfrac": then(0.15, level, 40)}
    told = plain | {"ratio/seq_mean": always(1.0)}
    small = {"ratio/clipfrac": then(0.02, 0.3, 40)}

    assert when(ClipSaturation(), exact(told, length=80)) == said
    assert when(ClipSaturation(), exact(small, length=80)) == {"warning": 46}
    assert when(ClipSaturation(), exact(small | {"ratio/seq_mean": always(1.0)}, length=80)) == {}
    assert "responses are clipped" in _message(ClipSaturation, {**told, "ratio/clipfrac": then(0.15, 0.6, 40)})


@pytest.mark.parametrize(("length", "said"), [(400.0, {}), (4000.0, {"warning": 47})])
def test_growth_with_length_counts_by_the_length_there_is(length, said):
    """2e-4 nats^2 a token leave 0.92 of short responses, and 0.45 of long ones."""
    rows = exact({"ratio/log_var_growth": then(1e-5, 2e-4, 40), "len/mean": always(length)}, length=80)
    found = alarms(RatioGrowth(), rows)

    assert {severity: f.step for severity, f in found.items()} == said
    for finding in found.values():
        assert finding.evidence["variance"] == pytest.approx(0.8)
        assert "is 0.449" in finding.message


def test_an_effective_sample_size_follows_the_lognormal_law():
    """s = 0.02 over 1,024 tokens leaves 0.66, over 8,192 tokens 0.038 (METHODS: exp(-s^2 T))."""
    rows = exact({"ratio/log_var_growth": then(0.0, 4e-4, 30), "len/mean": always(8192.0)}, length=60)

    assert "is 0.0377" in alarms(RatioGrowth(), rows)["warning"].message


def test_a_count_under_the_name_of_a_share_says_nothing():
    """slime counts masked sequences; without the batch that is no share."""
    assert when(OffPolicyMask(), exact({"offpolicy/masked": then(2.0, 200.0, 40)}, length=80)) == {}


def test_the_worst_of_several_metrics_speaks():
    """By how far it is beyond its limit."""
    rows = exact({"ratio/ess": then(0.99, 0.4, 40), "ratio/chi2": then(0.01, 50.0, 40)}, length=80)

    assert alarms(WeightTail(), rows)["warning"].metric == "ratio/chi2"


@pytest.mark.parametrize(("level", "way"), [(0.9, "less likely"), (1.2, "likelier")])
def test_a_drift_says_which_way(level, way):
    """Below one, responses lose probability."""
    assert way in _message(RatioDrift, {"ratio/geo_mean": then(1.0, level, 40)})


def test_messages_hold_their_numbers():
    """As a person reads them."""
    assert "30.0% of the tokens are clipped (ratio/clipfrac), at the start 0.2%" in _message(
        ClipSaturation, {"ratio/clipfrac": then(0.002, 0.3, 40)}
    )
    assert "drops 40% of the responses, at the start 1.0%" in _message(
        OffPolicyMask, {"offpolicy/masked": then(0.01, 0.4, 40)}
    )
    assert "drops 60% of the responses of negative advantage" in _message(
        OffPolicyMask, {"offpolicy/masked_neg": then(0.01, 0.6, 40)}
    )
    assert "is 2 nats/token from the policy that sampled it" in _message(
        OffPolicyMask, {"offpolicy/kl_neg_max": then(0.05, 2.0, 40)}
    )
    assert "staleness/mean is 5 policy versions, at the start 1" in _message(
        Staleness, {"staleness/mean": then(1.0, 5.0, 40)}
    )
    assert "effective sample size of the tokens' importance ratios is 0.3" in _message(
        WeightTail, {"ratio/ess": then(0.99, 0.3, 40)}
    )


def _message(detector, curves):
    return alarms(detector(), exact(curves, length=80))["warning"].message


def test_scales_say_what_they_should():
    """Odds of shares, chi^2 of sample sizes, distance of ratios from one."""
    assert (odds(0.5), odds(0.2)) == (1.0, 0.25)
    assert (spread_of_ess(1.0), spread_of_ess(0.5)) == (0.0, 1.0)
    assert log_size(2.0) == pytest.approx(log_size(0.5)) == pytest.approx(math.log(2.0))
    assert size(-3.0) == 3.0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_scales_hold_any_number(value):
    """Shares above one and ratios of nothing come from broken logs."""
    for scale in (odds, spread_of_ess, log_size):
        assert 0.0 <= scale(value) < math.inf


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.none() | st.floats(min_value=0.0, max_value=0.09)), max_size=60))
def test_below_its_floor_nothing_ever_lasts(rows):
    """Whatever the order, the gaps and the cadence."""
    rise, step = Rise(RiseLimit("ratio/clipfrac", 0.1, 4.0, odds)), 0
    for gap, value in rows:
        step += gap
        rise.update(step, value)
        assert not rise.lasted
        assert rise.score < 1.0


def test_a_swinging_level_is_judged_by_its_middle():
    """Rows far above the limit in turn with rows near nothing."""
    assert when(ClipSaturation(), exact({"ratio/clipfrac": swinging(0.01, 0.05, 40, 0.01)}, length=90)) == {}
    assert when(ClipSaturation(), exact({"ratio/clipfrac": swinging(0.01, 0.3, 40, 0.01)}, length=90)) != {}


def test_a_run_that_breaks_in_its_warm_up_is_measured_by_what_came_before():
    """From the twelfth of twenty rows on: what is far out does not become the beginning."""
    rows = exact({"ratio/ess": lambda s: (0.99 + 0.001 * (s % 3)) if s < 11 else 0.2}, length=40)

    assert alarms(WeightTail(), rows)["warning"].onset_step == 11


@pytest.mark.parametrize("detector", [ClipSaturation, WeightTail, RatioDrift, RatioGrowth, OffPolicyMask, Staleness])
def test_nothing_is_said_before_a_beginning_is_known(detector):
    """Two rows are none."""
    watch = detector()
    rows = [ClosedStep(step=i, metrics={limit.metric: 1e6 for limit in detector.limits}) for i in range(2)]

    assert [watch.update(row) for row in rows] == [[], []]


ROWS = st.lists(
    st.tuples(
        st.integers(-4, 12),
        st.one_of(st.none(), st.sampled_from([0.0, -0.0, 0.01, -0.3, 0.2, 0.9, 5.0, -5.0, 1e12]), st.floats(-3.0, 3.0)),
    ),
    min_size=20,
    max_size=120,
)


@given(rows=ROWS, scale=st.sampled_from([size, odds, log_size]), calm=st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_rows_that_change_nothing_may_be_taken_later(rows, scale, calm):
    """One that is asked at every row, and so takes each at once, says the same as one that is asked at the end."""
    limit = RiseLimit("m", 0.5, 2.0, scale)
    asked, left = Rise(limit), Rise(limit)
    step, said = 50, []
    for gap, value in [*[(1, 0.1)] * 25, *[(1, 0.05)] * calm, *rows]:
        step = max(step + gap, 0)
        for rise in (asked, left):
            rise.update(step, value)
        said.append((asked.level, asked.score, asked.factor))
        assert (asked.lasted, asked.since, asked.threshold) == (left.lasted, left.since, left.threshold)
        if left.lasted:
            assert said[-1] == (left.level, left.score, left.factor)

    assert said[-1] == (left.level, left.score, left.factor)
