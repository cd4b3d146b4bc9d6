"""Parts of the reward, and a reward that stands still."""

import math
import random
import statistics

import pytest
from exact_runs import always, exact, swinging, then, when

from rlwatch.detectors.base import ExactSums
from rlwatch.detectors.reward.plateau import Plateau
from rlwatch.detectors.reward.reward_parts import RewardParts
from rlwatch.metrics import canonicalise, resolve
from rlwatch.records import ClosedStep, Event

FORMAT, ANSWER, STYLE = "reward/part/format", "reward/part/answer", "reward/part/style"


def climbing(before, after, at, over):
    """A curve: ``before``, then a straight line to ``after``, which is reached ``over`` steps later."""
    return lambda step: before + (after - before) * min(max((step - at) / over, 0.0), 1.0)


def noisy(curve, sigma, seed=0):
    """The curve with additive noise, the same for each step."""
    return lambda step: curve(step) + random.Random(seed + step).gauss(0.0, sigma)


def gaming(rows, kind="format_gaming"):
    """When the detector of parts says it, by severity."""
    return when(RewardParts(), rows, kind)


GAMED = {FORMAT: climbing(0.2, 1.0, 60, 40), ANSWER: swinging(0.4, 0.4, 0, 0.01)}


def test_a_part_that_climbs_to_its_ceiling_while_the_other_stands_still_is_farmed():
    """Said a hundred steps after it is there."""
    said = gaming(exact(GAMED, length=300))

    assert list(said) == ["warning"]
    assert 190 <= said["warning"] <= 215


