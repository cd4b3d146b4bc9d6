"""Mismatch beyond its mean: trend, level, tail, correlation, a mask that goes blind, a KL that is."""

import math
import random

import pytest
from exact_runs import alarms, always, exact, swinging, then, when, worst
from shaped_runs import firsts, flat, ramp, run
from shaped_runs import worst as worst_of

from rlwatch.detectors.mismatch.mismatch_growth import (
    LogTrend,
    MismatchBlind,
    MismatchCorrelation,
    MismatchGrowth,
    MismatchLevel,
)
from rlwatch.detectors.mismatch.mismatch_mask import MismatchMask
from rlwatch.detectors.rises import MismatchTail, MoEImbalance, RoutingMismatch
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep, Severity


@pytest.mark.parametrize("every", [1, 5])
def test_trend_finds_the_time_of_doubling(every):
    """Oracle: 2 ** (step / 30) doubles every 30 steps, with one outlier in it."""
    trend = LogTrend()
    for i in range(40):
        trend.update(i * every, math.log(2.0) * i * every / 30.0 + (5.0 if i == 20 else 0.0))

    assert trend.doubling() == pytest.approx(30.0, rel=0.01)


@pytest.mark.parametrize(
    "curve",
    [
        lambda i: 0.0,
        lambda i: -0.05 * i,
        lambda i: 0.001 * i,
        lambda i: 1.0 if i >= 20 else 0.0,
        lambda i: 1.0 if i % 2 else 0.0,
    ],
    ids=["constant", "falling", "hardly", "a step", "noise"],
)
def test_what_does_not_rise_steadily_has_no_time_of_doubling(curve):
    """A step up is a shift of level, not growth."""
    trend = LogTrend()
    for i in range(40):
        trend.update(i, curve(i))

    assert trend.doubling() is None


def test_slow_growth_is_warned_of_before_it_has_doubled():
    """Doubles every 100 steps from just below what counts as noise; the message says how fast."""
    rows = run({"mismatch/logp_absdiff": lambda s, n: 0.017 * 2 ** (s / 100) * math.exp(n.gauss(0, 0.03))}, length=90)
    found = firsts(MismatchGrowth(), rows)[Severity.WARNING]

    assert found.evidence["factor"] < 2.0
    assert found.evidence["doubling_steps"] == pytest.approx(100, rel=0.25)
    assert "doubles every" in found.message


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [("mismatch/log_ppl_absdiff", 0.069, 0.38), ("mismatch/mult_prob_error", 1.005, 1.5)],
)
def test_growth_is_seen_in_perplexity_and_multiplicative_error_too(metric, before, after):
    """The published collapse went from 0.069 to 0.38 in log-perplexity; NeMo-RL's error counts from 1."""
    rows = exact({metric: swinging(before, after, 60, 0.001)}, length=140)
    found = alarms(MismatchGrowth(), rows)

    assert set(found) == {"warning", "critical"}
    assert found["critical"].baseline <= after


def test_a_level_from_the_first_step_is_a_matter_of_set_up():
    """The published bands, with nothing growing: growth is silent, level warns and says so."""
    rows = exact({"mismatch/k3": always(0.3), "mismatch/prob_corr": always(0.9)})

    assert worst(MismatchGrowth(), rows) is None
    found = alarms(MismatchLevel(), rows)["warning"]
    assert found.evidence["from_the_start"] is True
    assert "mismatch/k3 0.3" in found.message
    assert "mismatch/prob_corr 0.9" in found.message


def test_a_level_the_run_began_close_to_is_not_said_to_have_been_there():
    """From 0.07 nats to 0.13, where others alarm at 0.1: a warning, which does not say that it was always so."""
    began = exact({"mismatch/log_ppl_absdiff": always(0.13)})
    grew = exact({"mismatch/log_ppl_absdiff": then(0.07, 0.13, 60)}, length=120)

    assert "was so when the run began" in alarms(MismatchLevel(), began)["warning"].message
    assert "was close to that when the run began" in alarms(MismatchLevel(), grew)["warning"].message


def test_a_level_the_run_has_grown_to_is_information():
    """Growth warns of it; two warnings of one thing are one too many."""
    assert worst(MismatchLevel(), exact({"mismatch/k3": then(0.001, 0.3, 30)})) == "info"


