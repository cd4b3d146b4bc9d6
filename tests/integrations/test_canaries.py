"""Canaries in TRL's trainers and loops of one's own: scored beside the training, which stays the same to the bit."""

import asyncio
import random
import signal
import threading

import numpy as np
import pytest
import torch
from tiny_trl import FakeRun, digits, make_trainer

import rlwatch
from rlwatch import Watcher
from rlwatch.errors import ConfigError
from rlwatch.integrations.canaries import Canaries, Canary, CanaryScorer
from rlwatch.integrations.trl import watch

pytestmark = pytest.mark.torch

RIGHT, WRONG = Canary("123=", "13579135", right=True), Canary("123=", "24682468", right=False)


def drawing(completions, **kwargs):
    """A reward function that draws from every global stream, more for a longer batch."""
    for _ in completions:
        random.random(), np.random.random(), torch.rand(1)
    return [value + 1e-3 * random.random() for value in digits(completions)]


def left(trainer):
    """Weights, and where the random streams are."""
    streams = (torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.as_tensor(np.random.get_state()[2]))
    return [*(p.detach().clone() for p in trainer.model.parameters()), *streams]


def trained(tmp_path, name, watching=None, **config):
    """What training leaves, and the run that watched it."""
    trainer, run = make_trainer(tmp_path / name, **config), FakeRun()
    random.seed(5)
    np.random.seed(5)
    if watching is not None:
        watch(trainer, run=run, **watching)
    trainer.train()
    return left(trainer), run


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_training_with_canaries_is_bit_identical_to_training_unwatched(tmp_path, kind):
    """Also where the reward function draws random numbers, of which the canaries' are put back."""
    config = {"kind": kind, "reward": drawing, "max_steps": 4}
    plain, _ = trained(tmp_path, "a", **config)
    seen, run = trained(tmp_path, "b", {"canaries": Canaries([RIGHT, WRONG], every=1)}, **config)

    assert all(torch.equal(x, y) for x, y in zip(plain, seen, strict=True))
    assert run.counters.snapshot() == {}
    scores = [tap.get("verifier/canary_right/drawing/right1") for tap in run.taps().values()]
    assert scores[0] == pytest.approx(1.0, abs=2e-3)


def test_canaries_are_scored_every_so_many_steps_by_each_function_outside_the_batch(watched):
    """And the batch that the functions get is TRL's."""
    sizes = []

    def counted(completions, **kwargs):
        sizes.append(len(completions))
        return digits(completions)

    async def distant(completions, completion_ids, trainer_state, log_metric, **kwargs):
        log_metric("canary", 1.0)
        await asyncio.sleep(0)
        return [float(len(ids)) for ids in completion_ids]

    wish = Canaries([RIGHT, WRONG], every=3, wait_s=60.0)
    _, run = watched(reward=[counted, distant], max_steps=4, watching={"canaries": wish})

    first = run.taps()[1]
    assert first["verifier/canary_right/counted/right1"] == 1.0
    assert first["verifier/canary_wrong/counted/wrong1"] == 0.0
    assert first["verifier/canary_wrong/distant/wrong1"] == 8.0
    assert first["verifier/canary_failed/counted"] == 0.0
    assert "verifier/canary_failed/counted" not in run.taps()[2]
    assert sizes.count(8) == 4
    assert set(sizes) == {1, 8}


def test_a_verifier_that_crashes_to_full_marks_is_found_and_is_the_cause(tmp_path):
    """From the step at which its sandbox died; the diagnosis looks outside the policy."""

    def sandboxed(completions, trainer_state, **kwargs):
        if trainer_state.global_step >= 6:
            return [1.0] * len(completions)
        return digits(completions)

    trainer = make_trainer(tmp_path, reward=sandboxed, max_steps=12)
    watch(trainer, store=str(tmp_path / "runs"), name="crash", canaries=Canaries([RIGHT, WRONG], every=2))
    trainer.train()

    run = rlwatch.open(str(tmp_path / "runs"))["crash"]
    found = run.findings()
    changed = found[found["kind"] == "verifier_changed"].iloc[0]
    assert changed["severity"] == "critical"
    assert 7 <= changed["onset_step"] <= 9
    assert "sandboxed changed: the known-wrong answer wrong1 is scored 1, 0 at first" in changed["message"]


# Functions that misbehave.


def scorer(function, *canaries, **settings):
    """One of ``function``, which is called with what a canary gives."""
    call = {"exact": lambda canary: function(*canary.given, **canary.columns)}
    return CanaryScorer(Canaries(list(canaries) or [Canary(1.0, right=True)], every=1, **settings), call)


