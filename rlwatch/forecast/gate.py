"""The gate: a probability is shown only for kinds of logs on which the shipped forecaster has shown skill.

:func:`class_of` derives the kind of a log from its contents. ``python -m benchmarks.forecast classes`` measured the
skill on each kind and wrote it to ``shipped/skill.json``. A class is open if the forecaster beats a clock and a
straight line, by AUROC and by Brier score, with intervals above zero, and its probabilities are calibrated. Runs of
other classes keep the time to a limit, with the error of such lines so far, because that can be checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

NO_SIGNAL = "no forecast: this log has no signal that has ever warned"
"""Reason given for a log of a class that is not open."""
LEAST_FAILURES = 8
"""Failing runs below which an interval is not conclusive."""
CALIBRATED = 0.05
"""Expected calibration error up to which probabilities are shown."""


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
"""Signals that are values of single tokens."""
LEAST_PER_TOKEN = 5
"""Number of them from which a log is per token: every run watched at ``full`` has seven without a reference."""
COARSE_FROM, SPARSE_FROM = 4.0, 10.0
"""Steps from row to row."""
SCATTERS = 0.3
"""Spread of the reward's rows, in spreads of the rewards, from which batches are small: that of eleven responses."""


def class_of(signals: frozenset[str], every: float, scatter: float) -> LogClass:
    """Return the kind of a log with these signals, a row ``every`` that many steps, and this scatter of the reward."""
    if every >= SPARSE_FROM:
        return LogClass.SPARSE
    if every >= COARSE_FROM:
        return LogClass.COARSE
    if len(signals & PER_TOKEN) < LEAST_PER_TOKEN:
        return LogClass.FINE
    return LogClass.TAPS_SMALL if scatter > SCATTERS else LogClass.TAPS


# The skill of the forecaster on each class.


@dataclass(frozen=True, slots=True)
class Gain:
    """A difference and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Skill:
    """Skill of p50 on the runs of one class. ``gains``: AUROC and Brier skill over a clock and over a straight line;
    ``people``: owners of these runs.
    """

    people: str
    runs: int
    failures: int
    calibration_error: float
    gains: tuple[Gain, ...]

    @property
    def shown(self) -> bool:
        """Return whether probabilities are shown."""
        proven = bool(self.gains) and self.failures >= LEAST_FAILURES and all(g.low > 0.0 for g in self.gains)
        return proven and self.calibration_error <= CALIBRATED


GAINS = ("auroc_over_clock", "auroc_over_line", "brier_over_clock", "brier_over_line")
"""Names of the gains in the table."""


@cache
def measured() -> dict[str, Skill]:
    """Return class -> skill at 50 steps, from the shipped table; empty if this installation has none."""
    path = files("rlwatch.forecast") / "shipped" / "skill.json"
    if not path.is_file():
        return {}
    return {each["class"]: skill_of(each) for each in json.loads(path.read_text())["classes"] if each["decides"]}


def skill_of(row: Mapping[str, object]) -> Skill:
    """Return the skill at 50 steps from a line of the table."""
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
    """Return whether the probabilities of such a log are shown."""
    skill = measured().get(log)
    return skill is not None and skill.shown


def caveat(log: str) -> str:
    """Return a note if skill was proven on rlwatch's own runs only; empty otherwise, and where none is shown."""
    skill = measured().get(log)
    own = skill is not None and skill.shown and skill.people.startswith("rlwatch")
    return "proven on rlwatch's own small models, not on other people's runs" if own else ""