@pytest.mark.parametrize("every", [3, 5])
def test_it_is_said_of_a_coarser_log_at_about_the_same_step(every):
    """Steps count, not rows, and a few more for the history to be known."""
    assert 190 <= gaming(exact(GAMED, length=600 // every, every=every))["warning"] <= 260


@pytest.mark.parametrize(
    ("why", "curves"),
    [
        ("the other still rises", {ANSWER: climbing(0.3, 0.7, 0, 400)}),
        ("it rose after the format did", {ANSWER: climbing(0.3, 0.6, 90, 60)}),
        ("the other is at its ceiling, too", {ANSWER: always(0.95)}),
        ("the other is nearly there", {ANSWER: swinging(0.85, 0.85, 0, 0.01)}),
        ("a third one rises", {STYLE: climbing(0.1, 0.9, 100, 300)}),
        ("the other has always been the same", {ANSWER: always(0.4)}),
        ("the format was always there", {FORMAT: always(1.0)}),
        ("there is no other", {ANSWER: lambda step: None}),
    ],
)
def test_what_is_no_gaming(why, curves):
    """The nearest sound runs."""
    assert gaming(exact(GAMED | curves, length=300)) == {}, why


def test_noise_in_which_a_rise_could_hide_is_no_standing_still():
    """Sixty rows with answers that differ by a third from row to row tell nothing; without that they do."""
    assert gaming(exact(GAMED | {ANSWER: noisy(always(0.4), 0.3)}, length=60, every=5)) == {}
    assert "warning" in gaming(exact(GAMED, length=60, every=5))


def test_a_part_that_falls_is_learnt_no_better_than_one_that_stands():
    """The answers become worse while the format is earned."""
    assert "warning" in gaming(exact(GAMED | {ANSWER: climbing(0.4, 0.1, 80, 100)}, length=300))


def test_what_the_finding_says():
    """Which part, where the others stand, and since when: from halfway up."""
    detector = RewardParts()
    finding = next(f for row in exact(GAMED, length=300) for f in detector.update(row) if f.kind == "format_gaming")

    assert finding.metric == FORMAT
    assert 75 <= finding.onset_step <= 85
    assert finding.evidence == {FORMAT: 1.0, ANSWER: pytest.approx(0.4, abs=0.02)}
    assert "answer stands at" in finding.message


def test_a_part_that_everybody_earns_and_that_is_nearly_all_dominates():
    """Nine tenths of the sum, for a hundred steps; four fifths are not."""
    curves = {FORMAT: climbing(0.3, 0.98, 0, 20), ANSWER: swinging(0.02, 0.02, 0, 0.01)}

    assert list(gaming(exact(curves, length=200), "format_domination")) == ["warning"]
    assert gaming(exact(curves | {ANSWER: swinging(0.25, 0.25, 0, 0.01)}, length=200), "format_domination") == {}
    assert gaming(exact(curves, length=100), "format_domination") == {}


def test_a_row_in_which_nothing_is_at_its_ceiling_keeps_the_newest_word():
    """A better row than ever before takes the ceiling away for a moment: the detector died of it."""
    curves = {FORMAT: rising_again, ANSWER: swinging(0.02, 0.02, 0, 0.01)}
    detector = RewardParts()
    held = {
        row.step: [finding for finding in detector.update(row) if finding.kind == "format_domination"]
        for row in exact(curves, length=240)
    }

    assert len(held[189]) == len(held[187]) == 1
    assert held[189][0].message == held[187][0].message
    assert held[189][0].step == 189
    assert held[195] == []


def rising_again(step):
    """Learnt, then at a ceiling, which from step 188 on is none."""
    return 0.5 if step < 20 else 2.0 if step < 188 else 4.0 + 0.5 * (step - 188)


def test_many_parts_are_not_judged():
    """Bounded memory: a log of hundreds of parts costs nothing."""
    many = {f"reward/part/p{i}": always(0.5) for i in range(40)}

    assert gaming(exact(GAMED | many, length=300)) == {}


def test_the_order_of_names_and_a_part_that_is_missing_now_and_then_change_nothing():
    """Rows need not name every part."""
    rows = exact(dict(reversed(GAMED.items())), length=300)
    holes = [row if row.step % 7 else ClosedStep(row.step, {FORMAT: row.metrics[FORMAT]}, seq=row.seq) for row in rows]

    assert gaming(rows) == gaming(exact(GAMED, length=300))
    assert abs(gaming(holes)["warning"] - gaming(rows)["warning"]) <= 20


@pytest.mark.parametrize(
    ("name", "source", "part"),
    [
        ("rewards/format_reward/mean", "trl/grpo", "format_reward"),
        ("rewards/format_reward", "trl/grpo", "format_reward"),
        ("train/rewards/format_reward/mean", "", "format_reward"),
        ("gdpo/accuracy/mean", "verl", "accuracy"),
        ("format_reward", "openrlhf", "format"),
        ("attack_reward", "openrlhf", "attack"),
        ("correctness_reward", "", "correctness"),
        ("env/all/format", "tinker", "format"),
        ("reward/evaluate_response/avg_MathReward_reward", "torchforge", "MathReward"),
        ("reward/part/format", "trl/grpo", "format"),
    ],
)
def test_trainers_names_of_parts_read_as_parts(name, source, part):
    """One meaning, whoever logs it, with the name that the part has there; beside a whole, without which it may be one."""
    assert canonicalise({"reward": 0.4, name: 0.5}, source)[0].get(f"reward/part/{part}") == 0.5


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("rewards/format/std", "trl/grpo"), ("rewards/margins", "trl/dpo"), ("rewards/accuracies", "trl/dpo"),
        ("rewards/total_reward", "trl/grpo"), ("eval_rewards/format/mean", "trl/grpo"), ("format_reward", "verl"),
        ("gdpo/accuracy/std", "verl"), ("rewards/mean", "trl/grpo"),
        ("attack_reward", ""), ("best_reward", ""), ("running_reward", ""),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_part_is_none(name, source):
    """Spreads, sums, pairs, held-out ones, other trainers', and of no trainer's those of other policies and steps."""
    read = resolve(name, source)
    assert read is None or read.metric.name == "reward/mean"


# A reward that stands still.

FLAT = {"reward/mean": noisy(climbing(0.2, 0.5, 0, 80), 0.02)}


def plateau(curves, **how):
    """When it is remarked."""
    return when(Plateau(), exact(curves, **how))


def test_a_reward_that_stands_still_for_half_of_the_run_is_remarked_and_no_alarm():
    """A remark, the lowest there is."""
    said = plateau(FLAT, length=400)

    assert list(said) == ["info"]
    assert 200 <= said["info"] <= 260


@pytest.mark.parametrize(
    ("why", "curve", "length"),
    [
        ("it still rises", climbing(0.2, 0.6, 0, 400), 400),
        ("it is near what it can reach", climbing(0.2, 0.9, 0, 80), 400),
        ("it fell", climbing(0.9, 0.5, 200, 100), 320),
        ("not for long", climbing(0.2, 0.5, 0, 80), 220),
        ("it rose for most of the run", climbing(0.2, 0.5, 0, 800), 960),
    ],
)
def test_what_is_no_plateau(why, curve, length):
    """The nearest runs that are none."""
    assert plateau({"reward/mean": noisy(curve, 0.02)}, length=length) == {}, why


def test_noise_in_which_a_gain_could_hide_is_no_plateau():
    """Standing still is a claim that needs evidence: 24 rows with half of the range as noise have none."""
    assert plateau({"reward/mean": noisy(climbing(0.2, 0.5, 0, 80), 0.2)}, length=40, every=10) == {}


def test_a_run_that_goes_on_from_a_checkpoint_counts_anew():
    """What was before the resume is not what it has spent since."""
    detector, rows = Plateau(), exact(FLAT, length=240)
    for row in rows[:200]:
        detector.update(row)
    detector.notice(Event("resume", 200))

    assert [found for row in rows[200:] for found in detector.update(row)] == []


def test_a_reward_of_penalties_has_no_ceiling_that_is_known():
    """Below 0 nothing tells how much is left."""
    assert plateau({"reward/mean": then(-2.0, -1.0, 20)}, length=400) == {}


def test_the_variance_of_a_course_is_that_of_exact_sums():
    """To the last bit, whatever the sizes: it decides what stands still."""
    noise = random.Random(1)
    for size in range(2, 40):
        values = [
            noise.choice((noise.gauss(0.5, 0.1), noise.uniform(-1e9, 1e9), 5e-324, 0.0, 1.0)) for _ in range(size)
        ]
        begins = noise.randrange(size - 1)
        part = values[begins:]

        assert ExactSums(values).of(begins, size) == (len(part), statistics.fmean(part), statistics.variance(part))


@pytest.mark.parametrize("values", [[1e200, -1e200], [1.7e308, 1.7e308, 1.7e308], [1e160, 2e160, 0.0]])
def test_sums_beyond_a_float_are_known_by_nothing_and_stop_no_detector(values):
    """Its noise is without bounds, so that no gain is certain, and none is certainly absent."""
    assert ExactSums(values).of(0, len(values)) == (len(values), 0.0, math.inf)
