"""Knobs that were turned: told from schedules in the rows, from configs and commands, and blamed for what followed."""

import math
import random

import pytest
from found import INFO, WARNING, found, happened

from rlwatch import catalogue
from rlwatch.demo import Recipe
from rlwatch.diagnosis import TRACKED, ChangeSource, Confidence, KnobTracker, advice, config_turns, diagnose
from rlwatch.state import explained, verdict_of

RATE, BETA, AGE = "optim/lr", "policy/kl_coef", "staleness/mean"


def turned(values, metric=RATE, steps=None):
    """Turns of one metric, row by row."""
    tracker = KnobTracker()
    for step, value in zip(steps or range(len(values)), values, strict=True):
        tracker.update(step, {metric: value})
    return list(tracker.turns)


def cosine(step, steps=1000):
    return 1e-6 * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


@pytest.mark.parametrize(
    ("values", "metric"),
    [
        pytest.param([1e-6] * 300, RATE, id="constant"),
        pytest.param([1e-6 * min(1, (s + 1) / 1000) for s in range(3000)], RATE, id="a long linear warm-up"),
        pytest.param([cosine(s) * min(1, (s + 1) / 10) for s in range(1000)], RATE, id="warm-up and cosine"),
        pytest.param([1e-6 * (1 - s / 500) for s in range(500)], RATE, id="linear decay to nothing"),
        pytest.param([1e-6] * 50 + [1e-7] * 50, RATE, id="a rate put down"),
        pytest.param([0.1 * (1 - s / 200) for s in range(200)], BETA, id="a KL term annealed from the start"),
        pytest.param([2.0 + (s % 3) for s in range(300)], AGE, id="an age that is measured"),
        pytest.param([math.nan] * 100, RATE, id="never a number"),
    ],
)
def test_a_schedule_is_no_change(values, metric):
    """A warm-up, a decay, an annealing that was on its way from the first row, a number that always moves."""
    assert turned(values, metric) == []


@pytest.mark.parametrize(
    ("values", "metric", "words"),
    [
        pytest.param([1e-6] * 100 + [1e-5] * 50, RATE, "x 10 since step 100 (1e-06 to 1e-05)", id="a jump"),
        pytest.param(
            [1e-6] * 100 + [5e-5] * 3 + [1e-6] * 50, RATE, "x 50 since step 100 (1e-06 to 5e-05, until step 103)",
            id="a spike that is over",
        ),
        pytest.param([0.01] * 100 + [-0.1] * 9, BETA, "0.01 to -0.1 since step 100", id="a sign"),
        pytest.param([0.0] * 100 + [0.1] * 9, BETA, "0 to 0.1 since step 100", id="a term switched on"),
        pytest.param([0.1] * 100 + [0.0] * 9, BETA, "0.1 to 0 since step 100", id="a term switched off"),
        pytest.param([1e-6] * 100 + [math.nan] * 9, RATE, "1e-06 to NaN since step 100", id="NaN is a value"),
        pytest.param([1e-6] * 100 + [math.inf] * 9, RATE, "1e-06 to Inf since step 100", id="infinity is another"),
        pytest.param([1.0] * 100 + [25.0] * 9, AGE, "x 25 since step 100 (1 to 25)", id="weights that stay old"),
    ],
)  # fmt: skip
def test_a_jump_is_dated_and_sized(values, metric, words):
    """To the row, with where it came from and went."""
    [turn] = turned(values, metric)

    assert turn.words(len(values)) == words
    assert (turn.step, turn.source) == (100, ChangeSource.LOGGED)


def test_a_ramp_that_leaves_the_schedule_has_the_size_it_had_at_each_step():
    """The demo's own: a forgotten range test, 28 steps in."""
    recipe = Recipe()

    [turn] = turned([recipe.learning_rate_at(step) for step in range(230)])

    assert turn.step == recipe.range_test_step + 1
    assert turn.factor(180) == pytest.approx(1.09**10, rel=0.15)
    assert turn.factor(198) == pytest.approx(1.09**28, rel=0.15)


