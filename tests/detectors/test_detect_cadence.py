"""When each detector speaks, at every cadence of logging: rows and steps must both have passed."""

import math
from functools import cache

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.exploration.entropy import EntropyCollapse, EntropyExplosion
from rlwatch.detectors.mismatch.mismatch_growth import MismatchGrowth
from rlwatch.detectors.optimisation.grad_spike import GradSpike
from rlwatch.detectors.registry import default_detectors
from rlwatch.detectors.reward.reward_drop import RewardDrop
from rlwatch.detectors.reward.silent_groups import NoSignal
from rlwatch.detectors.rollouts.lengths import LengthExplosion
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.records import ClosedStep, Severity
from rlwatch.testing.detector_contract import broken_run

AT = 200
DIES = {"reward/zero_std_frac": then(0.0, 1.0, AT), "optim/grad_norm": then(2.0, 0.0, AT), "reward/mean": always(0.3)}


@pytest.mark.parametrize(
    ("detector", "curves", "dates"),
    [
        (RewardDrop, {"reward/mean": then(2.0, 0.2, AT)}, {1: (212, 217), 5: (210, 215), 10: (220, 220)}),
        (RewardDrop, {"reward/mean": then(2.0, 1.1, AT)}, {1: (213, 265), 5: (210, 265), 10: (220, 270)}),
        (LengthExplosion, {"len/clipped": then(0.2, 1.0, AT)}, {1: (213, 235), 5: (210, 235), 10: (220, 240)}),
        (NoSignal, DIES, {1: (215, 225), 5: (215, 225), 10: (230, 240)}),
        (
            KLReference,
            {"policy/kl_ref": then(0.2, 2.0, AT), "reward/mean": always(0.5)},
            {1: (206, 224), 5: (210, 225), 10: (210, 220)},
        ),
    ],
    ids=["reward halves", "reward loses much", "length", "signal", "kl"],
)
@pytest.mark.parametrize("every", [1, 5, 10])
def test_a_change_is_warned_of_and_confirmed_at_its_date(detector, curves, dates, every):
    """From an exact step change at 200 on; the onset is that step."""
    found = alarms(detector(), exact(curves, length=300 // every + 1, every=every))

    # In a coarse log the row that warns may be the one that is sure.
    warned = found.get("warning", found["critical"])
    assert (warned.step, found["critical"].step) == dates[every]
    assert {warned.onset_step, found["critical"].onset_step} == {AT}


def test_silence_is_dated_to_the_first_row_of_three_quarters():
    """A row of half its groups is not silent yet."""
    share = lambda s: 0.0 if s < 20 else 0.7 if s < 30 else 1.0  # noqa: E731
    rows = exact({"reward/zero_std_frac": share, "reward/mean": always(0.5)})

    assert alarms(NoSignal(), rows)["critical"].onset_step == 30


def test_a_run_that_began_without_gradient_has_no_norm_to_leave():
    """Zero divides nothing; later spikes stand out from what came since."""
    rows = exact({"optim/grad_norm": lambda s: 0.0 if s < 20 else 50.0 if s == 150 else 1.0}, length=200)

    assert when(GradSpike(), rows) == {"warning": 150}


@pytest.mark.parametrize(("at", "said"), [(90, {}), (135, {"warning": 135})])
def test_the_usual_norm_is_that_of_the_last_hundred_rows(at, said):
    """The first thirty at 3 are forgotten by then."""
    rows = exact({"optim/grad_norm": lambda s: 3.0 if s < 30 else 10.0 if s == at else 1.2}, length=140)

    assert when(GradSpike(), rows) == said


def test_the_established_level_of_kl_is_that_of_the_last_hundred_and_twenty_rows():
    """A drift of long ago is the level now: it stops being one after as many rows again."""
    detector, said = KLReference(), []
    for row in exact({"policy/kl_ref": then(0.1, 0.5, 60), "reward/mean": always(0.5)}, length=200):
        said += [f.step for f in detector.update(row) if f.kind == "kl_drift"]

    assert said == list(range(67, said[-1] + 1))
    assert 120 < said[-1] < 140


@pytest.mark.parametrize(("step", "onset"), [(0.145, 45), (0.155, 40)])
def test_a_drift_is_dated_to_half_of_what_is_notable(step, onset):
    """And half as much again as before."""
    rows = exact(
        {"policy/kl_ref": lambda s: 0.05 if s < 40 else step if s < 45 else 0.6, "reward/mean": always(0.5)}, length=70
    )

    assert alarms(KLReference(), rows, "kl_drift")["warning"].onset_step == onset


@pytest.mark.parametrize(("step", "onset"), [(0.29, 45), (0.31, 40)])
def test_and_to_half_as_much_again_as_before(step, onset):
    """From an established 0.2."""
    rows = exact(
        {"policy/kl_ref": lambda s: 0.2 if s < 40 else step if s < 45 else 0.9, "reward/mean": always(0.5)}, length=70
    )

    assert alarms(KLReference(), rows, "kl_drift")["warning"].onset_step == onset


@pytest.mark.parametrize("every", [1, 5])
def test_kl_that_has_just_jumped_is_not_flat(every):
    """A robust trend over sixty rows overlooks the last fifteen: their level must be the window's too."""
    rows = exact({"policy/kl_ref": then(0.2, 2.0, 100 * every), "reward/mean": always(0.5)}, length=170, every=every)

    finding = alarms(KLReference(), rows, "kl_saturation")["info"]

    assert 130 * every <= finding.onset_step <= 140 * every


@pytest.mark.parametrize(("before", "onset"), [(0.26, 104), (0.24, 135), (0.05, 135)])
def test_a_jump_is_half_of_the_level_it_leads_to(before, onset):
    """To 0.5: less is a step on flat ground, more waits until the trend window has seen it."""
    found = alarms(KLReference(), exact({"policy/kl_ref": then(before, 0.5, 100)}, length=170), "kl_saturation")

    assert found["info"].onset_step == pytest.approx(onset, abs=2)


def test_kl_on_its_way_down_is_not_flat():
    """A reset is no cure for what mends itself."""
    rows = exact({"policy/kl_ref": lambda s: 1.2 - 0.004 * s}, length=150)

    assert worst(KLReference(), rows, "kl_saturation") is None


@pytest.mark.parametrize("name", ["policy/kl_ref", "policy/kl_ref_k3", "policy/kl_ref_k2", "policy/kl_ref_k1"])
@pytest.mark.parametrize("sign", [1, -1])
def test_any_estimator_of_kl_will_do(name, sign):
    """k1 may be negative: its size counts."""
    rows = exact({name: then(0.2 * sign, 2.0 * sign, 40), "reward/mean": always(0.5)}, length=80)

    assert when(KLReference(), rows, "kl_drift") == {"warning": 46, "critical": 64}


@pytest.mark.parametrize(("rows", "said"), [(6, None), (9, "warning")])
def test_a_shift_too_small_to_see_is_said_once_it_has_persisted(rows, said):
    """Twelve deviations in sum, at most 2.25 a row; then gone again."""
    curve = lambda s: 0.056 if 30 <= s < 30 + rows else 0.04  # noqa: E731

    assert worst(MismatchGrowth(), exact({"mismatch/logp_absdiff": curve})) == said


@pytest.mark.parametrize(
    ("detector", "curves"),
    [
        (EntropyCollapse, {"policy/entropy": then(0.6, 0.006, 50)}),
        (EntropyExplosion, {"policy/entropy": then(0.6, 6.0, 50)}),
        (MismatchGrowth, {"mismatch/k3": then(0.001, 0.2, 50)}),
        (GradSpike, {"optim/grad_norm": then(0.5, 50.0, 50)}),
        (KLReference, {"policy/kl_ref": then(0.2, 4.0, 50), "reward/mean": always(0.5)}),
        (RewardDrop, {"reward/mean": then(0.6, 0.05, 50)}),
        (LengthExplosion, {"len/clipped": then(0.1, 1.0, 50)}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
@pytest.mark.parametrize("gap", [math.nan, math.inf, None])
def test_a_gap_in_the_log_moves_no_onset_and_hides_no_alarm(detector, curves, gap):
    """Five rows without a finite value, right where it begins and again while it holds."""
    name, curve = next(iter(curves.items()))
    gappy = curves | {name: lambda s: gap if 50 <= s < 53 or 80 <= s < 85 else curve(s)}
    whole, broken = alarms(detector(), exact(curves, length=110)), alarms(detector(), exact(gappy, length=110))
    severity = worst(detector(), exact(curves, length=110))

    assert worst(detector(), exact(gappy, length=110)) == severity
    assert broken[severity].onset_step == 53
    assert whole[severity].step < broken[severity].step <= whole[severity].step + 5


@pytest.mark.parametrize(
    ("detector", "name", "before", "after"),
    [
        (EntropyCollapse, "policy/entropy", 0.6, 0.006),
        (MismatchGrowth, "mismatch/k3", 0.001, 0.2),
        (GradSpike, "optim/grad_norm", 0.5, 50.0),
        (RewardDrop, "reward/mean", 0.6, 0.05),
        (LengthExplosion, "len/clipped", 0.1, 1.0),
    ],
)
def test_a_resume_from_before_the_trouble_ends_the_alarm_and_a_healthy_branch_stays_silent(
    detector, name, before, after
):
    """Going back to step 40 undoes what came after; the baseline of the run stays."""
    judge = detector()
    assert alarms(judge, exact({name: then(before, after, 50)}, length=80))

    branch = [ClosedStep(step=s, metrics={name: before}, attempt=2) for s in range(40, 120)]
    said = [f.step for row in branch for f in judge.update(row)]
    again = [ClosedStep(step=s, metrics={name: after}, attempt=2) for s in range(120, 150)]
    found = alarms(judge, again)

    assert [step for step in said if step > 45] == []
    assert {f.onset_step for f in found.values()} == {120}
    assert {f.attempt for f in found.values()} == {2}


@cache
def coarse(every: int, how: str) -> list[ClosedStep]:
    """A run in which everything breaks at step 200, with a row every so many steps: their mean, or the last of them."""
    rows, window = [], []
    for row in broken_run(0, 520, 200):
        window.append(row)
        if row.step % every == 0 and row.step > 0:
            of = {name: [each.metrics[name] for each in window if name in each.metrics] for name in row.metrics}
            mean = {name: sum(values) / len(values) for name, values in of.items()}
            rows.append(ClosedStep(row.step, mean if how == "mean" else row.metrics, seq=len(rows) + 1))
            window = []
    return rows


@cache
def first_of(make, every, how):
    """Severity -> the first step with a finding of that severity or worse; judged once for all that is asked of it."""
    detector, first = make(), dict[Severity, int]()
    for row in coarse(every, how):
        for finding in detector.update(row):
            for severity in Severity:
                if finding.severity.rank >= severity.rank:
                    first.setdefault(severity, row.step)
        if len(first) == len(Severity):
            break
    return first


THREE_ROWS = {
    "degenerate_batch": "one sound step within a mean hides that a batch is degenerate",
    "diversity_decay": "a share of a level that falls",
    "entropy_explosion": "the mean that holds the change is odd already and dates it a row later",
    "entropy_sides": "a share of a level that falls",
    "likelihood_displacement": "waits for the second of two witnesses",
    "reference_continuity": "a jump must stay",
}
"""Detectors that need a third row where rows are means over ten or twenty steps, and why."""
SLOWER = {
    "kl_reference": "asks for a trend over rows first",
    "layer_spike": "a spike of one step is lost in a row of twenty",
    "metric_vanished": "counts rows without the metric",
    "mismatch_blind": "compares the last rows with those before the fall of the reward, row by row",
    "mismatch_mask": "compares two levels that both need their rows",
    "no_signal": "groups that agree are chance in a few rows: five of them at least",
    "reward_constant": "counts equal values: a row is one value, however many steps it stands for",
    "reward_hacking": "judges held-out scores against many rows of reward",
    "reward_parts": "is certain that the others gained nothing only over many rows",
}
"""Detectors that a coarse log makes wait longer, and why."""


COARSE = [(every, how) for every in (2, 5, 10, 20) for how in ("last", "mean")]
ONE_OF_A_KIND = [(5, "last"), (20, "mean")]


@pytest.mark.parametrize(
    ("every", "how"),
    [pytest.param(*case, marks=[] if case in ONE_OF_A_KIND else pytest.mark.thorough) for case in COARSE],
)
@pytest.mark.parametrize(
    "detector",
    [detector for detector in default_detectors() if detector.name not in SLOWER],
    ids=lambda detector: detector.name,
)
def test_coarse_logs_are_told_of_within_ten_steps_or_two_rows_of_where_fine_ones_are(detector, every, how):
    """In steps, not in rows: whatever registers."""
    make, longest = type(detector), max(10, (3 if detector.name in THREE_ROWS else 2) * every)
    fine, late = first_of(make, 1, how), first_of(make, every, how)

    for severity in {Severity.WARNING, Severity.CRITICAL} & fine.keys():
        assert severity in late
        assert late[severity] <= fine[severity] + longest
