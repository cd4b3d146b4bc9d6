"""Compare the settings (configurations) of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlwatch.records import JSON
from rlwatch.redaction import recordable


class Absent:
    """Value of an option that a run does not have, as opposed to ``null``."""

    def __repr__(self) -> str:
        return "-"


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """An option that at least one of several configurations has.

    ``name`` is its path, joined by dots; ``values`` has one for each run, :data:`ABSENT` if the run lacks the option.
    """

    name: str
    values: tuple[JSON | Absent, ...]

    @property
    def differs(self) -> bool:
        """True unless all runs have the same value for the option."""
        return any(not _same(one, self.values[0]) for one in self.values[1:])


def settings(configs: Sequence[Mapping[str, JSON]]) -> list[ConfigOption]:
    """Return every option that any of the ``configs`` has, by name, with secrets removed: redacted values look the
    same.
    """
    flat = [dict(_leaves(recordable(config))) for config in configs]
    names = sorted(set().union(*flat)) if flat else []
    return [ConfigOption(name, tuple(one.get(name, ABSENT) for one in flat)) for name in names]


def config_diff(configs: Sequence[Mapping[str, JSON]]) -> list[ConfigOption]:
    """Return the configuration options that differ between any two of the ``configs`` (one per run), by name, without
    secrets.
    """
    return [setting for setting in settings(configs) if setting.differs]


def _leaves(value: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """Yield paths and values; a list of scalars and an empty mapping are one value each."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}.{place}")
    else:
        yield path, value


def _same(one: JSON | Absent, other: JSON | Absent) -> bool:
    """True if both are equal; ``true`` differs from 1, and NaN equals NaN."""
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