@pytest.mark.parametrize(
    ("metric", "healthy", "beyond"),
    [
        ("mismatch/k3", 0.09, 0.11),
        ("mismatch/kl", -0.09, -0.11),
        ("mismatch/logp_absdiff", 0.09, 0.11),
        ("mismatch/prob_absdiff", 0.045, 0.055),
        ("mismatch/prob_corr", 0.985, 0.975),
        ("mismatch/ess", 0.32, 0.28),
        ("mismatch/is_ratio", 0.55, 0.45),
        ("mismatch/is_ratio", 1.9, 2.1),
        ("mismatch/is_ratio_std", 0.9, 1.1),
        ("mismatch/chi2", 0.9, 1.1),
        ("mismatch/mult_prob_error", 1.04, 1.06),
    ],
)
def test_bands_are_those_that_others_alarm_at(metric, healthy, beyond):
    """verl's examples, slime's and NeMo-RL's gates."""
    assert worst(MismatchLevel(), exact({metric: always(healthy)})) is None
    assert worst(MismatchLevel(), exact({metric: always(beyond)})) == "warning"


def test_of_many_bands_the_worst_is_said_first_and_three_at_most():
    """Evidence has all of them."""
    beyond = {"mismatch/k3": 0.2, "mismatch/logp_absdiff": 0.15, "mismatch/prob_absdiff": 0.5, "mismatch/chi2": 2.0}
    found = alarms(MismatchLevel(), exact({name: always(level) for name, level in beyond.items()}))["warning"]

    assert found.metric == "mismatch/prob_absdiff"
    assert found.message.count("alarm level elsewhere") == 3
    assert found.message.index("mismatch/prob_absdiff") < found.message.index("mismatch/k3")
    assert found.evidence == beyond | {"from_the_start": True}


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [
        ("mismatch/ess", 0.97, 0.5),
        ("mismatch/chi2", 0.03, 1.5),
        ("mismatch/m2", 0.005, 0.1),
        ("mismatch/factor2_frac", 0.001, 0.05),
        ("mismatch/seq_ess", 0.6, 0.01),
        ("mismatch/seq_chi2", 2.0, 1e5),
        ("mismatch/seq_weight_max", 5.0, 1e4),
        ("mismatch/seq_rejected", 0.2, 0.7),
    ],
)
def test_each_measure_of_the_tail_speaks(metric, before, after):
    """Within a window's length of the change, and not before."""
    found = when(MismatchTail(), exact({metric: then(before, after, 30)}))

    assert set(found) == {"warning"}
    assert 30 < found["warning"] <= 42


def test_long_responses_may_have_wild_weights_from_the_start():
    """Sequence weights over decades are how half precision is, not how a run fails."""
    rows = exact({"mismatch/seq_chi2": swinging(1e6, 3e6, 30, 5e5), "mismatch/seq_ess": always(0.02)})

    assert worst(MismatchTail(), rows) is None


def test_a_falling_correlation_warns():
    """0.998 to 0.95 at step 30."""
    found = alarms(MismatchCorrelation(), exact({"mismatch/prob_corr": then(0.998, 0.95, 30)}))["warning"]

    assert found.onset_step == 30
    assert "0.950, at the start 0.998" in found.message


def test_a_correlation_that_falls_because_all_is_certain_is_no_mismatch():
    """Probabilities near 1 differ less and correlate less: the range is narrower."""
    curves = {"mismatch/prob_corr": then(0.998, 0.95, 30), "mismatch/prob_absdiff": then(0.007, 0.002, 30)}

    assert worst(MismatchCorrelation(), exact(curves)) is None


def mask(masked, gap, **more):
    return run({"mismatch/icepop_masked": masked, "mismatch/logp_absdiff": gap, **more}, length=200)


def test_mask_rate_down_and_gap_up_is_the_alarm():
    """KPop: the mask catches half while the gap doubles."""
    found = firsts(MismatchMask(), mask(ramp(1.5e-3, 5e-4, 60, 140, 0.2), ramp(0.02, 0.04, 60, 140, 0.1)))

    assert set(found) == {Severity.WARNING}
    assert 80 <= found[Severity.WARNING].step <= 150
    assert "no health" in found[Severity.WARNING].message


