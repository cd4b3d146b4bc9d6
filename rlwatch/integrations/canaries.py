"""Canaries: answers that are known to be right or wrong, scored at intervals by the reward function of the training.

They are scored outside the batch, on a background thread for which training waits briefly. Random states are restored
afterwards. A function that only works on the main thread (because it sets an alarm signal) is called there.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlwatch.error_boundary import described, log_message, raised_by, seconds, sheltered
from rlwatch.errors import ConfigError
from rlwatch.gradloc.passes import RandomState
from rlwatch.integrations.verifiers import values_of

RIGHT, WRONG, FAILED = "verifier/canary_right/", "verifier/canary_wrong/", "verifier/canary_failed/"
FIRST_S = 60.0
"""Longest time that the first scoring of one canary may take, at set-up, in seconds."""
SHARE, CREDIT_S = 0.02, 1.0
"""Largest share of the time since set-up that training may wait for scorings, and seconds allowed in addition.

Beyond this limit no scoring begins until the waiting time is below it again.
"""
MOST = 64
"""Largest number of canaries."""


class Canary:
    """An answer that is known to be right or wrong, to test a reward function with.

    Parameters
    ----------
    given
        Positional arguments with which the reward function is called. Under TRL they are ``prompt, completion``, as
        texts or messages.
    right
        True if the answer is right, False if it is wrong.
    name
        Name in metrics and findings; by default ``right1``, ``wrong1`` and so on.
    columns
        Keyword arguments of the reward function. Under TRL they are the columns of the dataset that it reads, for this
        one answer.

    Raises
    ------
    ConfigError
        If ``right`` is no bool, or ``name`` contains a slash.

    >>> Canary("2 + 2 =", "4", right=True, solution=4)
    Canary('2 + 2 =', '4', right=True, solution=4)
    """

    __slots__ = ("columns", "given", "name", "right")

    def __init__(self, *given: Any, right: bool, name: str = "", **columns: Any) -> None:
        if not isinstance(right, bool):
            raise ConfigError(f"Canary: right must be True or False, got {right!r}")
        if not isinstance(name, str) or "/" in name:
            raise ConfigError(f"Canary: name must be a text without a slash, got {name!r}")
        self.given, self.right, self.name, self.columns = given, right, name, columns

    def __repr__(self) -> str:
        words = [*map(repr, self.given), f"right={self.right}"]
        words += [f"name={self.name!r}"] if self.name else []
        return f"Canary({', '.join([*words, *(f'{key}={value!r}' for key, value in self.columns.items())])})"


@dataclass(frozen=True, slots=True)
class Canaries:
    """Settings of canaries: the answers known to be right or wrong, and how often reward functions score them.

    Parameters
    ----------
    answers
        The canaries: at least one, at most 64.
    every
        Steps between two scorings, an integer >= 1. After a score that changed, the next scoring follows a step later.
    wait_s
        Longest time that training waits for a scoring, in seconds, above 0. A canary that has no score by then counts
        as failed, and no scoring begins until this one ends.

    Raises
    ------
    ConfigError
        For a value out of range, or if two canaries have the same name.
    """

    answers: Sequence[Canary]
    every: int = 10
    wait_s: float = 2.0

    def __post_init__(self) -> None:
        answers = self.answers
        if not isinstance(answers, list | tuple) or not all(isinstance(one, Canary) for one in answers):
            raise ConfigError(f"canaries must be a list of Canary(...), got {answers!r}")
        if not 1 <= len(answers) <= MOST:
            raise ConfigError(f"canaries: give 1 to {MOST} of them, or leave the argument out; got {len(answers)}")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"canaries: every must be an integer of at least 1, got {self.every!r}")
        if not seconds(self.wait_s, 0.0) > 0.0:
            raise ConfigError(f"canaries: wait_s must be a number of seconds above 0, got {self.wait_s!r}")
        names = [name for name, _ in self.named()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"canaries: {twice!r} names two of them; give each its own name")

    @classmethod
    def of(cls, wish: Sequence[Canary] | Canaries | None) -> Canaries | None:
        """Return ``wish`` as settings: None and ``Canaries`` unchanged, and a list of canaries with the default
        settings.

        Raises ``ConfigError`` for any other value.
        """
        return wish if wish is None or isinstance(wish, cls) else cls(wish)  # type: ignore[arg-type]

    def named(self) -> Iterator[tuple[str, Canary]]:
        """Yield each canary as (name, canary); one without a name is named ``right1``, ``wrong1`` and so on."""
        counts = {True: 0, False: 0}
        for one in self.answers:
            counts[one.right] += 1
            yield one.name or f"{'right' if one.right else 'wrong'}{counts[one.right]}", one


Score = Callable[[Canary], Any]
"""Function that calls a reward function with one canary; it returns one reward, or a list of one."""


@dataclass(slots=True)
class _Case:
    """A canary and the reward function that scores it."""

    function: str
    name: str
    canary: Canary
    score: Score
    on_main_thread: bool = False
    first: float = math.nan

    def read(self) -> float | None:
        """Return the canary's score, or None if it is not finite. Raises what the function raises."""
        return read(self.score(self.canary))

    @property
    def metric(self) -> str:
        return f"{RIGHT if self.canary.right else WRONG}{self.function}/{self.name}"


