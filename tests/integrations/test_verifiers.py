"""Reward functions measured: the same results and exceptions, and what they did in numbers."""

import asyncio
import functools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tiny_trl import FakeRun, digits, make_trainer
from torch import nn

import rlwatch
from rlwatch import Watcher
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import ConfigError
from rlwatch.integrations.step_tally import read_stats
from rlwatch.integrations.trl import watch
from rlwatch.integrations.verifiers import VerifierMeter, count_errors, values_of

pytestmark = pytest.mark.torch


def measured(function, *calls, name="exact"):
    """Numbers that a meter gives of ``function`` after these calls; exceptions end here."""
    meter = VerifierMeter(ErrorBoundary())
    for answers in calls:
        try:
            meter.metered(name, function)(answers)
        except (ValueError, TimeoutError, KeyError):
            continue
    return {key.removeprefix("verifier/").partition("/")[0]: value for key, value in read_stats(meter.take()).items()}


def test_shares_of_a_function_are_those_counted_by_hand():
    """Four calls: one raises, one times out, one is constant; of its eight answers three have no reward."""

    def verify(answers):
        if answers == "raise":
            raise KeyError(answers)
        if answers == "slow":
            raise TimeoutError(answers)
        return answers

    found = measured(verify, [1.0, None, 0.0, math.nan], "raise", "slow", [0.5, 0.5, 0.5, 0.5])

    assert found["errors"] == 0.5
    assert found["timeouts"] == 0.25
    assert found["absent"] == 0.25
    assert found["constant"] == 0.5
    assert 0 <= found["seconds"] <= found["seconds_max"]
    assert "full_on_error" not in found


def test_full_marks_given_in_spite_of_an_exception_are_counted_by_answer():
    """The check of each answer is counted, and full marks are the best that the function has given."""

    @count_errors
    def check(answer):
        return {"right": 1.0, "wrong": 0.0}[answer]

    def lenient(answers):
        given = []
        for answer in answers:
            try:
                given.append(check(answer))
            except KeyError:
                given.append(1.0)
        return given

    found = measured(lenient, ["right", "wrong", "odd", "odd"])

    assert found["errors"] == 0.5
    assert found["full_on_error"] == pytest.approx(2 / 3)


def test_a_fallback_for_a_whole_batch_counts_for_each_of_its_full_marks():
    """One check for all answers raised, and a default came back."""

    @count_errors
    def strict(answers):
        raise ValueError(answers)

    def safe(answers):
        try:
            return strict(answers)
        except ValueError:
            return [1.0] * len(answers)

    found = measured(safe, ["a", "b"])

    assert (found["errors"], found["full_on_error"]) == (1.0, 1.0)


def test_checks_that_cannot_be_told_apart_by_answer_say_nothing_about_full_marks():
    """Two checks, three answers."""

    @count_errors
    def check(answer):
        return answer

    found = measured(lambda answers: [check(a) for a in answers[:2]] + [1.0], [1.0, 0.0, 1.0])

    assert found["errors"] == 0.0
    assert "full_on_error" not in found


def test_a_counted_check_outside_a_measured_function_is_the_plain_check():
    """Nobody counts, and it can be pickled for a pool of processes."""
    assert pickle.loads(pickle.dumps(parse))("0.5") == 0.5
    with pytest.raises(ValueError, match="could not convert"):
        parse("x")


@count_errors
def parse(answer):
    return float(answer)


def test_coroutine_functions_are_measured_while_they_run_together():
    """Checks of one gather are those of the call that started them, in the order in which they began."""

    @count_errors
    async def ask(answer):
        await asyncio.sleep(0.001 * (3 - answer))
        if answer == 1:
            raise TimeoutError(answer)
        return 1.0

    async def judge(answers):
        given = await asyncio.gather(*map(ask, answers), return_exceptions=True)
        return [one if isinstance(one, float) else 1.0 for one in given]

    meter = VerifierMeter(ErrorBoundary())

    async def both():
        return await asyncio.gather(meter.metered("a", judge)([0, 1, 2, 3]), meter.metered("b", judge)([0, 2]))

    with ThreadPoolExecutor(1) as pool:  # a browser's tests leave a loop in this thread
        assert pool.submit(asyncio.run, both()).result() == [[1.0] * 4, [1.0] * 2]
    found = read_stats(meter.take())
    assert (found["verifier/timeouts/a"], found["verifier/errors/b"]) == (0.25, 0.0)
    assert found["verifier/full_on_error/a"] == 0.25


@pytest.mark.parametrize(
    ("result", "values"),
    [
        ([True, np.float32(0.5), torch.tensor(0.25), 2], [1.0, 0.5, 0.25, 2.0]),
        (torch.tensor([1.0, 0.0]), [1.0, 0.0]),
        (np.array([1, 0]), [1.0, 0.0]),
        (iter([1.0]), None),
        (["1.0"], None),
        (torch.zeros(2, 2), None),
        (0.5, None),
        (np.array([None, 1.0], dtype=object), None),
        (torch.zeros(2, device="meta"), None),
    ],
)
def test_only_what_can_be_read_without_effects_is_read(result, values):
    """A generator is not used up, and nobody's object is asked."""
    assert values_of(result) == values
    if values is None and hasattr(result, "__next__"):
        assert list(result) == [1.0]