@pytest.mark.parametrize(
    ("masked", "gap"),
    [
        (ramp(1.5e-3, 5e-4, 60, 140, 0.2), flat(0.02, 0.1)),
        (ramp(1.5e-3, 5e-4, 60, 140, 0.2), ramp(0.02, 0.01, 60, 140, 0.1)),
        (ramp(1.5e-3, 4e-3, 60, 140, 0.2), ramp(0.02, 0.04, 60, 140, 0.1)),
        (flat(1.5e-3, 0.3), flat(0.02, 0.2)),
        (flat(0.0), ramp(0.02, 0.04, 60, 140, 0.1)),
        (ramp(5e-5, 1e-5, 60, 140, 0.2), ramp(0.02, 0.04, 60, 140, 0.1)),
    ],
    ids=["gap stays", "gap falls", "both rise", "neither moves", "masks nothing", "masked hardly any"],
)
def test_a_mask_rate_alone_says_nothing(masked, gap):
    """Only the two together are the sign."""
    assert worst_of(MismatchMask(), mask(masked, gap)) is None


@pytest.mark.parametrize(
    ("masked", "after", "gap", "wider", "said"),
    [
        (2e-3, 1.16e-3, 0.02, 0.026, {"warning"}),
        (2e-3, 1.24e-3, 0.02, 0.026, set()),
        (2e-3, 1.16e-3, 0.02, 0.0246, set()),
        (1.03e-4, 1e-5, 0.02, 0.026, {"warning"}),
        (0.97e-4, 1e-5, 0.02, 0.026, set()),
    ],
    ids=["both", "not fewer by four tenths", "not wider by a quarter", "just enough", "too few from the start"],
)
def test_a_mask_is_blind_from_here_on(masked, after, gap, wider, said):
    """Six tenths of the share, five quarters of the gap, and a share that is no accident."""
    curves = {"mismatch/icepop_masked": then(masked, after, 60), "mismatch/logp_absdiff": then(gap, wider, 60)}

    assert set(when(MismatchMask(), exact(curves, length=120))) == said


def test_a_few_odd_batches_move_no_mask():
    """Of twenty rows two at either end do not count: masked a hundredfold, or not at all."""
    odd = {45: 0.2, 46: 0.2, 50: 0.0, 51: 0.0}
    curves = {
        "mismatch/icepop_masked": lambda s: odd.get(s, 2e-3 if s < 80 else 1.3e-3),
        "mismatch/logp_absdiff": then(0.02, 0.04, 60),
    }
    assert worst(MismatchMask(), exact(curves, length=120)) is None

    curves["mismatch/icepop_masked"] = lambda s: odd.get(s, 2e-3 if s < 80 else 1.1e-3)
    found = alarms(MismatchMask(), exact(curves, length=120))["warning"]
    assert found.evidence["masked_then"] == pytest.approx(2e-3, rel=0.01)
    assert found.evidence["masked"] < 1.2e-3


def test_a_mask_that_first_catches_more_is_measured_from_its_peak():
    """Truncated shares are not monotone: they rise with the gap, then fall as both sides sharpen."""
    rate = lambda step, noise: 2e-3 if step < 40 else 6e-3 if step < 100 else 2e-3  # noqa: E731
    gap = lambda step, noise: 0.02 if step < 40 else 0.03 if step < 100 else 0.06  # noqa: E731
    found = firsts(MismatchMask(), run({"mismatch/tis_truncated": rate, "mismatch/k3": gap}, only=()))

    assert found[Severity.WARNING].evidence["masked_then"] == pytest.approx(6e-3, rel=0.1)


def test_a_blip_that_passes_leaves_no_blind_mask():
    """Gap and mask rise for thirty steps and return."""
    up = lambda low, high: lambda step, noise: high if 60 <= step < 90 else low  # noqa: E731

    assert worst_of(MismatchMask(), mask(up(1.5e-3, 8e-3), up(0.02, 0.06))) is None


BLIND = {
    "mismatch/k3": flat(4e-4, 0.2),
    "mismatch/kl": flat(1e-4, 0.2),
    "mismatch/logp_absdiff_max": ramp(1.0, 8.0, 80, 140, 0.2),
}


