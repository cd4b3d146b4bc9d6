"""The gate: a probability is shown only for kinds of logs on which the shipped forecaster has shown skill.

:func:`class_of` derives the kind of a log from its contents. ``python -m benchmarks.forecast classes`` measured the
skill on each kind and wrote it to ``shipped/skill.json``. A class is open if the forecaster beats a clock and a
straight line, by AUROC and by Brier score, with intervals above zero, and its probabilities are calibrated. That must
hold on other people's runs; the owner of a run may accept rlwatch's own runs instead (:data:`EVIDENCE_VARIABLE`). Runs
of other classes keep the time to a limit, with the error of such lines so far, because that can be checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from rlwatch.errors import ConfigError

NO_SIGNAL = "no forecast: this log has no signal that has ever warned"
"""Reason given for a log of a class that is not open."""
EVIDENCE_VARIABLE = "RLWATCH_FORECAST_EVIDENCE"
"""Environment variable that names whose runs must have proven the skill: an :class:`Evidence`."""
LEAST_FAILURES = 8
"""Failing runs below which an interval is not conclusive."""
CALIBRATED = 0.05
"""Expected calibration error up to which probabilities are shown."""


class Evidence(StrEnum):
    """Owners of the runs on which the forecaster must have shown skill before a probability is shown."""

    OTHERS = "others"
    """Other people's runs: the default."""
    OWN = "own"
    """rlwatch's own small models suffice where no runs of other people exist."""


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
    def proven(self) -> bool:
        """Return whether the forecaster has skill on these runs."""
        better = bool(self.gains) and self.failures >= LEAST_FAILURES and all(g.low > 0.0 for g in self.gains)
        return better and self.calibration_error <= CALIBRATED

    def shown(self, evidence: Evidence = Evidence.OTHERS) -> bool:
        """Return whether probabilities are shown if the skill must have been proven on runs of this owner."""
        return self.proven and (evidence is Evidence.OWN or not self.people.startswith("rlwatch"))


GAINS = ("auroc_over_clock", "auroc_over_line", "brier_over_clock", "brier_over_line")
"""Names of the gains in the table."""


@cache
def measured() -> dict[str, Skill]:
    """Return class -> skill at 50 steps, from the shipped table; empty if this installation has none."""
    path = Path(__file__).with_name("shipped") / "skill.json"
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


def chosen_evidence() -> Evidence:
    """Return the evidence that :data:`EVIDENCE_VARIABLE` accepts; by default :attr:`Evidence.OTHERS`.

    Raises
    ------
    ConfigError
        If the variable names neither.
    """
    text = os.environ.get(EVIDENCE_VARIABLE, "") or Evidence.OTHERS
    try:
        return Evidence(text)
    except ValueError:
        raise ConfigError(f"{EVIDENCE_VARIABLE} must be 'others' or 'own', got {text!r}") from None


def opens(log: str, evidence: Evidence = Evidence.OTHERS) -> bool:
    """Return whether the probabilities of a log of this class are shown, given whose runs must have proven them."""
    skill = measured().get(log)
    return skill is not None and skill.shown(evidence)


def why_closed(log: str) -> str:
    """Return the reason to print instead of a probability for a log of a class that is not open."""
    skill = measured().get(log)
    return f"{NO_SIGNAL} on other people's runs" if skill is not None and skill.proven else NO_SIGNAL


def caveat(log: str) -> str:
    """Return a note for a shown probability if only rlwatch's own runs have proven the skill; otherwise empty."""
    own = opens(log, Evidence.OWN) and not opens(log)
    return "proven on rlwatch's own small models, not on other people's runs" if own else ""
