"""Tasks of small-batch runs: short texts whose answers a rule verifies, of four degrees of difficulty.

Problems of one degree are alike, those of another are longer. The order in which a run meets them is drawn with
the run (:func:`problems`): real data are easy for a while and hard for a while, and come again an epoch later.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

SIGNS = "+abcdefgh()[]{}?;"
"""Characters of these tasks beside digits and ``=``."""
STARTS = (0.03, 0.25, 0.5, 0.85)
"""How often policies are right that a run starts from: hopeless, poor, fair, nearly solved."""
DEGREES = (1, 2, 3, 4)
CLOSING = {"(": ")", "[": "]", "{": "}"}
HELD_OUT_DEGREES = (1, 2, 2, 3, 3, 4)
"""How difficult the problems are that the hidden truth is measured on, in these proportions: the same all along."""

Problem = tuple[str, str]
"""(prompt, right answer)."""


def _digits(count: int, rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=count))


def arithmetic(degree: int, rng: random.Random) -> Problem:
    """The sum of two numbers, the second of one digit up to degree 3: ``("47+8=", "55")``."""
    first, second = rng.randrange(10 ** ((degree + 1) // 2)), rng.randrange(10 if degree < 4 else 100)
    return f"{first}+{second}=", str(first + second)


def sorting(degree: int, rng: random.Random) -> Problem:
    """Digits in order."""
    digits = _digits(degree + 1, rng)
    return f"{digits}=", "".join(sorted(digits))


def copying(degree: int, rng: random.Random) -> Problem:
    """The same digits again."""
    digits = _digits(2 * degree, rng)
    return f"{digits}=", digits


def reversing(degree: int, rng: random.Random) -> Problem:
    """Digits from the last to the first."""
    digits = _digits(degree + 1, rng)
    return f"{digits}=", digits[::-1]


def brackets(degree: int, rng: random.Random) -> Problem:
    """What closes the brackets that are open, or ``;``: ``("([()=", "])")``; a first one may close nothing."""
    opened, text = list[str](), ""
    while len(opened) < degree + 1:
        if opened and rng.random() < 0.25:
            text += CLOSING[opened.pop()]
        else:
            opened.append(rng.choice("([{"))
            text += opened[-1]
    text = text[-12:]
    opened = []
    for character in text:
        if character in CLOSING:
            opened.append(character)
        elif opened:
            opened.pop()
    return f"{text}=", "".join(CLOSING[each] for each in reversed(opened)) or ";"


def lookup(degree: int, rng: random.Random) -> Problem:
    """The value of a key among some: ``("a3c9?c=", "9")``."""
    keys = rng.sample("abcdefgh", degree + 1)
    values = {key: _digits(1, rng) for key in keys}
    asked = rng.choice(keys)
    return "".join(key + value for key, value in values.items()) + f"?{asked}=", values[asked]


def dialogue(degree: int, rng: random.Random) -> Problem:
    """The next turn of a talk in its format, one more than was said: ``("a3;b4;a5;=", "b6;")``."""
    said = [rng.randrange(10) for _ in range(degree)]
    turns = [f"a{each};b{(each + 1) % 10};" for each in said[:-1]]
    return f"{''.join(turns)}a{said[-1]};=", f"b{(said[-1] + 1) % 10};"


TASKS: dict[str, Callable[[int, random.Random], Problem]] = {
    "arithmetic": arithmetic,
    "sorting": sorting,
    "copying": copying,
    "reversing": reversing,
    "brackets": brackets,
    "lookup": lookup,
    "dialogue": dialogue,
}
LONGEST = {"arithmetic": 3, "sorting": 5, "copying": 8, "reversing": 5, "brackets": 5, "lookup": 1, "dialogue": 3}
"""Characters of the longest right answer."""


@dataclass(frozen=True, slots=True)
class Data:
    """Problems of a run, and the order it meets them in.

    ``first`` and ``last``: mean degree at the beginning and at the end; ``switch``: the step at which the one becomes
    the other, None where it drifts. ``sway``: how far the degree goes up and down on the way, alike for ``block``
    steps. ``size``: distinct problems of an epoch; an epoch later they come again, in the same order if ``returns``.
    ``enough``: how often a start is right that was taught on all degrees.
    """

    task: str = "sorting"
    first: float = 2.0
    last: float = 2.0
    switch: int | None = None
    sway: float = 0.0
    block: int = 1
    size: int = 1024
    returns: bool = False
    enough: float = 0.45

    def degree_at(self, step: int, steps: int) -> float:
        """Mean degree of ``step`` (from 1) of ``steps``, without its sway."""
        if self.switch is not None:
            return self.first if step < self.switch else self.last
        return self.first + (self.last - self.first) * step / max(1, steps)


NARROW, HARD = "narrow data", "hard data"
"""Faults of the data: from then on one problem again and again; from then on problems with an answer that is wrong."""


def problems(
    data: Data, batches: int, each: int, steps: int, strength: Callable[[str, int], float], seed: int
) -> list[Problem]:
    """Problems of all batches in order, ``each`` of them in one; ``strength`` of a fault of the data at a step."""
    rng = random.Random(seed)
    epoch = max(1, data.size // each)
    pool = {degree: [TASKS[data.task](degree, rng) for _ in range(data.size)] for degree in DEGREES}
    sways = [rng.gauss(0.0, data.sway) for _ in range(batches + epoch)]
    one, made = pool[2][0], list[Problem]()
    for batch in range(batches):
        step = 1 + batch * steps // batches
        at = batch % epoch if data.returns else batch
        mean = data.degree_at(step, steps) + sways[at // data.block]
        draw = random.Random(f"{seed}/{at}") if data.returns else rng
        some = [_nearest(pool, mean, draw) for _ in range(each)]
        if strength(NARROW, step):
            some = [one] * each
        if strength(HARD, step):
            some = [(prompt, _wrong(answer)) for prompt, answer in some]
        made += some
    return made


def _nearest(pool: dict[int, list[Problem]], mean: float, rng: random.Random) -> Problem:
    """A problem of about that degree."""
    degree = min(max(round(mean + rng.gauss(0.0, 0.5)), DEGREES[0]), DEGREES[-1])
    return rng.choice(pool[degree])


def _wrong(answer: str) -> str:
    """No answer that a policy may give: one with a character that ends nothing."""
    return f"{answer[:-1]}?"


def held_out(task: str, count: int, rng: random.Random) -> list[Problem]:
    """Problems of mixed degrees on which the truth is measured."""
    return [TASKS[task](HELD_OUT_DEGREES[i % len(HELD_OUT_DEGREES)], rng) for i in range(count)]
