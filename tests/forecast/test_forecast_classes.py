"""Skill by kind of log: a clock and a line are given their best, runs weigh the same, projects are what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from forecast.classes import Gathered, markdown, row
from forecast.scoring.classes import calibration_error, chance_elsewhere, diagram, picture, skill


def gathered(told: str, runs: int = 40, steps: int = 140) -> Gathered:
    """Half of the runs fail at step 140; ``told`` is what the forecaster knows: all of it, nothing, or the time."""
    found, draw = Gathered(), np.random.default_rng(0)
    for i in range(runs):
        fails = i % 2 == 0
        at = np.arange(40.0, steps)
        onset = 140.0 if fails else np.inf
        soon = onset - at <= 50
        p = {
            "all": np.where(soon, 0.9, 0.03),
            "nothing": draw.uniform(0.0, 0.4, len(at)),
            "time": np.where(140 - at <= 50, 0.5, 0.02),
        }[told]
        line = draw.uniform(size=len(at))
        found.add(f"p{i // 2}", at, np.stack([p, p, p], axis=1), line, 0, onset, steps - 1 if fails else 400)
    return found


def test_a_forecaster_that_knows_beats_both_for_sure() -> None:
    """With intervals above zero, and calibrated."""
    at = skill(gathered("all").rows(), 50)

    assert at is not None
    assert (at["runs"], at["failures"]) == (40, 20)
    assert at["auroc"] > 0.98
    assert all(at[f"{kind}_over_{name}"][1] > 0.0 for kind in ("auroc", "brier") for name in ("clock", "line"))


@pytest.mark.parametrize("told", ["nothing", "time"])
def test_a_forecaster_that_knows_no_more_than_a_clock_does_not_beat_it(told: str) -> None:
    """Though time alone tells much here."""
    at = skill(gathered(told).rows(), 50)

    assert at is not None
    assert at["auroc_over_clock"][1] < 0.05
    assert at["brier_over_clock"][1] < 0.05


def test_a_class_in_which_nothing_fails_has_no_skill() -> None:
    """It is said so, and its gate stays closed."""
    found = Gathered()
    found.add("p", np.arange(40.0, 90), np.full((50, 3), 0.1), np.zeros(50), 0, np.inf, 400)

    assert skill(found.rows(), 50) is None
    line = row("sparse", "other people", found.rows())
    assert line is not None
    assert line["decides"]
    assert "none that fails" in list(markdown([line]))[-1]


def test_what_a_run_teaches_a_simple_tool_is_not_used_on_its_own_project() -> None:
    """A score that names the project tells nothing of it."""
    project = np.repeat([0, 1], 50)
    fails = project == 0
    chance = chance_elsewhere(project.astype(float), fails, np.ones(100), project)

    assert chance[fails].max() < 0.1


def test_each_chance_that_was_said_counts_once_in_the_calibration_error() -> None:
    """.4 said ten times of which none came, and .0 of ninety that did not."""
    p = np.repeat([0.4, 0.0], [10, 90])

    assert calibration_error(p, np.zeros(100, dtype=bool)) == pytest.approx(0.04)
    assert diagram(gathered("all").rows())[-1]["came"] == 1.0
    assert picture([("a <b>", diagram(gathered("all").rows()))], str).count("<circle") == 2
