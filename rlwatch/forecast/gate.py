"""The gate: a chance is shown only of logs of a kind on which the shipped forecaster has shown skill.

What kind a log is, is a property of what it holds: :func:`class_of`. What the forecaster is worth on each was measured
by ``python -m benchmarks.forecast classes`` and stands in ``shipped/skill.json``. A class is open where the
forecaster beats a clock and a straight line, by AUROC and by Brier score, with intervals above zero, and its chances
are calibrated. In others a run keeps what can be checked: the time to a limit, and how far out such lines were so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

NO_SIGNAL = "no forecast: this log has no signal that has ever warned"
"""Said of a log of a class that is not open."""
LEAST_FAILURES = 8
"""Failing runs without which an interval says nothing."""
CALIBRATED = 0.05
"""Expected calibration error up to which chances are shown."""


class LogClass(StrEnum):
    """Kinds of logs."""

    TAPS = "per token"
    """Per-token tails as taps at ``full`` log them, a row every 1 to 3 steps, batches that do not scatter much."""
    TAPS_SMALL = "per token, small batches"
    """The same where the reward's rows scatter as those of few responses do."""
    FINE = "fine scalars"
    """Averages, a row every 1 to 3 steps."""
    COARSE = "coarse scalars"
    """A row every 4 to 9 steps."""
    SPARSE = "sparse"
    """A row every 10 steps or more."""


PER_TOKEN = frozenset(
    {
        *("entropy_pos", "entropy_neg", "entropy_p10", "entropy_p90", "logp_min", "logp_positive", "displaced"),
        *("negative_push", "kl_ref_tail", "mismatch_tail"),
    }
)
"""Signals that take the values of single tokens."""
LEAST_PER_TOKEN = 5
"""So many of them make a per-token log: every run that is watched at ``full`` has seven without a reference."""
COARSE_FROM, SPARSE_FROM = 4.0, 10.0
"""Steps from row to row."""
SCATTERS = 0.3
"""Spread of the reward's rows, in spreads of the rewards, from which batches are small: that of eleven responses."""


def class_of(signals: frozenset[str], every: float, scatter: float) -> LogClass:
    """Kind of a log with these signals, a row ``every`` so many steps, and a reward that scatters from row to row."""
    if every >= SPARSE_FROM:
        return LogClass.SPARSE
    if every >= COARSE_FROM:
        return LogClass.COARSE
    if len(signals & PER_TOKEN) < LEAST_PER_TOKEN:
        return LogClass.FINE
    return LogClass.TAPS_SMALL if scatter > SCATTERS else LogClass.TAPS


# What the forecaster is worth on each.


@dataclass(frozen=True, slots=True)
class Gain:
    """A difference and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Skill:
    """Of p50 on the runs of one class. ``gains``: AUROC and Brier skill over a clock and over a straight line;
    ``people``: whose runs they are.
    """

    people: str
    runs: int
    failures: int
    calibration_error: float
    gains: tuple[Gain, ...]

    @property
    def shown(self) -> bool:
        """True where chances are shown."""
        proven = bool(self.gains) and self.failures >= LEAST_FAILURES and all(g.low > 0.0 for g in self.gains)
        return proven and self.calibration_error <= CALIBRATED


GAINS = ("auroc_over_clock", "auroc_over_line", "brier_over_clock", "brier_over_line")
"""Names of the gains in the table."""


@cache
def measured() -> dict[str, Skill]:
    """Class -> skill at 50 steps, of the shipped table; none where this installation has no table."""
    path = files("rlwatch.forecast") / "shipped" / "skill.json"
    if not path.is_file():
        return {}
    return {each["class"]: skill_of(each) for each in json.loads(path.read_text())["classes"] if each["decides"]}


def skill_of(row: Mapping[str, object]) -> Skill:
    """Skill at 50 steps of a line of the table."""
    at = row["within 50 steps"]
    if not isinstance(at, dict):
        return Skill(str(row["people"]), 0, 0, 1.0, ())
    gains = tuple(Gain(*at[name]) for name in GAINS if at.get(name) is not None)
    return Skill(
        str(row["people"]),
        at["runs"],
        at["failures"],
        at["calibration_error"],
        gains if len(gains) == len(GAINS) else (),
    )


def opens(log: str) -> bool:
    """True where the chances of such a log are shown."""
    skill = measured().get(log)
    return skill is not None and skill.shown


def caveat(log: str) -> str:
    """Note that a chance was proven on our own runs alone; empty where it was on others', and where none is shown."""
    skill = measured().get(log)
    own = skill is not None and skill.shown and skill.people.startswith("rlwatch")
    return "proven on rlwatch's own small models, not on other people's runs" if own else ""