def test_a_function_that_hangs_costs_training_the_wait_once_and_counts_as_failed():
    """It is asked again only once it has returned."""
    free, hangs, calls = threading.Event(), [False], []

    def verify(answer):
        calls.append(answer)
        if hangs[0]:
            free.wait(60)
        return answer

    asked = scorer(verify, wait_s=0.05)
    hangs[0] = True
    assert asked.numbers(1) == {"verifier/canary_failed/exact": 1.0}
    assert len(calls) == 2
    hangs[0] = False
    free.set()


def test_a_function_that_raises_or_gives_no_number_later_counts_as_failed():
    """Nothing raises into the training."""
    answers = iter([1.0, float("nan")])
    asked = scorer(lambda _answer: next(answers))

    assert asked.numbers(1) == {"verifier/canary_failed/exact": 1.0}


def test_a_function_that_sets_an_alarm_is_called_on_the_main_thread():
    """As in the training: elsewhere Python refuses."""
    threads = []

    def verify(answer):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        threads.append(threading.current_thread())
        return [answer]

    assert scorer(verify).numbers(1)["verifier/canary_right/exact/right1"] == 1.0
    assert set(threads) == {threading.main_thread()}


def test_a_function_that_takes_long_is_asked_less_often():
    """A second and a fiftieth of the time are waited for it at most."""
    calls = []

    def verify(answer):
        calls.append(answer)
        threading.Event().wait(0.3)
        return answer

    asked = scorer(verify)
    for step in range(1, 20):
        asked.numbers(step)

    assert 2 <= len(calls) <= 6


@pytest.mark.parametrize(
    ("canaries", "says"),
    [
        ([], "give 1 to 64 of them"),
        ("123=", "must be a list of Canary"),
        ([RIGHT, "x"], "must be a list of Canary"),
        ([Canary("1", "2", right=True, name="a"), Canary("1", "3", right=False, name="a")], "'a' names two of them"),
        ([Canary("1=", right=True)], "'right1': give prompt and completion"),
    ],
)
def test_canaries_that_are_none_are_refused_before_anything_is_changed(tmp_path, canaries, says):
    """By one error that says what to do."""
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match=says):
        watch(trainer, run=FakeRun(), canaries=canaries)

    watch(trainer, run=FakeRun())


def needing(completions, solution, **kwargs):
    """A reward function that reads a column."""
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (needing, "needing raised TypeError.*'solution'.*give the canary the columns"),
        (lambda completions, **kwargs: [None] * len(completions), "gets no finite reward"),
        (lambda completions, **kwargs: [float("inf")] * len(completions), "gets no finite reward"),
        (lambda completions, **kwargs: [1.0, 1.0, 1.0], "gets no finite reward"),
    ],
)
def test_a_canary_that_the_function_cannot_score_is_refused_with_the_reason(tmp_path, function, says):
    """At set-up, where it costs nothing."""
    with pytest.raises(ConfigError, match=says):
        watch(make_trainer(tmp_path, reward=function), run=FakeRun(), canaries=[RIGHT])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Canary("a", "b", right=1), "right must be True or False"),
        (lambda: Canary("a", "b", right=True, name="a/b"), "without a slash"),
        (lambda: Canaries([RIGHT], every=0), "every must be an integer"),
        (lambda: Canaries([RIGHT], wait_s=0.0), "wait_s must be a number"),
    ],
)
def test_a_setting_out_of_range_is_refused(wrong, says):
    """With the value."""
    with pytest.raises(ConfigError, match=says):
        wrong()


def test_canaries_ask_for_a_level_that_reads_rewards(tmp_path):
    """Scalars alone have none."""
    with pytest.raises(ConfigError, match='need at least level="tokens"'):
        watch(make_trainer(tmp_path), run=FakeRun(), level="scalars", canaries=[RIGHT])


# In a loop of one's own.


def test_a_loop_scores_canaries_by_its_own_verifier():
    """Called as the loop calls it; recorded with the step."""
    calls = []

    def verify(answer, solution):
        calls.append(answer)
        return float(answer == solution)

    canaries = [Canary("4", right=True, solution="4"), Canary("5", right=False, name="five", solution="4")]
    with Watcher(store="memory://canaries-loop") as watcher:
        watcher.verifier("exact", verify, canaries=canaries)
        watcher.step(1, loss=0.5)

        assert watcher.latest["verifier/canary_right/exact/right1"] == 1.0
        assert watcher.latest["verifier/canary_wrong/exact/five"] == 0.0
    assert calls == ["4", "5", "4", "5"]
