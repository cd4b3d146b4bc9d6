"""Hits of the shipped forecaster beside their placebo."""

from forecast.unseen import Judged, line

from rlwatch.forecast.labels import Label, RunOutcome


def run(outcome, alarms, onset=None, end=400):
    """A run with a row every 10 steps."""
    return Judged(Label("run", outcome, onset), 10, end, alarms)


def test_hits_are_held_against_clean_runs_in_the_same_steps():
    """A hit is at most 100 steps early and two rows late; a clean run that ended before says nothing."""
    runs = [
        run(RunOutcome.EVENT, [220], onset=200),
        run(RunOutcome.EVENT, [90, 230], onset=200),
        run(RunOutcome.CLEAN, [150]),
        run(RunOutcome.CLEAN, [50]),
        run(RunOutcome.CLEAN, [150], end=190),
    ]

    assert line("10", runs) == "| 10 | 1 of 2 | 0.50 | 3 of 3 |"