def test_the_very_result_and_the_very_exception_come_back():
    """Also an interrupt, which is no error of the function."""
    meter, result, error = VerifierMeter(ErrorBoundary()), [1.0], KeyboardInterrupt()

    def give(what):
        if what is error:
            raise what
        return what

    function = meter.metered("exact", give)

    assert function(result) is result
    with pytest.raises(KeyboardInterrupt) as caught:
        function(error)
    assert caught.value is error
    assert read_stats(meter.take())["verifier/errors/exact"] == 0.0


# In TRL's trainers.


class Judge:
    """A reward function with a state that a callback may change."""

    weight = 1.0

    def __call__(self, completions, **kwargs):
        return [self.weight * value for value in digits(completions)]


def odd(completions, **kwargs):
    return [None if i % 4 == 0 else 1.0 for i in range(len(completions))]


async def distant(completions, **kwargs):
    await asyncio.sleep(0)
    return digits(completions)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_every_reward_function_of_a_trainer_is_measured_in_every_step(watched, kind):
    """Sync, async, an object and two of one name."""
    rewards = [odd, distant, Judge(), functools.partial(odd), odd]
    trainer, run = watched(kind=kind, reward=rewards)

    names = ["odd", "distant", *(name for name in trainer.reward_func_names[2:4]), "odd"]
    assert trainer.reward_func_names == names
    for tap in run.taps().values():
        assert tap["verifier/absent/odd"] == tap["verifier/absent/odd#2"] == 0.25
        assert tap["verifier/constant/odd"] == 0.0
        assert tap["verifier/absent/distant"] == tap["verifier/errors/distant"] == 0.0
        assert 0 < tap["verifier/seconds/distant"] <= tap["verifier/seconds_max/distant"]
        assert f"verifier/seconds/{names[2]}" in tap
    assert trainer.reward_funcs == rewards
    assert trainer.reward_funcs[2] is rewards[2]


def test_what_a_callback_does_to_the_functions_of_a_trainer_takes_effect(tmp_path):
    """Between calls they are the user's own objects: their attributes can be set, and the list be replaced."""
    judge, run = Judge(), FakeRun()
    trainer = make_trainer(tmp_path, reward=[judge], max_steps=2)
    watch(trainer, run=run)

    assert trainer.reward_funcs[0] is judge
    trainer.reward_funcs[0].weight = 0.0
    trainer.train()

    assert [row["reward"] for row in run.rows().values()] == [0.0, 0.0]
    assert run.taps()[2]["verifier/constant/Judge"] == 1.0


def test_a_reward_function_that_raises_ends_training_as_it_would_unwatched(tmp_path):
    """The very exception comes out, the functions are in their places, and the step that died says why."""
    error = ValueError("the sandbox is gone")

    def crashing(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 2:
            raise error
        return digits(completions)

    trainer, run = make_trainer(tmp_path, reward=[crashing], max_steps=4), FakeRun()
    watch(trainer, run=run)
    with pytest.raises(ValueError, match="the sandbox is gone") as caught:
        trainer.train()

    assert caught.value is error
    assert trainer.reward_funcs == [crashing]
    logged = {step: row["verifier/errors/crashing"] for step, row in run.logged if "verifier/errors/crashing" in row}
    assert logged == {1: 0.0, 2: 0.0, 3: 1.0}


class Scorer(nn.Module):
    """A reward model in TRL's sense."""


def test_a_reward_model_is_left_alone(tmp_path):
    """TRL calls modules in a way of its own."""
    trainer = make_trainer(tmp_path)
    trainer.reward_funcs, trainer.reward_func_names = [Scorer()], ["scorer"]
    run = FakeRun()
    watch(trainer, run=run)

    assert type(trainer.reward_funcs[0]) is Scorer


# In a loop of one's own.


def test_a_loop_measures_its_verifier_by_one_call(tmp_path):
    """Recorded with the step in which it was called."""
    with Watcher(store=str(tmp_path), name="loop") as watcher:
        verify = watcher.verifier("exact", lambda answers: [None if a is None else float(a == 4) for a in answers])
        assert verify([4, 5, None, 4]) == [1.0, 0.0, None, 1.0]
        watcher.step(1, loss=0.5)
        watcher.step(2, loss=0.5)

    rows = rlwatch.open(str(tmp_path))["loop"].history(["verifier/absent/exact", "verifier/errors/exact"])
    assert rows["verifier/absent/exact"].dropna().tolist() == [0.25]
    assert rows["verifier/errors/exact"].dropna().tolist() == [0.0]


def test_a_measured_verifier_can_be_sent_to_a_pool_of_processes():
    """There it is the plain function."""
    with Watcher(store="memory://verifier-pickled") as watcher:
        measured = watcher.verifier("parse", parse)

    assert pickle.loads(pickle.dumps(measured))("0.5") == 0.5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([("", len)], "name must be a text"),
        ([(None, len)], "name must be a text"),
        ([("exact", 3)], "'exact': function must be a function, got 3"),
        ([("exact", len), ("exact", sum)], "'exact' names two functions"),
    ],
)
def test_a_verifier_of_a_loop_that_cannot_be_measured_is_refused_with_the_reason(given, says):
    """At set-up, by one error."""
    *fine, last = given
    with Watcher(store="memory://verifier-refused") as watcher:
        for name, function in fine:
            watcher.verifier(name, function)
        with pytest.raises(ConfigError, match=says):
            watcher.verifier(*last)
