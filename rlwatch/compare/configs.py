"""The settings in which runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlwatch.records import JSON
from rlwatch.redaction import recordable


class Absent:
    """A setting that a run was not given; ``null`` is one that it was."""

    def __repr__(self) -> str:
        return "-"


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class Setting:
    """``name`` is the path to it, joined by dots; ``values`` one for each run, :data:`ABSENT` where there is none."""

    name: str
    values: tuple[JSON | Absent, ...]

    @property
    def differs(self) -> bool:
        """True unless all runs have the same."""
        return any(not _same(one, self.values[0]) for one in self.values[1:])


def settings(configs: Sequence[Mapping[str, JSON]]) -> list[Setting]:
    """Every setting of any of the runs by name, without secrets: two that are blacked out look the same."""
    flat = [dict(_leaves(recordable(config))) for config in configs]
    names = sorted(set().union(*flat)) if flat else []
    return [Setting(name, tuple(one.get(name, ABSENT) for one in flat)) for name in names]


def config_diff(configs: Sequence[Mapping[str, JSON]]) -> list[Setting]:
    """The settings in which any two of the runs differ, by name."""
    return [setting for setting in settings(configs) if setting.differs]


def _leaves(value: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """Paths and values; a list is one value unless it holds mappings or lists, an empty mapping one, too."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}.{place}")
    else:
        yield path, value


def _same(one: JSON | Absent, other: JSON | Absent) -> bool:
    """Equal, ``true`` is not 1 and NaN is NaN."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
