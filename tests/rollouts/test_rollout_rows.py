"""Recorded completions: their order, what is odd about them, and what became of the answers to a prompt."""

import math

import pytest

from rlwatch.rollouts import (
    Sort,
    TextSpan,
    among,
    answer,
    at_step,
    best_and_worst,
    flags,
    marks,
    ordered,
    prompts_seen,
    reward_parts,
    turns,
)

NAN = math.nan


def row(step=1, completion="x", prompt="p", attempt=1, **more):
    return {"step": step, "attempt": attempt, "rank": 0, "prompt": prompt, "completion": completion, **more}


def rewards(rows):
    return [one.get("reward") for one in rows]


def test_the_worst_comes_first_and_what_is_no_number_before_it():
    """What a person looks for; what was not recorded is last, whichever way."""
    rows = [row(reward=1.0), row(reward=0.0), row(), row(reward=NAN), row(reward=-2.0)]

    assert rewards(ordered(rows, Sort.REWARD))[1:] == [-2.0, 0.0, 1.0, None]
    assert math.isnan(rewards(ordered(rows, Sort.REWARD))[0])
    assert rewards(ordered(rows, Sort.REWARD, reverse=True))[1:] == [1.0, 0.0, -2.0, None]
    assert [one["length"] for one in ordered([row(length=2), row(length=9)], Sort.LENGTH)] == [9, 2]


def test_steps_are_both_included_and_a_prompt_is_its_id_or_a_part_of_it():
    """Whatever its letters."""
    rows = [row(step, prompt=f"What is {step}?", prompt_id=f"ab{step}") for step in range(5)]

    assert [one["step"] for one in among(rows, first=1, last=3)] == [1, 2, 3]
    assert [one["step"] for one in among(rows, prompt="AB4")] == [4]
    assert [one["step"] for one in among(rows, prompt="what is 2")] == [2]
    assert among(rows, prompt="nothing of it") == []


def test_what_is_odd_is_said():
    """A reward that is no number, a loop, nothing at all; of a usual one nothing."""
    assert flags(row(reward=0.5, repetition=0.1)) == []
    assert flags(row(reward=NAN, kl=math.inf, repetition=0.9, completion=" \n")) == [
        "reward NaN", "kl infinite", "repeats itself", "empty",
    ]  # fmt: skip


def test_the_best_and_the_worst_are_no_completion_twice():
    """Of three there are no four; NaN is the worst of all."""
    rows = [row(1, reward=1.0), row(2, reward=0.0), row(3, reward=NAN)]

    assert [one["step"] for one in best_and_worst(rows, 1)] == [1, 3]
    assert [one["step"] for one in best_and_worst(rows, 2)] == [1, 2, 3]
    assert best_and_worst([row()], 2) == []


def test_a_prompt_is_followed_from_step_to_step():
    """Those of most steps first; of a step that was run again the later attempt counts."""
    rows = [row(1, prompt_id="a"), row(51, prompt_id="a"), row(51, "y", prompt_id="a", attempt=2), row(1, prompt="b")]

    assert [(seen.prompt_id, seen.steps) for seen in prompts_seen(rows)] == [("a", (1, 51)), ("b", (1,))]
    assert [one["completion"] for one in at_step(rows, 51, "a")] == ["y"]


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ((0.0, r"\boxed{4}"), (1.0, r"\boxed{5}"), "reward 0 → positive"),
        ((1.0, r"\boxed{4}"), (0.5, r"so \boxed{4}"), ""),
        ((1.0, "The answer is 4."), (1.0, "The answer is 5."), "answer"),
        ((1.0, "x"), (NAN, "x"), "reward positive → NaN"),
        ((0.2, "x"), (-0.2, "x"), "reward positive → negative"),
    ],
)
def test_what_the_policy_changed_its_mind_about(before, after, changed):
    """The sign of the reward, or the answer."""
    rows = [
        row(at, text, prompt_id="a", reward=reward) for at, (reward, text) in zip((1, 51), (before, after), strict=True)
    ]

    [turn] = turns(rows, 1, 51)

    assert turn.changed == changed
    assert turns(rows, 1, 52) == []


def test_the_largest_change_of_mind_comes_first():
    """Rewards before answers, answers before nothing."""
    rows = [
        row(at, text, prompt=name, prompt_id=name, reward=reward)
        for name, states in {
            "same": [(1.0, "4"), (0.4, "4")],
            "answer": [(1.0, "4"), (1.0, "5")],
            "little": [(0.1, "4"), (0.0, "4")],
            "much": [(1.0, "4"), (0.0, "4")],
        }.items()
        for at, (reward, text) in zip((1, 51), states, strict=True)
    ]

    assert [turn.prompt_id for turn in turns(rows, 1, 51)] == ["much", "little", "answer", "same"]


def test_rewards_by_function_keep_their_values():
    """NaN is one of them; text is none."""
    parts = reward_parts({"reward/math": 1.0, "reward/format": NAN, "reward": 2.0, "reward/why": "x"})

    assert parts["math"] == 1.0
    assert math.isnan(parts["format"])
    assert set(parts) == {"math", "format"}


def test_an_answer_of_a_hostile_text_is_found_in_no_time():
    """A loop of braces or of words is no reason to hang."""
    assert len(answer("\\boxed{" + "{" * 50_000)) <= 200
    assert len(answer("answer is " * 20_000)) <= 200
    assert answer("") == ""


def test_culprits_are_found_in_the_text_they_were_in():
    """By their place, and only where the text there is theirs."""
    text = "so 2+2=4 and 2+2=5"
    here = {"text": "5", "before": "and 2+2=", "text_position": 17, "cause": "token ratio"}

    assert marks(row(completion=text), [here, {**here, "text_position": 7}, {"text": "5"}]) == [
        TextSpan(17, 18, "token ratio")
    ]
    assert marks(row(completion="another response"), [here]) == []
