"""Reading of rows that custom loops write: the kind of each row, and the meaning of a ``null`` in it.

**Kinds.** One JSONL may hold rows of rollouts, of updates and of evaluations, distinguished by a field (``"type"``).
Metrics of an evaluation are read as ``eval/<name>``: otherwise a reward on held-out prompts would count as a reward of
the training. If rollouts and updates share a name, the kind that used it first keeps it; the name of the other is read
as ``train/<name>`` or ``rollout/<name>``.

**null** means NaN for some writers (orjson, pandas, JavaScript, ``None if isnan(x) else x``) and "not measured" for
others. It is read as NaN in two cases. The format is known to write NaN so (verl's file logger, Hugging Face's
trainers). Or the metric was finite in three consecutive training rows and a neighbour is broken, too: another such
metric is null in the same row, a value of the row is NaN or infinite, or the metric's own last value was. All other
nulls are read as not measured, and are counted: before the first finite value of a metric, in rows of an evaluation or
a baseline, in rows that also measure held-out prompts, and a single null in a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from rlwatch.importers.assemble import source_of
from rlwatch.importers.base import HELD_OUT, Skips, is_null, of_held_out, value_of
from rlwatch.importers.console import dict_rows

_KINDS = ("type", "kind", "phase", "split", "mode", "stage")
_KIND_FIELDS = (
    *_KINDS,
    "event",
    *(f"{of}_{kind}" for of in ("log", "row", "record", "entry", "line", "event", "data") for kind in _KINDS),
)
"""Fields whose value may be the kind of a row; the first that holds one counts."""
_FLAGS = ("eval", "is_eval", "evaluation", "is_baseline", "baseline")
"""Fields that are true in rows of an evaluation or a baseline."""
_KIND_MARKERS = frozenset((*_KIND_FIELDS, *_FLAGS))
_WORD = re.compile(r"[a-z]+")
_OF_NO_TRAINING = HELD_OUT | {"evaluate", "valid", "dev", "baseline", "benchmark"}
_OF_ROLLOUTS = frozenset({"rollout", "rollouts", "sample", "sampling", "generate", "generation", "collect"})
_OF_UPDATES = frozenset({"train", "training", "update", "optim", "optimizer", "learn", "step"})
_WRAPPERS = frozenset({"metrics", "logs", "log", "stats", "data", "values"})
"""Fields that only wrap the metrics of a row; their names are dropped."""
_SETTINGS = frozenset({"config", "args", "hparams", "settings"})
EVAL, ROLLOUT, TRAIN = "eval", "rollout", "train"
_WRITE_NAN_AS_NULL = ("trl", "ms-swift")
"""Trainers built on Hugging Face's, whose mean of only NaN is None."""
LONGEST_QUOTED = 100_000
"""Largest number of characters in a dict that was written as text."""
STEADY = 3
"""Number of consecutive finite values after which a metric counts as one that every training row has."""


def kind_of(row: Mapping[str, object]) -> str:
    """Return ``"eval"``, ``"rollout"`` or ``"train"`` if a field of ``row`` names the kind; empty otherwise.

    >>> kind_of({"type": "evaluation", "reward": 0.5}), kind_of({"phase": "warmup"})
    ('eval', '')
    """
    if row.keys().isdisjoint(_KIND_MARKERS):
        return ""
    if any(row.get(name) is True for name in _FLAGS):
        return EVAL
    for field in _KIND_FIELDS:
        value = row.get(field)
        words = set(_WORD.findall(value.lower())) if isinstance(value, str) and len(value) <= 40 else set()
        for kind, meant in ((EVAL, _OF_NO_TRAINING), (ROLLOUT, _OF_ROLLOUTS), (TRAIN, _OF_UPDATES)):
            if words & meant:
                return kind
    return ""


def flattened(row: Mapping[str, object], depth: int = 3) -> dict[str, object]:
    """Return ``row`` with nested dicts, up to ``depth`` levels, written as names with slashes; settings are left out.

    >>> flattened({"step": 1, "metrics": {"reward": {"mean": 0.5}}, "config": {"lr": 1e-6}})
    {'step': 1, 'reward/mean': 0.5}
    """
    if is_flat(row):
        return dict(row)
    flat: dict[str, object] = {}
    for name, given in row.items():
        value = _unquoted(given) if isinstance(given, str) else given
        if not isinstance(value, dict) or depth == 0:
            flat[name] = given
        elif name not in _SETTINGS:
            within = "" if name in _WRAPPERS else f"{name}/"
            flat |= {f"{within}{inner}": each for inner, each in flattened(value, depth - 1).items()}
    return flat


_SINGLE = frozenset({float, int, bool, type(None)})
"""Types of values that hold no others."""


def is_flat(row: Mapping[str, object]) -> bool:
    """Return True if no value of a JSON row is a dict. Most values are numbers, so that their types are few."""
    kinds = set(map(type, row.values()))
    if kinds <= _SINGLE:
        return True
    if str in kinds and any(isinstance(value, str) and value.startswith("{") for value in row.values()):
        return False
    return not any(issubclass(kind, dict) for kind in kinds)