def test_a_slow_ramp_is_dated_near_its_beginning():
    """Half a per cent a row: seen when it has gone half as far again, dated where it left its level."""
    [turn] = turned([1e-6] * 100 + [1e-6 * 1.008**s for s in range(200)])

    assert 100 <= turn.step <= 105


@pytest.mark.parametrize("every", [1, 2, 5, 10, 20])
def test_the_cadence_of_the_log_does_not_hide_a_change(every):
    """A row every so many steps."""
    steps = list(range(0, 400, every))

    [turn] = turned([1e-6 if step < 200 else 1.2e-5 for step in steps], steps=steps)

    assert 200 - every < turn.step <= 200
    assert turn.factor(400) == pytest.approx(12)


def test_a_warm_up_that_lasts_is_known_as_one():
    """A suspect only for want of others."""
    [turn] = turned([1e-6 * (s + 1) / 1000 for s in range(400)])

    assert turn.warming
    assert turn.words(399).startswith("still in its warm-up at step 399")


def test_memory_is_bounded():
    """A knob that is turned again and again is remembered by its newest turns."""
    values = [1e-6 * (20 if (s // 70) % 2 else 1) for s in range(20_000)]

    turns = turned(values)

    assert 1 < len(turns) <= 9
    assert all(len(turn.path) <= 64 for turn in turns)


# Footprints: knobs that no metric shows, by what they alone can do.


def row(step, **changes):
    """Rewards of right or wrong, advantages by group, a small loss, an engine that is near."""
    wave = 0.03 * math.sin(step)
    mean = 0.5 + wave
    return {
        "reward/mean": mean, "reward/std": math.sqrt(mean * (1 - mean)), "reward/zero_std_frac": 0.2,
        "adv/min": -2.4 + wave, "adv/max": 2.4 + wave, "adv/std": 0.89 + wave / 10, "adv/mean": wave / 10,
        "loss/raw": wave / 100, "policy/entropy": 1.2 + wave, "mismatch/logp_absdiff": 0.01 * (1 + wave),
    } | changes  # fmt: skip


def footprints(changed, since=100, until=200):
    tracker = KnobTracker()
    for step in range(until):
        tracker.update(step, row(step, **(changed if step >= since else {})))
    return {(turn.knob, turn.step) for turn in tracker.turns if turn.source is ChangeSource.INFERRED}


@pytest.mark.parametrize(
    ("changed", "knob"),
    [
        ({"adv/min": -9.0}, "advantages"),
        ({"adv/min": 0.0}, "advantages"),
        ({"adv/mean": 1.1}, "advantages"),
        ({"adv/std": 3.0}, "advantages"),
        ({"reward/mean": -0.4}, "reward_function"),
        ({"reward/std": 0.1}, "reward_function"),
        ({"loss/raw": -0.4}, "entropy_bonus"),  # a third of the entropy, row after row
        ({"mismatch/logp_absdiff": 0.2}, "rollout_engine"),
    ],
)
def test_a_footprint_names_its_knob(changed, knob):
    """And the step, to the row."""
    assert footprints(changed) == {(knob, 100)}


def test_rows_as_ever_leave_no_footprint():
    """Nor do rows that lack everything, or are not finite."""
    assert footprints({}) == set()
    assert footprints(dict.fromkeys(row(0), math.nan)) == set()
    assert footprints({"adv/min": -9.0}, since=100, until=102) == set()


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda step: -0.4 if step % 3 else 0.1, id="it jumps about"),
        pytest.param(lambda step: 0.4, id="it rose"),
        pytest.param(lambda step: -0.05 * 1.6 ** (step % 5), id="no one share of the entropy"),
    ],
)
def test_a_loss_that_moved_is_no_entropy_term(loss):
    """A knob is named by what it alone can do: the loss is so many times the entropy, in row after row."""
    tracker = KnobTracker()
    for step in range(200):
        tracker.update(step, row(step) | ({"loss/raw": loss(step)} if step >= 100 else {}))

    assert [turn for turn in tracker.turns if turn.knob == "entropy_bonus"] == []


