"""Types of a command's arguments: what is allowed, and the words to say what is not."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from rlwatch.errors import ConfigError
from rlwatch.records import JSON

REQUIRED: Any = object()
"""The default of an argument that must be given."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ``values``; the first is the default."""

    values: tuple[str, ...]
    meaning: str

    @property
    def default(self) -> JSON:
        """The first value."""
        return self.values[0]

    @property
    def allowed(self) -> str:
        """In words."""
        return f"one of {', '.join(self.values)}"

    def fits(self, value: JSON) -> bool:
        """Whether ``value`` is allowed."""
        return isinstance(value, str) and value in self.values


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from ``low`` (or above it) to ``high``, in ``unit``."""

    meaning: str
    low: float = 0.0
    high: float = math.inf
    above: bool = False
    default: JSON = REQUIRED
    unit: str = ""

    @property
    def allowed(self) -> str:
        """In words."""
        low = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        high = "" if math.isinf(self.high) else f" and at most {self.high:g}"
        return f"a number {low}{high}{' ' * bool(self.unit)}{self.unit}"

    def fits(self, value: JSON) -> bool:
        """Whether ``value`` is allowed. Truth values, NaN, infinities and what no float holds are no numbers here."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            return False
        return value <= self.high and (value > self.low if self.above else value >= self.low)


@dataclass(frozen=True, slots=True)
class Step:
    """A global step of the trainer, an integer >= 1, or None."""

    meaning: str
    default: JSON = None
    allowed: str = "a step (an integer of at least 1) or none"

    def fits(self, value: JSON) -> bool:
        """Whether ``value`` is allowed."""
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


Argument = Choice | Number | Step


def checked(kind: str, name: str, argument: Argument, value: JSON) -> JSON:
    """``value`` if ``argument`` allows it. Raises ``ConfigError`` saying what is allowed."""
    if value is REQUIRED:
        raise ConfigError(f"{kind} needs {name}: {argument.allowed} ({argument.meaning})")
    if not argument.fits(value):
        raise ConfigError(f"{kind} {name}={value!r} is not {argument.allowed}")
    return value