def _unquoted(text: str) -> object:
    """Return the dict that was written as text; the text itself if it is no dict.

    >>> _unquoted("{'reward': 0.5, 'kl': nan}"), _unquoted("{x}")
    ({'reward': '0.5', 'kl': 'nan'}, '{x}')
    """
    if not text.startswith("{") or len(text) > LONGEST_QUOTED:
        return text
    rows = dict_rows(text)
    return rows[0].items if len(rows) == 1 and not rows[0].cut and rows[0].end == len(text) else text


def step_field(row: Mapping[str, object], fields: Sequence[str]) -> str | None:
    """Return the first of ``fields`` that ``row`` has, however it is capitalised; None if it has none.

    >>> step_field({"Step": 3, "loss": 0.5}, ("global_step", "step"))
    'Step'
    """
    exact = next((field for field in fields if field in row), None)
    if exact is not None:
        return exact
    lower = {name.lower(): name for name in reversed(list(row))}
    return next((lower[field] for field in fields if field in lower), None)


def is_whole(row: Mapping[str, object]) -> bool:
    """Return True if every value of a row is a float, and their sum is finite, so that each of them is."""
    values = row.values()
    return set(map(type, values)) == {float} and math.isfinite(sum(values))  # type: ignore[arg-type]


class OwnRows:
    """Reader of the rows of one log, in their order, which interprets kinds of rows and nulls."""

    def __init__(self) -> None:
        self._owner: dict[str, str] = {}
        """Name -> the kind of row that used it first."""
        self._finite: dict[str, int] = {}
        """Name -> finite values since the last null that meant "not measured", at most :data:`STEADY`."""
        self._steady: set[str] = set()
        """Names with :data:`STEADY` finite values."""
        self._broken: set[str] = set()
        """Names whose last value was not finite."""
        self._last = -1

    def read(self, step: int, row: Mapping[str, object], skips: Skips, line: int) -> Mapping[str, object]:
        """Return the row of ``step`` without the nulls that mean "not measured", and with the kind of row as a prefix
        of names.

        Nulls that are left out are counted in ``skips``, at ``line``.
        """
        kind = kind_of(row)
        if step < self._last:  # another start of the training: it has measured nothing yet
            self._finite.clear()
            self._steady.clear()
            self._broken.clear()
        self._last = step
        if not kind and not self._broken and row.keys() <= self._steady and is_whole(row):
            return row
        nulls = [name for name, value in row.items() if is_null(value)]
        meant = self._meant(row, nulls, trains=kind != EVAL) if nulls else set[str]()
        kept: dict[str, object] = {}
        for name, value in row.items():
            if name in _KIND_FIELDS and isinstance(value, str):  # a word for the row, and no metric of it
                continue
            if name in nulls and name not in meant:
                skips.add("a null (read as not measured)", line)
                continue
            kept[self._called(name, kind)] = value
            if kind != EVAL:
                self._remember(name, value)
        return kept

    def goes_on(self, step: int) -> bool:
        """Take a row of finite floats under the names of the row before, which :meth:`read` returned unchanged.

        Return False if it must be given to :meth:`read`, because the training starts again.
        """
        if step < self._last:
            return False
        self._last = step
        return True

    def _meant(self, row: Mapping[str, object], nulls: list[str], *, trains: bool) -> set[str]:
        """Return the names in ``nulls`` whose null means NaN."""
        if source_of(row).startswith(_WRITE_NAN_AS_NULL):
            return set(nulls)
        values = {name: value_of(value) for name, value in row.items() if name not in nulls}
        numbers = {name: value for name, value in values.items() if value is not None}
        held_out = any(of_held_out(name) and math.isfinite(value) for name, value in numbers.items())
        steady = {name for name in nulls if self._finite.get(name, 0) >= STEADY}
        still = self._broken.intersection(nulls)
        neighbour = len(steady) > 1 or any(not math.isfinite(value) for value in numbers.values())
        meant = still | (steady if neighbour else set()) if trains and not held_out else set()
        for name in set(nulls) - meant:
            self._finite[name] = 0
            self._steady.discard(name)
        return meant

    def _remember(self, name: str, value: object) -> None:
        number = value_of(value)
        if number is None:
            return
        if math.isfinite(number):
            count = self._finite[name] = min(self._finite.get(name, 0) + 1, STEADY)
            if count == STEADY:
                self._steady.add(name)
            self._broken.discard(name)
        else:
            self._broken.add(name)

    def _called(self, name: str, kind: str) -> str:
        if kind == EVAL:
            return name if of_held_out(name.split("/", 1)[0]) else f"{EVAL}/{name}"
        if not kind or self._owner.setdefault(name, kind) == kind:
            return name
        return name if name.startswith(f"{kind}/") else f"{kind}/{name}"