def test_a_footprint_is_dated_to_where_it_left_its_level():
    """An entropy term that is turned up little by little is seen late, and began when it began to leave."""
    tracker = KnobTracker()
    for step in range(200):
        weight = 0.0 if step < 100 else min(0.3, 0.01 * (step - 99))
        tracker.update(step, row(step) | {"loss/raw": -weight * row(step)["policy/entropy"]})

    [turn] = [turn for turn in tracker.turns if turn.knob == "entropy_bonus"]
    assert 100 <= turn.step <= 105


EDGES = (0.0, -0.0, 1e-320, 1e308, -1e308, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-12, 1e-6, 5.0, -5e-324)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_run_logs_nothing_is_raised(seed):
    """Values out of every range, infinities and NaN are data, and what they lead to is told."""
    draw, tracker = random.Random(seed), KnobTracker()
    values = {name: draw.choice(EDGES) for name in draw.sample(sorted(TRACKED), draw.randint(1, len(TRACKED)))}
    for step in range(200):
        values |= {name: draw.choice(EDGES) for name in values if draw.random() < 0.06}
        tracker.update(step, values)

    assert all(turn.words(200) for turn in tracker.turns)
    assert diagnose(COLLAPSE, turns=tracker.turns).causes


# Blame.

COLLAPSE = [found("reward_drop", 200), found("entropy_collapse", 210)]


def test_a_knob_that_was_turned_before_the_first_sign_is_the_first_suspect():
    """By how much, since when, and how long before."""
    turns = turned([4e-4] * 171 + [4e-4 * 1.09**s for s in range(100)])

    diagnosis = diagnose(COLLAPSE, turns=turns)

    cause = diagnosis.causes[0]
    assert (cause.kind, cause.knob, cause.onset_step) == ("learning_rate", "learning_rate", 172)
    assert cause.title == "Learning rate x 12 since step 172 (0.0004 to 0.00487)"
    assert cause.sure is Confidence.STRONG
    assert "raised 12x, 28 steps before the first symptom" in cause.why
    assert cause.symptoms == ("reward_drop", "entropy_collapse")
    assert [action.id for action in cause.actions][:2] == ["roll-back", "lower-lr"]
    assert cause.evidence[0].kind == "learning_rate"
    assert diagnosis.to_dict()["causes"][0]["knob"] == "learning_rate"


def test_what_was_turned_after_the_failure_did_not_cause_it():
    """Somebody raised the rate when all was lost."""
    diagnosis = diagnose(COLLAPSE, turns=turned([4e-4] * 240 + [4e-3] * 60))

    assert diagnosis.causes[0].kind != "learning_rate"
    assert all(cause.sure is not Confidence.STRONG for cause in diagnosis.causes if cause.kind == "learning_rate")


def test_a_rate_put_down_is_no_suspect():
    """In that direction it is not known to hurt."""
    before = diagnose(COLLAPSE)

    assert diagnose(COLLAPSE, turns=turned([4e-4] * 150 + [4e-5] * 150)) == before


def test_the_greater_change_comes_first_and_two_alike_make_neither_sure():
    """Of what was turned at one time."""
    rate, age = turned([1e-6] * 150 + [3e-6] * 100), turned([1.0] * 150 + [40.0] * 100, AGE)

    greater = diagnose(COLLAPSE, turns=[*rate, *age])
    alike = diagnose(COLLAPSE, turns=[*turned([1e-6] * 150 + [2e-5] * 100), *age])

    kinds = [cause.kind for cause in greater.causes]
    assert kinds[0] == "weight_sync"
    assert "learning_rate" in kinds[1:]
    assert greater.causes[0].sure is Confidence.STRONG
    assert alike.causes[0].sure is Confidence.PLAUSIBLE
    assert "other candidate" in alike.causes[0].why


