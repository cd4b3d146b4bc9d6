"""Responses that surge, shrink to nothing, loop, or have a long tail."""

import math
import random

import pytest
from exact_runs import alarms, always, exact, then, when, worst
from shaped_runs import findings, firsts, flat, ramp, run

from rlwatch.detectors.rise import MOST
from rlwatch.detectors.rises import Repetition
from rlwatch.detectors.rollouts.lengths import LengthCollapse, LengthSurge, LongTail, inverse
from rlwatch.records import Severity

AT = 100
STALLED = {"reward/mean": lambda s, n: 0.5 + n.gauss(0.0, 0.03)}
PAYS = {"reward/mean": ramp(0.3, 0.8, 60, 160)}


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize(
    "curves",
    [
        {"len/mean": ramp(400.0, 1400.0, 200, 220)},
        {"len/clipped": lambda s, n: 0.1 if s < 200 else 0.75},
        {"text/eos_missing": lambda s, n: 0.1 if s < 200 else 0.75},
    ],
    ids=["mean", "cut", "no end token"],
)
def test_a_surge_that_does_not_pay_is_a_warning(every, curves):
    """Beyond twice the start, or nine times the odds of not ending."""
    said = findings(LengthSurge(), run(curves | STALLED, length=500, every=every, only=set()))

    assert {f.severity for f in said} == {Severity.WARNING}
    assert 215 <= said[0].step <= 240 + 8 * every
    assert 195 <= said[0].onset_step <= 220 + every
    assert "while reward stalled" in said[0].message


@pytest.mark.parametrize(
    "curves",
    [
        {"len/mean": ramp(400.0, 1400.0, 60, 160)} | PAYS,
        {"len/mean": lambda s, n: 4000.0 if s == 100 else 400.0 + n.gauss(0.0, 20.0)} | STALLED,
        {"len/mean": lambda s, n: 1500.0 if 100 <= s < 108 else 400.0} | STALLED,
        {"len/mean": ramp(8.0, 24.0, 100, 110)} | STALLED,
        {"len/clipped": lambda s, n: n.choice((0.25, 0.5, 0.75, 1.0))} | STALLED,
        {"len/clipped": flat(0.9, 0.02)} | STALLED,
    ],
    ids=["it pays", "a spike", "long prompts", "short answers", "four responses a batch", "always so"],
)
@pytest.mark.parametrize("every", [1, 5])
def test_what_is_no_surge(curves, every):
    """Longer answers that pay, spikes, a few hard batches, tiny batches."""
    assert findings(LengthSurge(), run(curves, length=300, every=every, only=set())) == []


@pytest.mark.parametrize("every", [1, 5, 10])
def test_responses_that_shrink_to_nothing_are_warned_of_then_confirmed(every):
    """400 tokens to 4; the reward goes with them."""
    curves = {"len/mean": ramp(400.0, 4.0, 200, 230), "reward/mean": ramp(0.6, 0.1, 200, 230)}

    said = firsts(LengthCollapse(), run(curves, length=500, every=every, only=set()))

    assert set(said) == {Severity.WARNING, Severity.CRITICAL}
    warning, critical = said[Severity.WARNING], said[Severity.CRITICAL]
    assert 210 <= warning.step < critical.step <= 270 + 8 * every
    assert 200 <= critical.onset_step <= 220 + every
    assert "responses have shrunk to" in critical.message
    assert critical.baseline == pytest.approx(400.0, rel=0.05)


@pytest.mark.parametrize(
    ("after", "reward", "severity"),
    [
        (150.0, {"reward/mean": always(0.5)}, None),
        (100.0, {"reward/mean": always(0.5)}, "warning"),
        (100.0, {"reward/mean": then(0.3, 0.8, 60)}, None),
        (10.0, {"reward/mean": then(0.3, 0.8, 60)}, "warning"),
        (10.0, {"reward/mean": always(0.5)}, "critical"),
        (10.0, {}, "critical"),
        (0.0, {"reward/mean": then(0.5, 0.0, AT)}, "critical"),
    ],
)
def test_how_short_is_too_short_depends_on_whether_it_pays(after, reward, severity):
    """400 tokens at first; less than three tenths, less than one."""
    rows = exact({"len/mean": then(400.0, after, AT), **reward}, length=180)

    assert worst(LengthCollapse(), rows) == severity


def test_empty_responses_are_a_collapse_of_their_own():
    """As verl counts aborted ones; whatever the mean of the others is."""
    rows = exact({"len/empty": then(0.01, 0.8, AT), "len/mean": always(400.0)}, length=160)

    found = alarms(LengthCollapse(), rows)

    assert found["critical"].message.startswith("80% of the responses are empty")
    assert found["critical"].onset_step == AT


