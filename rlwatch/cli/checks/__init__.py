"""What ``rlwatch doctor`` looks at: each check answers with lines that are ok, warn or fail."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """``fail``: rlwatch will not work; ``warn``: something you may need does not."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, and what to do about it."""

    name: str
    level: Level
    text: str
