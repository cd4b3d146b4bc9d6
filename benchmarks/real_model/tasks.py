"""Three tasks whose answers a program verifies, chosen so that the model is right now and then, and not always."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WORDS = (
    "apple", "river", "stone", "cloud", "bread", "chair", "music", "tiger", "lemon", "paper", "house", "green", "water",
    "night", "field", "dream", "queen", "valley", "orange", "island", "kettle", "jacket", "button", "useful",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """``draw`` makes a question and its answer; ``right(completion, answer)`` verifies."""

    draw: Callable[[random.Random], tuple[str, str]]
    right: Callable[[str, str], bool]


def _sum(largest: int) -> Callable[[random.Random], tuple[str, str]]:
    def draw(rng: random.Random) -> tuple[str, str]:
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        return f"What is {a} + {b}?", str(a + b)

    return draw


def _larger(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(10, 100), 2)
    return f"Which number is larger, {a} or {b}?", str(max(a, b))


def _letter(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return f'What is the first letter of the word "{word}"?', word[0].upper()


def _names(completion: str, answer: str) -> bool:
    return re.search(rf"\b{re.escape(answer)}\b", completion) is not None


def _first_number(completion: str, answer: str) -> bool:
    found = re.search(r"\d+", completion)
    return found is not None and found[0] == answer


TASKS = {
    "digits": Task(_sum(9), _names),
    "sums": Task(_sum(20), _names),
    "larger": Task(_larger, _first_number),
    "letter": Task(_letter, _names),
}
"""``digits`` is ``sums`` for a CPU, where a step has few answers."""


def problems(task: str, count: int, seed: int) -> Sequence[dict[str, object]]:
    """Rows of a data set."""
    rng = random.Random(seed)
    drawn = [TASKS[task].draw(rng) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": asked}], "answer": answer} for asked, answer in drawn]