@pytest.mark.parametrize(
    "length",
    [
        lambda s: 5.0 if s == 100 else 400.0,
        lambda s: 20.0 if 100 <= s < 106 else 400.0,
        lambda s: math.nan if s >= 100 else 400.0,
        always(3.0),
    ],
    ids=["a spike", "a few batches", "not measured", "short tasks"],
)
def test_what_is_no_collapse(length):
    """One row, short prompts, a gap, a task with short answers."""
    assert when(LengthCollapse(), exact({"len/mean": length}, length=160)) == {}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("text/looping_frac", 0.01, 0.4),
        ("text/tail_loop", 0.01, 0.4),
        ("text/loop_cover", 0.02, 0.5),
        ("text/repetition_frac", 0.0, 0.2),
        ("text/repetition", 0.12, 0.6),
        ("text/distinct_2", 0.9, 0.2),
        ("text/zlib_ratio", 2.6, 40.0),
    ],
)
@pytest.mark.parametrize("every", [1, 10])
def test_loops_are_told_by_any_measure(name, before, after, every):
    """From healthy prose to repeated blocks."""
    rows = exact({name: then(before, after, AT)}, length=40 + 160 // every, every=every)

    found = alarms(Repetition(), rows)

    assert set(found) == {"warning"}
    assert found["warning"].metric == name
    assert found["warning"].onset_step == AT
    assert found["warning"].step <= AT + 8 + 10 * every


@pytest.mark.parametrize(
    ("name", "curve"),
    [
        ("text/looping_frac", then(0.01, 0.05, AT)),
        ("text/repetition", then(0.12, 0.3, AT)),
        ("text/zlib_ratio", then(2.6, 4.5, AT)),
        ("text/distinct_2", then(0.9, 0.7, AT)),
        ("text/looping_frac", lambda s: 1.0 if s == AT else 0.01),
        ("text/looping_frac", always(0.6)),
    ],
)
def test_longer_answers_repeat_more_and_one_row_is_no_loop(name, curve):
    """Nor is what was so from the start."""
    assert when(Repetition(), exact({name: curve}, length=160)) == {}


# The long tail


def test_one_response_of_ten_thousand_tokens_among_ninety_nine_of_a_hundred_is_a_tail():
    """Mean 199, so the longest is fifty times that, and 98 % of a synchronous engine's slots idle."""
    lengths = [100] * 99 + [10_000]
    mean = sum(lengths) / len(lengths)
    bubble = 1.0 - mean / max(lengths)
    rows = exact(
        {"len/mean": always(mean), "len/max": then(400.0, 1e4, AT), "len/bubble": then(0.5, bubble, AT)}, length=160
    )

    found = alarms(LongTail(), rows)

    assert bubble == pytest.approx(0.9801)
    assert set(found) == {"info"}
    assert found["info"].metric == "len/bubble"
    assert found["info"].evidence["level"] == pytest.approx(bubble)
    assert found["info"].onset_step == AT


@pytest.mark.parametrize(
    ("name", "before", "after", "severity"),
    [
        ("len/tail_ratio", 2.0, 6.0, "info"),
        ("len/bubble", 0.6, 0.9, "info"),
        ("len/gini", 0.3, 0.7, "info"),
        ("partial/frac", 0.1, 0.6, "warning"),
        ("partial/retention_mean", 0.5, 3.0, "warning"),
        ("partial/retention_max", 2.0, 9.0, "warning"),
        ("len/budget_used", 0.95, 0.4, "warning"),
        ("time/rollout_idle", 0.1, 0.7, "warning"),
    ],
)
@pytest.mark.parametrize("every", [1, 10])
def test_a_tail_is_information_and_work_carried_over_or_wasted_a_warning(name, before, after, severity, every):
    """Lengths cost time; retention and idle engines cost the run's budget."""
    found = alarms(LongTail(), exact({name: then(before, after, AT)}, length=40 + 160 // every, every=every))

    assert set(found) == {severity}
    assert found[severity].metric == name
    assert found[severity].onset_step == AT


def test_the_longest_over_the_mean_is_had_from_the_two():
    """As every trainer logs them; a mean of nothing has none."""
    rows = exact({"len/max": then(800.0, 6000.0, AT), "len/mean": always(400.0)}, length=160)

    assert alarms(LongTail(), rows)["info"].metric == "len/max_over_mean"
    assert when(LongTail(), exact({"len/max": always(800.0), "len/mean": always(0.0)})) == {}


@pytest.mark.parametrize("name", ["len/tail_ratio", "partial/frac", "len/budget_used"])
def test_one_long_batch_is_no_tail(name):
    """The median of ten rows does not move."""
    usual, odd = {"len/tail_ratio": (2.0, 40.0), "partial/frac": (0.1, 0.9), "len/budget_used": (0.9, 0.1)}[name]

    assert when(LongTail(), exact({name: lambda s: odd if s == AT else usual}, length=140)) == {}


def test_the_inverse_of_nothing_is_bounded():
    """A budget that is not used at all."""
    assert (inverse(0.5), inverse(0.0), inverse(-2.0)) == (2.0, MOST, 0.5)


def shortening(seed, *, every, falls_at=None, rows=240):
    """Answers shrink to a quarter while the reward of 64 answers a row rises from 0.47 to 0.8; then it may be lost."""
    rng = random.Random(seed)

    def reward(step):
        level = 0.1 if falls_at is not None and step >= falls_at else min(0.47 + 0.0012 * step, 0.8)
        return sum(rng.random() < level for _ in range(64)) / 64

    def length(step):
        return max(2500.0 * math.exp(-step / 170), 500.0) * math.exp(rng.gauss(0.0, 0.15))

    return exact({"reward/mean": reward, "len/mean": length}, length=rows, every=every)


@pytest.mark.parametrize("every", [1, 5, 10])
def test_short_answers_that_earn_more_are_good_however_noisy_single_rows_are(every):
    """Few rows do not show each time that the reward has risen."""
    said = [worst(LengthCollapse(), shortening(seed, every=every)) for seed in range(12)]

    assert said == [None] * 12


@pytest.mark.parametrize("every", [5, 10])
def test_short_answers_are_told_of_once_the_reward_is_lost(every):
    """What had risen counts no longer."""
    told = [when(LengthCollapse(), shortening(seed, every=every, falls_at=600)).get("warning") for seed in range(12)]

    assert all(step is not None and 600 <= step <= 650 + 10 * every for step in told)