def test_old_weights_explain_an_engine_that_is_far():
    """The mismatch is what the knob shows itself by, and no rival of it."""
    run = [found("staleness", 155, WARNING), found("mismatch_growth", 160), found("reward_drop", 200)]

    diagnosis = diagnose(run, turns=turned([1.0] * 150 + [40.0] * 100, AGE))

    assert diagnosis.causes[0].kind == "weight_sync"
    assert "mismatch_growth" in diagnosis.causes[0].symptoms
    assert all(cause.kind != "staleness" for cause in diagnosis.causes)


def test_without_a_failure_no_knob_is_blamed():
    """Remarks are no failure: a change that nothing followed is nobody's business."""
    turns = turned([1e-6] * 100 + [1e-4] * 50)

    assert diagnose([], turns=turns).causes == ()
    assert all(c.kind != "learning_rate" for c in diagnose([found("reward_drop", 120, INFO)], turns=turns).causes)


def test_at_a_step_later_changes_are_not_known():
    """The diagnosis of an alarm at step 211 does not know of step 212."""
    turns = turned([1e-6] * 212 + [1e-4] * 50)

    assert diagnose(COLLAPSE, turns=turns, at=220) != diagnose(COLLAPSE, at=220)
    assert diagnose(COLLAPSE, turns=turns, at=211) == diagnose(COLLAPSE, at=211)


def test_a_knob_turned_within_the_slack_of_the_first_onset_is_dated_no_later_than_it():
    """Onsets are good to five steps: a rate raised two steps after the date of the fall may have done it, ten may not."""
    for late, blamed in ((2, True), (10, False)):
        diagnosis = diagnose(COLLAPSE, turns=turned([4e-4] * (200 + late) + [4e-3] * 60))

        assert (diagnosis.causes[0].kind == "learning_rate") is blamed
        assert diagnosis.causes[0].onset_step == 200


def test_a_knob_outranks_a_symptom_only_by_more_than_a_little():
    """The rate rose by a fifth more than counts as turned; then by what is known to hurt."""
    little, more = (diagnose(COLLAPSE, turns=turned([1e-6] * 150 + [x * 1e-6] * 100)) for x in (1.55, 2.0))

    assert (little.causes[0].kind, little.causes[1].kind) == ("reward_drop", "learning_rate")
    assert more.causes[0].kind == "learning_rate"


@pytest.mark.parametrize("known", ["logged", "configured"])
def test_a_weight_that_is_known_to_hurt_is_named_though_nobody_turned_it(known):
    """An entropy term of .01 from the first step on, where the entropy exploded; not where the reward alone fell."""
    if known == "logged":
        large, small = (turned([value] * 200, "policy/entropy_coef") for value in (0.01, 0.005))
    else:
        large, small = (config_turns({1: {"actor": {"entropy_coeff": value}}}, {1: 1}) for value in ("0.01", 0.005))
    noise = [found("entropy_explosion", 150), found("reward_drop", 170)]

    cause = diagnose(noise, turns=large).causes[0]
    assert (cause.knob, cause.title) == ("entropy_bonus", "Entropy term: 0.01 since the start")
    assert cause.sure is Confidence.PLAUSIBLE
    assert "0.005 is stable" in cause.why
    assert diagnose(noise, turns=small) == diagnose(noise)
    assert diagnose(COLLAPSE, turns=large) == diagnose(COLLAPSE)


# What rows do not tell.


def test_an_option_that_changed_at_a_resume_is_a_suspect():
    """Nested options, numbers as text; what is no knob is not looked at."""
    old = {"actor": {"optim": {"lr": "1e-6"}, "clip_ratio": 0.2}, "trainer": {"logger": "wandb"}}
    new = {"actor": {"optim": {"lr": "2e-5"}, "clip_ratio": 0.2}, "trainer": {"logger": "console"}}

    turns = config_turns({1: old, 2: {}, 3: new}, {1: 1, 3: 150})

    assert [(turn.knob, turn.name, turn.step, turn.source) for turn in turns] == [
        ("learning_rate", "actor.optim.lr", 150, ChangeSource.CONFIG)
    ]
    assert diagnose(COLLAPSE, turns=turns).causes[0].title == "Learning rate x 20 since step 150 (1e-06 to 2e-05)"


