"""What a broken sampler writes: token id 0, garbled characters, batches in which all is alike."""

import math

import pytest
from exact_runs import alarms, always, exact, then, when, worst

from rlwatch.detectors.rollouts.broken_output import DegenerateBatch, GarbledOutput, Id0Run
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep


def test_id0_responses_are_critical_in_the_second_row():
    """verl issue 751: after the weights broke, every response is ``!!!!``."""
    assert when(Id0Run(), exact({"text/id0_frac": then(0.0, 1.0, 30)})) == {"warning": 30, "critical": 31}


def test_one_row_of_them_is_a_warning_only():
    """A race between weight update and generation passes."""
    assert worst(Id0Run(), exact({"text/id0_frac": lambda s: float(s in (30, 40))})) == "warning"


def test_a_few_of_them_row_after_row_stay_a_warning():
    """Two in a hundred: one slot of the engine."""
    assert worst(Id0Run(), exact({"text/id0_frac": always(0.02)})) == "warning"
    assert worst(Id0Run(), exact({"text/id0_frac": always(0.0)})) is None


def test_answers_of_one_token_are_no_runs():
    """An empty answer of a vocabulary in which id 0 ends one."""
    rows = exact({"text/id0_frac": always(0.06), "text/id0_run": always(1.0)})

    assert worst(Id0Run(), rows) is None


def test_the_longest_run_is_shown():
    """In tokens."""
    rows = exact({"text/id0_frac": always(1.0), "text/id0_run": always(4096.0)})

    assert "runs of up to 4096 tokens" in alarms(Id0Run(), rows)["critical"].message


@pytest.mark.parametrize(
    ("metric", "before", "after"),
    [
        ("text/garbled", 1e-4, 0.05),
        ("text/replacement", 0.0, 0.02),
        ("text/script_switches", 0.3, 8.0),
        ("text/zlib_ratio", 2.5, 1.2),
    ],
)
def test_each_sign_of_garbled_text_warns(metric, before, after):
    """Against how the run wrote at first."""
    found = alarms(GarbledOutput(), exact({metric: then(before, after, 30)}))

    assert set(found) == {"warning"}
    assert 30 <= found["warning"].onset_step <= found["warning"].step <= 42


@pytest.mark.parametrize(
    ("metric", "level"), [("text/script_switches", 9.0), ("text/zlib_ratio", 1.3), ("text/garbled", 0.02)]
)
def test_a_run_that_always_wrote_like_this_is_fine(metric, level):
    """Another language, short answers, a task of bytes."""
    assert worst(GarbledOutput(), exact({metric: always(level)})) is None


def test_loops_are_left_to_repetition():
    """Text that compresses twenty times better is no noise."""
    assert worst(GarbledOutput(), exact({"text/zlib_ratio": then(2.5, 50.0, 30)})) is None


def test_no_text_left_and_no_reward_is_critical():
    """A third of the characters, and the reward gone; either alone is not."""
    noise, fall = {"text/garbled": then(0.0, 0.5, 30)}, {"reward/mean": then(0.6, 0.0, 30)}

    assert worst(GarbledOutput(), exact(noise | fall)) == "critical"
    assert worst(GarbledOutput(), exact(noise | {"reward/mean": always(0.6)})) == "warning"
    assert worst(GarbledOutput(), exact(fall | {"text/garbled": always(0.0)})) is None


def batch(at=30, *, low=257.0, reward=-1.0, spread=0.0, clipped=1.0, length=257.0):
    """Healthy until ``at``, then all responses ``length`` long, as in the log of Agent-R1 issue 30."""
    return exact(
        {
            "len/min": then(20.0, low, at),
            "len/mean": then(120.0, length, at),
            "len/max": then(250.0, length, at),
            "len/clipped": then(0.05, clipped, at),
            "reward/mean": then(0.4, reward, at),
            "reward/std": then(0.4, spread, at),
        }
    )


def test_a_degenerate_batch_is_critical_where_the_reward_fell():
    """257/257/257, clip ratio 1, score -1: as soon as the level of the reward has turned."""
    found = alarms(DegenerateBatch(), batch())

    assert set(found) == {"critical"}
    assert (found["critical"].onset_step, found["critical"].step) == (30, 35)


def test_it_is_read_from_the_log_lines_of_verl():
    """No text and no standard deviation: advantages that are all 0."""
    broken = {"response_length/min": 257.0, "response_length/mean": 257.0, "response_length/max": 257.0}
    broken |= {"response_length/clip_ratio": 1.0, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
    healthy = {"response_length/min": 20.0, "response_length/mean": 90.0, "response_length/max": 250.0}
    healthy |= {"response_length/clip_ratio": 0.1, "critic/advantages/max": 1.0, "critic/advantages/min": -1.0}
    detector, said = DegenerateBatch(), []
    for step in range(30):
        row = healthy | {"critic/score/mean": 0.4} if step < 15 else broken | {"critic/score/mean": -1.0}
        said += detector.update(ClosedStep(step=step, metrics=canonicalise(row, "verl")[0]))

    assert {finding.severity.value for finding in said} == {"critical"}


@pytest.mark.parametrize(
    "changed",
    [{"low": 250.0}, {"clipped": 0.9}, {"spread": 0.3}],
    ids=["one is shorter", "some end", "rewards differ"],
)
def test_every_sign_is_needed(changed):
    """Long answers to hard prompts are no broken sampler."""
    assert worst(DegenerateBatch(), batch(**changed)) is None


def test_without_a_fall_of_the_reward_it_warns_later():
    """Ten rows: batches of two responses are alike now and then."""
    assert when(DegenerateBatch(), batch(reward=0.4)) == {"warning": 39}


def test_a_run_that_began_like_this_is_told_as_information():
    """The limit is too small; nothing broke."""
    assert worst(DegenerateBatch(), batch(at=0)) == "info"


def test_a_limit_that_depends_on_the_prompt_is_one_prompt_a_batch():
    """Lengths alike within a row, another in the next."""
    rows = batch(reward=0.4)
    moved = [
        ClosedStep(
            r.step,
            {
                k: v + r.step if k in ("len/min", "len/mean", "len/max") and r.step >= 30 else v
                for k, v in r.metrics.items()
            },
        )
        for r in rows
    ]

    assert worst(DegenerateBatch(), moved) is None


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ({}, "the sampler was given NaN"),
        ({"policy/entropy": 0.4}, "the sampler was given NaN"),
        ({"nonfinite/rollout_logp": 3.0}, "log-probs are not finite"),
        ({"mismatch/k3": math.nan}, "log-probs are not finite"),
        ({"nonfinite/rollout_logp": 0.0}, "no NaN made them"),
        ({"mismatch/k3": 0.001, "mismatch/logp_absdiff": 0.01}, "no NaN made them"),
    ],
)
def test_id0_responses_are_put_down_to_nan_only_where_the_engines_log_probs_allow_it(beside, says):
    """Finite log-probs of the engine: the policy itself prefers the token. Those of the trainer say nothing of it."""
    rows = exact({"text/id0_frac": always(1.0)} | {name: always(value) for name, value in beside.items()})

    assert says in alarms(Id0Run(), rows)["critical"].message
