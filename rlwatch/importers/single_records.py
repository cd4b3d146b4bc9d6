"""Detection of records that describe single responses, episodes or questions, and so are no steps of a training.

A file of an evaluation has a record for each question, a file of rollouts one for each response. Numbered, they would
look like a training without trend. Such a record holds an id (``question_id``, ``prompt_idx``) or a text. It has
nothing that only a training step has: no loss, gradient, KL or entropy, and no mean or spread of anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from rlwatch.metrics import Family, resolve
from rlwatch.metrics.words import in_order, stems

_ITEMS = frozenset((
    "episode", "question", "prompt", "sample", "example", "problem", "task", "record", "response",
    "item", "instance", "trajectory", "traj", "query", "dialogue", "conversation", "case", "test", "val",
))  # fmt: skip
"""Items that a record may describe, as stems of :func:`~rlwatch.metrics.words.stems`."""
_NUMBERED = frozenset({"id", "ids", "idx", "index", "uid", "uuid", "no", "hash"})
_ALONE = frozenset({"uid", "uuid", "idx"})
_TEXTS = frozenset((
    "prompt", "response", "question", "answer", "text", "message", "messages", "preview", "prediction",
    "transcript", "conversation", "solution", "problem", "query", "trajectory", "input", "dialogue", "instruction",
))  # fmt: skip
_OUTCOMES = frozenset({"correct", "success", "pass", "solve", "win", "done", "error"})
_OF_STEPS = frozenset({"mean", "std", "median", "var", "batch", "epoch", "lr", "group"})
"""Words for statistics over many responses, or for facts about a step."""
_TRAINS = frozenset({Family.EXPLORATION, Family.TRUST_REGION, Family.OPTIMISATION, Family.CRITIC, Family.MISMATCH})
_GRADED = _OUTCOMES | {"reward", "score", "accuracy", "return"}
LEAST_SEVERAL = 5
LEAST_OUTCOMES = 20
OFTEN = 0.15
"""Share of rows at which an outcome of 0 or 1 changes if consecutive rows are graded responses."""
MOST_LOOKED_AT = 200
_WHAT_ONE_HAS = "what only a step of a training has (a loss, a KL, a mean)"
_OF_ONE_EACH = (
    "they are records of single responses; give the trainer's log, which has a row a step (if this is one, name its "
    "reward: --map reward=NAME)"
)
REASON = "a record of a single response or episode, no row of a step"


@lru_cache(maxsize=1024)
def _trains(name: str) -> bool:
    """Return True if only a training step has a metric of this name."""
    read = resolve(name)
    return read is not None and read.metric.family in _TRAINS


class _Shape(NamedTuple):
    """Names of a record's fields: its id, its texts, and its outcomes of yes or no."""

    identity: str
    texts: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def _shape(names: tuple[str, ...]) -> _Shape:
    if any(map(_trains, names)):
        return _Shape("")
    words = {name: in_order(name.rpartition("/")[2]) for name in names}
    identities = (
        name
        for name, own in words.items()
        if (_NUMBERED & {*own} and _ITEMS & {*own}) or (own and _ALONE.issuperset(own))
    )
    if any(stems(name) & _OF_STEPS for name in names):
        return _Shape(next(identities, ""))
    last = {name: own[-1] for name, own in words.items() if own}
    texts = tuple(name for name, word in last.items() if word in _TEXTS)
    return _Shape(next(identities, ""), texts, tuple(name for name, word in last.items() if word in _OUTCOMES))


def of_single(row: Mapping[str, object]) -> str:
    """Return the field that shows that ``row`` describes a single response or episode.

    The result is empty if ``row`` may be a training row.

    >>> of_single({"question_id": 3, "score": 0.5}), of_single({"step": 3, "completion": "so", "reward": 1.0})
    ('question_id', 'completion')
    >>> of_single({"step": 3, "loss": 0.1, "reward": 0.5, "completion": "so"})
    ''
    """
    shape = _shape(tuple(row))
    if shape.identity or not (shape.texts or shape.outcomes):
        return shape.identity
    texts = (name for name in shape.texts if isinstance(row[name], str | list | dict) and row[name])
    return next(texts, "") or next((name for name in shape.outcomes if isinstance(row[name], bool)), "")


def may_be_of_single(names: Iterable[str]) -> bool:
    """Return True if rows with the fields ``names`` may describe a single response each."""
    return any(_shape(tuple(names)))


def may_be_numbered(rows: Iterable[Mapping[str, object]]) -> bool:
    """Return True if rows without a step may be numbered, because at least one has a metric that only a training step
    has.

    >>> may_be_numbered([{"score": 0.4}, {"score": 0.5}]), may_be_numbered([{"loss": 0.1, "reward": 0.4}])
    (False, True)
    """
    return any(of_a_step(name) for row in rows for name in row)


def of_a_step(name: str) -> bool:
    """Return True if only a training step has a metric called ``name``, or if it is a statistic over many responses."""
    return _trains(name) or not stems(name).isdisjoint(_OF_STEPS)


class OneByOne:
    """Detection, row by row, that each row of a run describes a single response, although it holds a step.

    That is so if most steps have several rows, or if an outcome is 0 or 1 in every row and changes often. The check
    ends (``possible`` is False) at the first name that only a training has.
    """

    def __init__(self) -> None:
        self.possible = True
        self._step = -1
        self._steps = self._several = self._rows = 0
        self._row: Mapping[str, float] = {}
        self._is_several = False
        self._outcomes: dict[str, tuple[float, int]] = {}
        """Name of an outcome -> its last value and its number of changes; only outcomes that were always 0 or 1."""

    def named(self, names: Iterable[str]) -> None:
        """Note metric names that were not seen before; the check ends if only a training step has one of them."""
        self.possible = self.possible and not any(map(of_a_step, names))

    def take(self, step: int, metrics: Mapping[str, float]) -> str:
        """Add the row ``metrics`` of ``step``.

        Return an error message if the rows describe single responses, else an empty text.
        """
        again = step == self._step and metrics.keys() == self._row.keys()
        if not again:
            self._steps += 1
            self._is_several = False
        elif not self._is_several and metrics != self._row:
            self._is_several = True
            self._several += 1
        self._step, self._row = step, metrics
        self._rows += 1
        self._look_at(metrics)
        if self._several >= LEAST_SEVERAL and 2 * self._several > self._steps:
            return f"has several rows at each step, of which none has {_WHAT_ONE_HAS}: {_OF_ONE_EACH}"
        if self._rows >= LEAST_OUTCOMES:
            always = [name for name, (_, changes) in self._outcomes.items() if changes >= self._rows * OFTEN]
            if always:
                return f"has {always[0]!r} 0 or 1 in each row, and nothing like {_WHAT_ONE_HAS}: {_OF_ONE_EACH}"
            self.possible = self._rows < MOST_LOOKED_AT
        return ""

    def _look_at(self, metrics: Mapping[str, float]) -> None:
        if self._rows == 1:
            self._outcomes = {name: (value, 0) for name, value in metrics.items() if stems(name) & _GRADED}
        for name, (before, changes) in list(self._outcomes.items()):
            value = metrics.get(name, math.nan)
            if value in (0.0, 1.0):
                self._outcomes[name] = (value, changes + (value != before))
            else:
                del self._outcomes[name]
