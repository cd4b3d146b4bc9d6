"""Records of single responses, episodes or questions, which are no rows of a training.

A file of an evaluation has a record for each question, one of rollouts a record for each response. Numbered, they would
read as a training without trend. Such a record names what it is of (``question_id``, ``prompt_idx``) or holds its text,
and has nothing that only a step of a training has: no loss, gradient, KL, entropy, and no mean or spread of anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from rlwatch.metrics import Family, resolve
from rlwatch.metrics.words import in_order, said

_ITEMS = frozenset((
    "episode", "question", "prompt", "sample", "example", "problem", "task", "record", "response",
    "item", "instance", "trajectory", "traj", "query", "dialogue", "conversation", "case", "test", "val",
))  # fmt: skip
"""What a record may be of, each word in the form of :func:`~rlwatch.metrics.words.said`."""
_NUMBERED = frozenset({"id", "ids", "idx", "index", "uid", "uuid", "no", "hash"})
_ALONE = frozenset({"uid", "uuid", "idx"})
_TEXTS = frozenset((
    "prompt", "response", "question", "answer", "text", "message", "messages", "preview", "prediction",
    "transcript", "conversation", "solution", "problem", "query", "trajectory", "input", "dialogue", "instruction",
))  # fmt: skip
_OUTCOMES = frozenset({"correct", "success", "pass", "solve", "win", "done", "error"})
_OF_STEPS = frozenset({"mean", "std", "median", "var", "batch", "epoch", "lr", "group"})
"""Words of what is measured over many responses, or said of a step."""
_TRAINS = frozenset({Family.EXPLORATION, Family.TRUST_REGION, Family.OPTIMISATION, Family.CRITIC, Family.MISMATCH})
REASON = "a record of a single response or episode, no row of a step"


@lru_cache(maxsize=1024)
def _trains(name: str) -> bool:
    """True of what only a step of a training has."""
    read = resolve(name)
    return read is not None and read.metric.family in _TRAINS


class _Shape(NamedTuple):
    """Names of a record: that which tells of which response it is, those that do with a text, or with a yes or no."""

    told: str
    texts: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def _shape(names: tuple[str, ...]) -> _Shape:
    if any(map(_trains, names)):
        return _Shape("")
    words = {name: in_order(name.rpartition("/")[2]) for name in names}
    told = (
        name
        for name, own in words.items()
        if (_NUMBERED & {*own} and _ITEMS & {*own}) or (own and _ALONE.issuperset(own))
    )
    if any(said(name) & _OF_STEPS for name in names):
        return _Shape(next(told, ""))
    last = {name: own[-1] for name, own in words.items() if own}
    texts = tuple(name for name, word in last.items() if word in _TEXTS)
    return _Shape(next(told, ""), texts, tuple(name for name, word in last.items() if word in _OUTCOMES))


def of_single(row: Mapping[str, object]) -> str:
    """The field that says that ``row`` is of one response or episode; empty if it may be one of a training.

    >>> of_single({"question_id": 3, "score": 0.5}), of_single({"step": 3, "completion": "so", "reward": 1.0})
    ('question_id', 'completion')
    >>> of_single({"step": 3, "loss": 0.1, "reward": 0.5, "completion": "so"})
    ''
    """
    shape = _shape(tuple(row))
    if shape.told or not (shape.texts or shape.outcomes):
        return shape.told
    texts = (name for name in shape.texts if isinstance(row[name], str | list | dict) and row[name])
    return next(texts, "") or next((name for name in shape.outcomes if isinstance(row[name], bool)), "")


def may_be_of_single(names: Iterable[str]) -> bool:
    """True if rows with these names may be of one response each."""
    return any(_shape(tuple(names)))


def may_be_numbered(rows: Iterable[Mapping[str, object]]) -> bool:
    """True if rows that say no step may be numbered: one at least has what only a step of a training has.

    >>> may_be_numbered([{"score": 0.4}, {"score": 0.5}]), may_be_numbered([{"loss": 0.1, "reward": 0.4}])
    (False, True)
    """
    return any(_trains(name) or said(name) & _OF_STEPS for row in rows for name in row)