def test_options_without_a_number_are_told_as_they_are():
    """A data set that was exchanged."""
    [turn] = config_turns({1: {"dataset_name": "gsm8k"}, 2: {"dataset_name": "aime"}}, {1: 1, 2: 150})

    assert turn.words(200) == "gsm8k to aime since step 150"
    assert diagnose(COLLAPSE, turns=[turn]).causes[0].knob == "data"


def test_a_command_that_was_carried_out_is_a_suspect():
    """By what it was told to do."""
    asked = happened("command", 180, command="set-kl-coef", args={"value": 2.0})

    cause = next(c for c in diagnose(COLLAPSE, events=[asked]).causes if c.kind == "kl_coefficient")

    assert cause.title == "KL term: the command set-kl-coef (value 2.0) from step 180"


@pytest.mark.parametrize("knob", catalogue.knobs().values(), ids=lambda knob: knob.name)
def test_a_knob_of_the_catalogue_is_whole(knob):
    """Kinds and actions there are, sizes that make sense, a source, and advice under its name."""
    kinds = catalogue.kinds()

    assert not {*knob.shows, *knob.also, *knob.usually} - set(kinds)
    assert knob.name not in kinds
    assert 1 < knob.least <= knob.harm
    assert knob.hurts in {"up", "down", "both"}
    assert knob.source
    assert {"reward_drop", "nonfinite"} <= set(knob.leads_to)
    assert advice(knob.name, "trl").actions


def test_a_distance_that_grew_before_the_failure_does_not_date_it():
    """KL to the reference grew while the run learnt; 20 steps later the rate rose, and after that all broke at once."""
    run = [found("kl_drift", 151, INFO), found("kl_drift", 151, delay=76)]
    run += [found("joint_collapse", 191), found("entropy_collapse", 202), found("reward_drop", 202)]
    rate = turned([4e-4] * 170 + [4e-4 * 1.09**step for step in range(1, 80)])

    told = diagnose(run, turns=rate, starts={1: 0})
    shown = explained(told, verdict_of(run, {1: range(320)}))

    assert (shown.causes[0].kind, shown.causes[0].sure) == ("learning_rate", Confidence.STRONG)
    assert verdict_of(run, {1: range(320)}).since == 191
    assert verdict_of(run[:2], {1: range(320)}).since == 151


def odd_run(seed, rows=500):
    """Settings, advantages, rewards and signs of updates that are steady, jump, drift, are missing or no numbers."""
    draw = random.Random(seed)
    levels = {name: draw.choice((1e-6, 0.02, 0.5, 1.0, 3.0)) for name in sorted(TRACKED)}
    steady = set(draw.sample(sorted(TRACKED), len(TRACKED) // 3))
    for step in range(rows):
        if draw.random() < 0.03:
            levels[draw.choice(sorted(TRACKED))] *= draw.choice((0.0, 0.1, 1.3, 8.0, -1.0))
        row = {name: level if name in steady else level * draw.gauss(1.0, 0.02) for name, level in levels.items()}
        for odd in (math.nan, math.inf, -math.inf, 1e300):
            if draw.random() < 0.01:
                row[draw.choice(list(row))] = odd
        if draw.random() < 0.1:
            del row[draw.choice(list(row))]
        yield step, row


@pytest.mark.parametrize("seed", range(12))
def test_rows_read_together_show_what_each_shows_by_itself(seed):
    """Asked after every row, after some, or at the end: changes, movements and footprints are the same."""
    draw, each, some, last = random.Random(seed), KnobTracker(), KnobTracker(), KnobTracker()
    for row in odd_run(seed):
        for tracker in (each, some, last):
            tracker.update(*row)
        now = each.turns
        if draw.random() < 0.05:
            assert repr(some.turns) == repr(now)

    assert repr(last.turns) == repr(some.turns) == repr(each.turns)
    assert len(each.turns) >= 5
