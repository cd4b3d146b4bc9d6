"""The task: sort five digits. A program checks the answer, so the reward means what it says.

>>> answer("31524=")
'12345'
>>> score("12345", "12345"), score("12354", "12345"), score("1234", "12345")
(1.0, 0.375, 0.4375)
"""

from __future__ import annotations

import random

DIGITS = 5
LONGEST = DIGITS + 4
"""Tokens a completion may have: enough to be too long, and to be seen to be."""

RIGHT_PLACE, ALL_RIGHT, WRONG_LENGTH = 2 / 16, 6 / 16, 1 / 16
"""Multiples of 1/16 are exact in float32: the standard deviation of equal rewards is then exactly zero, and
TRL's ``frac_reward_zero_std``, which compares it with zero, counts every silent group."""


def prompts(count: int, rng: random.Random) -> list[str]:
    """``count`` prompts such as ``"31524="``."""
    return ["".join(rng.choices("0123456789", k=DIGITS)) + "=" for _ in range(count)]


def answer(prompt: str) -> str:
    """The digits of ``prompt`` in order."""
    return "".join(sorted(prompt.rstrip("=")))


def score(completion: str, target: str) -> float:
    """Reward in [-0.25, 1]: digits in place, a bonus for all of them, a price for a wrong length."""
    placed = sum(ours == theirs for ours, theirs in zip(completion, target, strict=False))
    missing = abs(len(completion) - len(target))
    return RIGHT_PLACE * placed + ALL_RIGHT * (completion == target) - WRONG_LENGTH * missing


def sorting(completions: list[str], target: list[str], **_: object) -> list[float]:
    """:func:`score` as TRL calls a reward function."""
    return [score(text, wanted) for text, wanted in zip(completions, target, strict=True)]