@dataclass(slots=True)
class _Scoring:
    """One scoring in progress: results by metric, None where a function failed."""

    cases: Sequence[_Case]
    results: dict[str, float | None] = field(default_factory=dict)
    thread: threading.Thread | None = None

    def run(self) -> None:
        """Score the canaries one after the other. Raises nothing, because it runs on a background thread."""
        for case in self.cases:
            self.results[case.metric] = sheltered(case.read, lambda _error: None)


class CanaryScorer:
    """Scorer of canaries (known right and wrong answers) by the reward functions of one trainer or loop, at intervals.

    Parameters
    ----------
    wish
        The canaries and how often they are scored.
    functions
        Name of a reward function -> function that scores a canary by it. Each is called now, once for each canary.

    Raises
    ------
    ConfigError
        If a function raises or does not return, or if a canary gets no finite reward from any function.
    """

    def __init__(self, wish: Canaries, functions: Mapping[str, Score]) -> None:
        self._wish = wish
        self._last: int | None = None
        self._begun = time.monotonic()
        self._waited_s = 0.0
        self._late: _Scoring | None = None
        with streams_kept():
            tried = [_Case(f, n, canary, score) for f, score in functions.items() for n, canary in wish.named()]
            self._cases = [case for case in tried if _begins(case)]
        scored = {case.name for case in self._cases}
        for name, canary in wish.named():
            if name not in scored:
                by = ", ".join(functions)
                raise ConfigError(f"canary {name!r} gets no finite reward from {by}: {canary!r}; leave it out")
        self._changed = False

    def numbers(self, step: int) -> dict[str, float]:
        """Return the scores of all canaries as metrics if a scoring is due at ``step``, else none.

        The call waits at most ``wait_s`` seconds for functions that run on the background thread. The metrics also hold
        the share of failed scorings of each reward function.
        """
        every = 1 if self._changed else self._wish.every
        if self._last is not None and 0 <= step - self._last < every:
            return {}
        if self._waited_s > CREDIT_S + SHARE * (time.monotonic() - self._begun):
            return {}
        self._last = step
        late = self._late
        if late is not None and late.thread is not None and late.thread.is_alive():
            return self._metrics({})
        self._late = None
        with streams_kept():
            begun = time.monotonic()
            results = self._scored()
            self._waited_s += time.monotonic() - begun
        return self._metrics(results)

    def _scored(self) -> dict[str, float | None]:
        here = _Scoring([case for case in self._cases if case.on_main_thread])
        there = _Scoring([case for case in self._cases if not case.on_main_thread])
        if there.cases:
            there.thread = threading.Thread(target=there.run, name="rlwatch-canaries", daemon=True)
            there.thread.start()
            there.thread.join(self._wish.wait_s)
            self._late = there if there.thread.is_alive() else None
        here.run()
        return {**there.results, **here.results}

    def _metrics(self, results: Mapping[str, float | None]) -> dict[str, float]:
        known = {name: score for name, score in results.items() if score is not None}
        by_function: dict[str, list[bool]] = {}
        for case in self._cases:
            by_function.setdefault(case.function, []).append(case.metric not in known)
        first = {case.metric: case.first for case in self._cases}
        self._changed = any(score != first[name] for name, score in known.items())
        return {**known, **{FAILED + name: sum(failed) / len(failed) for name, failed in by_function.items()}}


def read(result: Any) -> float | None:
    """Return the finite reward in ``result``, a number, or a list or array of one number; None for anything else."""
    values = values_of(result if isinstance(result, list | tuple) or np.ndim(result) == 1 else [result])
    return values[0] if values is not None and len(values) == 1 and math.isfinite(values[0]) else None


def _begins(case: _Case) -> bool:
    """Score a canary at set-up, where errors may be raised. Return False if the reward is not finite."""
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def score() -> None:
        error = raised_by(lambda: outcome.append(case.score(case.canary)))
        if error is not None:
            errors.append(error)

    thread = threading.Thread(target=score, name="rlwatch-canaries", daemon=True)
    thread.start()
    thread.join(FIRST_S)
    if thread.is_alive():
        raise ConfigError(f"canary {case.name!r}: {case.function} has not returned after {FIRST_S:g} s")
    if errors:
        case.on_main_thread = True
        error = raised_by(lambda: outcome.append(case.score(case.canary)))
        if error is not None:
            raise ConfigError(
                f"canary {case.name!r}: {case.function} raised {described(error)}; give the canary the columns or "
                f"arguments that the function reads: {case.canary!r}"
            )
    value = read(outcome[0])
    if value is None:
        log_message(
            logging.INFO, "canary %s gets no finite reward from %s and is not scored by it", case.name, case.function
        )
        return False
    case.first = value
    return True


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restore the global random states (Python, NumPy, torch) at the end of the ``with`` block."""
    python, numbers, tensors = random.getstate(), np.random.get_state(), RandomState.now()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        if not tensors.same(RandomState.now()):
            tensors.restore()
