"""The task checks itself: its reward is right, bounded, and exact in the trainer's arithmetic."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.demo import training

DIGITS = st.text("0123456789", min_size=training.DIGITS, max_size=training.DIGITS)
COMPLETIONS = st.text("0123456789=", max_size=training.LONGEST)


@given(DIGITS)
def test_the_answer_is_the_sorted_digits(digits):
    """Same digits, none before a smaller one."""
    answer = training.answer(digits + "=")

    assert sorted(answer) == sorted(digits)
    assert all(a <= b for a, b in pairwise(answer))


@given(COMPLETIONS, DIGITS)
def test_the_reward_stays_in_its_range_and_only_the_answer_earns_all(completion, digits):
    """[-1/4, 1]; 1 means right, right means 1."""
    target = training.answer(digits)
    reward = training.score(completion, target)

    assert -0.3125 <= reward <= 1.0
    assert (reward == 1.0) == (completion == target)


@given(COMPLETIONS, DIGITS, st.integers(1, 16))
def test_equal_rewards_have_a_standard_deviation_of_exactly_zero_in_float32(completion, digits, copies):
    """Else a group that agrees would not be counted as silent."""
    rewards = np.full(copies, training.score(completion, training.answer(digits)), dtype=np.float32)

    assert rewards.std(ddof=0) == 0.0
    assert np.float64(rewards[0]) == training.score(completion, training.answer(digits))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("12345", 1.0), ("12354", 3 / 8), ("54321", 1 / 8), ("1234", 7 / 16), ("123456", 9 / 16), ("", -5 / 16)],
)
def test_the_reward_by_example(completion, reward):
    """Each digit in place earns 1/8, all of them 3/8 more, each one too few or too many costs 1/16."""
    assert training.score(completion, "12345") == reward


def test_prompts_depend_on_the_generator_only():
    """Same seed, same prompts; each has its digits and an equals sign."""
    first, again = (training.prompts(50, random.Random(3)) for _ in range(2))

    assert first == again
    assert len(set(first)) > 40
    assert all(len(text) == training.DIGITS + 1 and text.endswith("=") and text[:-1].isdigit() for text in first)


def test_the_reward_function_takes_what_trl_gives():
    """Completions and the column ``target``, and other columns it does not need."""
    assert training.sorting(["12345", "x"], target=["12345", "11111"], prompts=["a", "b"], trainer_state=None) == [
        1.0,
        -0.25,
    ]
