"""The versioned tables of limits (``labels-v3.toml``, which extends ``labels-v2.toml``, and so on), read once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlwatch.errors import ConfigError

VERSION = "labels-v3"
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Windows:
    """Lengths in steps, see the table itself; ``baseline``: first and last step; ``share`` in [0, 1]."""

    median: int
    baseline: tuple[int, int]
    sustained: int
    share: float
    least: int
    monitored: int
    early: int
    touched: int


@dataclass(frozen=True, slots=True)
class TakingOff:
    """When a run takes off: the level of ``metric`` is ``times`` that of ``within`` steps before, and ``plus`` more.

    The baselines of limits of ``types`` are at least what their metrics are then.
    """

    types: tuple[str, ...]
    metric: str
    within: int
    times: float
    plus: float


@dataclass(frozen=True, slots=True)
class Limit:
    """One row of the table; ``kind``: "bound" (level against ``side``), "drop" (from the best so far) or "broken"."""

    type: str
    metrics: tuple[str, ...]
    kind: str = "bound"
    side: str = "above"
    level: float | None = None
    times: float | None = None
    plus: float | None = None
    unless: tuple[str, float] | None = None
    stand_in: str = ""
    fall: float = 0.0
    best_from: int = 0
    skipped: str = ""
    skips: int = 0

    @property
    def relative(self) -> bool:
        """Whether it needs the run's own baseline."""
        return self.kind == "bound" and (self.times is not None or self.plus is not None)


@dataclass(frozen=True, slots=True)
class Limits:
    """A version of the table; ``rows`` in the order in which ties are broken.

    ``faulty``: whether a run with a fault that had not failed by its last row is of a class of its own;
    ``taking_off``: None where baselines stay what they are.
    """

    version: str
    windows: Windows
    rows: tuple[Limit, ...]
    faulty: bool = False
    taking_off: TakingOff | None = None

    @property
    def types(self) -> tuple[str, ...]:
        """Types of failure, in the order in which ties are broken."""
        return tuple(dict.fromkeys(row.type for row in self.rows))


@lru_cache
def limits(version: str = VERSION) -> Limits:
    """The table of a version.

    Raises
    ------
    ConfigError
        If there is no such version.
    """
    return parse(_document(version))


def _document(version: str) -> dict[str, Any]:
    """What a version's file says, on top of what it extends."""
    path = _HERE / f"{version}.toml"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in _HERE.glob("labels-*.toml")))
        raise ConfigError(f"there are no labels {version!r}; there are {there}")
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return _document(found["extends"]) | found if "extends" in found else found


def parse(table: Mapping[str, Any]) -> Limits:
    """A table of limits from its TOML document."""
    windows = dict(table["windows"])
    windows["baseline"] = tuple(windows["baseline"])
    rows = tuple(_limit(row) for row in table["limit"])
    rise = table.get("taking_off")
    taking_off = None if rise is None else TakingOff(**rise | {"types": tuple(rise["types"])})
    return Limits(table["version"], Windows(**windows), rows, faulty=bool(table.get("faulty")), taking_off=taking_off)


def _limit(row: Mapping[str, Any]) -> Limit:
    unless = row.get("unless")
    given = {name: value for name, value in row.items() if name not in {"metrics", "unless"}}
    guard = None if unless is None else (str(unless["metric"]), float(unless["level"]))
    return Limit(metrics=tuple(row["metrics"]), unless=guard, **given)
