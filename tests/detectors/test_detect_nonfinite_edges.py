"""Non-finite values at the edges, and what all detectors share: numbers, carried findings, well-formed ones."""

import math

import pytest

from rlwatch.detectors.base import BaseDetector, finite, rounded
from rlwatch.detectors.optimisation.nonfinite import ADVICE, NonFinite, suspect
from rlwatch.records import ClosedStep, Severity
from rlwatch.wording import number

NAN = math.nan
GOOD = {"loss/policy": 0.01, "optim/grad_norm": 0.4, "policy/entropy": 0.3, "policy/kl_ref": 0.01, "reward/mean": 0.5}


def fed(*rows, steps=None):
    """The finding (or None) at each full row."""
    detector = NonFinite()
    steps = steps or range(len(rows))
    found = [detector.update(ClosedStep(step=s, metrics=row)) for s, row in zip(steps, rows, strict=True)]
    return [said[0] if said else None for said in found]


def severities(*rows, **how):
    return [finding and finding.severity.value for finding in fed(*rows, **how)]


@pytest.mark.parametrize(("clean", "said"), [(50, "critical"), (51, "warning")])
def test_a_count_is_remembered_for_fifty_clean_rows(clean, said):
    """A scaler that skips a step now and then is no crash."""
    counted = GOOD | {"nonfinite/grad": 1.0}

    assert severities(counted, *[GOOD] * clean, counted)[-1] == said
    assert severities(counted, *[GOOD | {"nonfinite/grad": 0.0}] * clean, counted)[-1] == said


@pytest.mark.parametrize("count", [NAN, math.inf])
def test_a_count_that_is_no_number_counts(count):
    """Whatever went wrong with it, it is not zero."""
    assert severities(GOOD | {"nonfinite/grad": count}) == ["warning"]


def test_a_persistent_nan_must_be_in_consecutive_rows():
    """Every second row is three warnings."""
    broken = GOOD | {"policy/entropy": NAN}

    assert severities(broken, GOOD, broken, GOOD, broken) == ["warning", None, "warning", None, "warning"]


def test_rows_that_do_not_measure_it_neither_end_nor_lengthen_a_persistent_nan():
    """Entropy logged every second row."""
    broken, blank = GOOD | {"policy/entropy": NAN}, {k: v for k, v in GOOD.items() if k != "policy/entropy"}

    assert severities(broken, blank, broken, blank, broken) == ["warning", None, "warning", None, "critical"]


def test_a_nan_seen_before_a_resume_does_not_count_after_it():
    """Steps that go back begin anew."""
    broken = GOOD | {"optim/grad_norm": NAN}

    assert severities(broken, broken, broken, steps=[10, 11, 5]) == ["warning", "critical", "warning"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "critical"),
        ({"loss/policy": 1e-9}, "warning"),
        ({"policy/entropy": 0.3}, "warning"),
        ({"optim/grad_norm": 0.4}, None),
        ({"optim/grad_norm": 0.4, "reward/mean": NAN}, "warning"),
    ],
)
def test_the_hidden_crash_needs_all_three_signs(change, said):
    """Gradient NaN, loss exactly 0, entropy gone."""
    hidden = {"optim/grad_norm": NAN, "loss/policy": 0.0, "reward/mean": 0.5} | change

    assert severities(GOOD, hidden)[-1] == said


def test_entropy_that_was_never_logged_is_not_missed():
    """Then its absence is no sign."""
    assert severities({"optim/grad_norm": NAN, "loss/policy": 0.0}) == ["warning"]


def test_a_switched_off_metric_is_named_once_others_break_with_it():
    """Two certain ones make it a crash, and the never-finite one part of it."""
    off = GOOD | {"policy/kl_ref": NAN}
    one, two = off | {"policy/entropy": NAN}, off | {"policy/entropy": NAN, "loss/policy": NAN}

    assert fed(off, one)[-1].evidence["metrics"] == ["policy/entropy"]
    assert fed(off, two)[-1].evidence["metrics"] == ["loss/policy", "policy/entropy", "policy/kl_ref"]


def test_each_switched_off_metric_is_told_once():
    """Also when the second turns up later."""
    first, both = {"policy/kl_ref": NAN}, {"policy/kl_ref": NAN, "ratio/mean": NAN}

    told = [f and f.metric for f in fed(GOOD | {"policy/kl_ref": 1.0}, GOOD | {"ratio/mean": NAN})]

    assert told == [None, "ratio/mean"]
    assert [f and f.metric for f in fed(first, both, both)] == ["policy/kl_ref", "ratio/mean", None]