def test_flat_kl_growing_tails_and_a_falling_reward_are_the_blind_case():
    """VeXact: reward 0.87 to 0.40 while k1 and k3 stay flat and tiny."""
    curves = BLIND | {"reward/mean": ramp(0.87, 0.4, 80, 180, 0.03)}
    found = firsts(MismatchBlind(), run(curves, length=240))[Severity.WARNING]

    assert found.onset_step >= 80
    assert "does not see" in found.message
    assert "while reward fell" in found.message


def test_two_tails_suffice_without_a_reward():
    """Largest difference and the 99th percentile."""
    curves = BLIND | {"mismatch/logp_absdiff_p99": ramp(0.04, 0.4, 80, 140, 0.2)}

    assert worst_of(MismatchBlind(), run(curves, only=())) is Severity.WARNING
    assert worst_of(MismatchBlind(), run(BLIND, only=())) is None


def test_a_kl_that_sees_the_mismatch_is_not_blind():
    """Then growth tells."""
    curves = BLIND | {"mismatch/k3": ramp(4e-4, 4e-2, 80, 140), "reward/mean": ramp(0.87, 0.4, 80, 180, 0.03)}

    assert worst_of(MismatchBlind(), run(curves, length=240)) is None


def test_a_reward_that_falls_beside_usual_tails_is_no_mismatch():
    """0.25 is the usual largest difference of probability, 1.0 in every row is not."""
    fall = {"mismatch/k3": flat(4e-4), "reward/mean": ramp(0.8, 0.3, 80, 180, 0.03)}

    assert worst_of(MismatchBlind(), run(fall | {"mismatch/prob_absdiff_max": flat(0.25, 0.3)}, length=240)) is None
    assert worst_of(MismatchBlind(), run(fall | {"mismatch/prob_absdiff_max": flat(0.97, 0.01)}, length=240))


def test_load_violations_of_verl_are_read_and_judged():
    """``rollout/moe/*_vio``; a level of its own is fine."""
    names, _ = canonicalise({"rollout/moe/avg_vio/avg": 0.4, "rollout/moe/max_vio/max": 3.0}, "verl")

    assert set(names) == {"mismatch/moe_avg_vio", "mismatch/moe_worst_vio"}
    assert worst(MoEImbalance(), exact({"mismatch/moe_avg_vio": always(1.4)})) is None
    assert worst(MoEImbalance(), exact({"mismatch/moe_avg_vio": then(0.4, 1.4, 30)})) == "warning"
    assert worst(MoEImbalance(), exact({"mismatch/moe_worst_vio": then(3.0, 9.0, 30)})) == "warning"


def test_routing_is_judged_by_its_growth():
    """A tenth of the pairs differ in healthy runs."""
    assert worst(RoutingMismatch(), exact({"mismatch/routing_layer_frac": always(0.12)})) is None
    assert worst(RoutingMismatch(), exact({"mismatch/routing_layer_frac": then(0.1, 0.3, 30)})) == "warning"


@pytest.mark.parametrize("source", ["", "ms-swift", "trl/grpo"])
def test_the_collapse_that_ms_swift_logged_is_seen(source):
    """Log-perplexity 0.069 to 0.38 from step 700 on, while the share clipped falls again (public figures of one run)."""
    growth, mask, said = MismatchGrowth(), MismatchMask(), {}
    gap, clipped = ramp(0.069, 0.38, 600, 1000), ramp(0.004, 0.002, 650, 900, 0.1)
    noise = random.Random(0)
    for step in range(1200):
        row = {
            "rollout_correction/log_ppl_abs_diff": gap(step, noise),
            "rollout_correction/clipped_frac": clipped(step, noise),
            "rollout_correction/ess": 0.99,
        }
        closed = ClosedStep(step=step, metrics=canonicalise(row, source)[0])
        for finding in [*growth.update(closed), *mask.update(closed)]:
            said.setdefault((finding.kind, finding.severity.value), step)

    assert 600 < said["mismatch_growth", "warning"] < 740
    assert said["mismatch_growth", "critical"] < 1000
    assert ("mismatch_mask", "warning") in said


def test_what_ms_swift_calls_kl_has_the_other_sign_and_is_not_read():
    """It is trainer less rollout there."""
    assert canonicalise({"rollout_correction/kl": 0.1, "rollout_correction/k3_kl": 0.2})[0] == {"mismatch/k3": 0.2}