def test_a_long_list_is_cut_at_four_and_the_rest_counted():
    """The evidence holds all, in the order of the table, counts last."""
    finding = fed(GOOD, dict.fromkeys(GOOD, NAN) | {"nonfinite/grad": 7.0, "nonfinite/logp": math.inf})[-1]

    assert finding.message.startswith(
        "non-finite values: loss/policy = nan, optim/grad_norm = nan, policy/entropy = nan, reward/mean = nan"
        " and 3 more; "
    )
    assert finding.evidence["metrics"][-3:] == ["policy/kl_ref", "nonfinite/grad", "nonfinite/logp"]
    assert finding.evidence["counts"] == {"nonfinite/grad": 7.0}
    assert (finding.score, finding.metric) == (7.0, "loss/policy")


@pytest.mark.parametrize(
    ("metrics", "bad", "counts", "origin"),
    [
        ({}, [], ["nonfinite/rollout_logp"], "unknown"),
        ({"nonfinite/old_logp": 3.0}, [], ["nonfinite/rollout_logp", "nonfinite/old_logp"], "unknown"),
        ({"nonfinite/old_logp": 0.0}, ["reward/mean"], ["nonfinite/rollout_logp"], "rollout_engine"),
        ({"nonfinite/ref_logp": 0.0}, ["loss/policy"] * 3, ["nonfinite/old_logp"], "policy_weights"),
        ({"nonfinite/ref_logp": 0.0, "nonfinite/old_logp": 0.0}, ["optim/grad_norm"], [], "backward"),
        ({}, ["adv/max", "policy/entropy"], [], "everything"),
        ({}, ["adv/mean"], ["nonfinite/logp"], "everything"),
        ({}, ["adv/mean", "loss/policy"], [], "reward"),
        ({}, ["optim/grad_norm", "loss/raw"], [], "unknown"),
        ({}, ["optim/grad_norm", "policy/kl_old"], [], "backward"),
        ({}, ["policy/entropy", "policy/logp_mean"], ["nonfinite/grad"], "unknown"),
    ],
)
def test_the_suspect_is_the_first_in_the_order_of_a_step(metrics, bad, counts, origin):
    """Rollout, old policy, reward, then loss and gradient."""
    row = ClosedStep(step=1, metrics=metrics)

    assert suspect(row, bad, dict.fromkeys(counts, 1.0)) == (origin, ADVICE[origin])


class Echo(BaseDetector):
    """Says what it reads, wherever it is positive."""

    name, family, kinds = "echo", "Reward", ("echo",)
    requires = (("a", "b"),)
    reads = ("a", "b")

    def judge(self, step):
        value = finite(step, *self.reads)
        if not value > 0:
            return []
        return [self.finding(step, "echo", Severity.WARNING, "!", onset=int(value), score=value / 10, baseline=value)]


def row(step, **metrics):
    return ClosedStep(step=step, metrics=metrics, seq=100 + step, attempt=2)


def test_a_finding_never_begins_after_its_step_nor_scores_below_one():
    """Whatever a detector computed."""
    (early,), (late,) = Echo().update(row(5, a=3.0)), Echo().update(row(5, a=30.0))

    assert (early.onset_step, early.score, early.attempt, early.seq) == (3, 1.0, 2, 105)
    assert (late.onset_step, late.score, late.family) == (5, 3.0, "Reward")


def test_scores_and_baselines_that_are_no_numbers_are_left_out():
    """JSON knows no infinity."""
    finding = Echo().finding(row(1), "echo", Severity.INFO, "", score=math.inf, baseline=NAN)

    assert (finding.score, finding.baseline, finding.evidence) == (None, None, {})


def test_any_finite_reading_makes_a_row_count():
    """The second of ``reads`` will do where the first is NaN; no finite one is no row."""
    detector = Echo()

    assert detector.update(row(1, a=NAN, b=1.0))
    assert detector.update(row(2, a=NAN, b=math.inf))
    assert not detector.update(row(3, b=-1.0))
    assert not detector.update(row(4, a=NAN))


def test_what_is_carried_does_not_begin_in_the_future():
    """A resume from before the onset drops it."""
    detector = Echo()
    detector.update(row(50, a=40.0))

    assert [f.step for f in detector.update(row(45))] == [45]
    assert detector.update(row(39)) == []


def test_a_reading_starts_the_ten_blank_rows_anew():
    """Ten after each, eleven never."""
    detector = Echo()
    held = [bool(detector.update(row(s, **({"a": 1.0} if s in (1, 8) else {})))) for s in range(1, 21)]

    assert held == [True] * 18 + [False] * 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (0.58, "0.58"),
        (999.4, "999"),
        (1000.4, "1000"),
        (-152000.0, "-152k"),
        (1e6, "1M"),
        (NAN, "NaN"),
        (-math.inf, "-Inf"),
    ],
)
def test_numbers_in_messages_are_short_and_without_needless_exponents(value, text):
    """Three digits, thousands and millions with a letter."""
    assert number(value) == text


def test_evidence_keeps_six_digits_and_only_what_is_known():
    """No NaN, no None."""
    assert rounded({"a": 1.23456789, "b": None, "c": NAN, "d": math.inf, "e": 12345678}) == {
        "a": 1.23457,
        "e": 12345700.0,
    }
