"""The forecaster in logs of every 1 to 20 steps: what it says of the same runs, and how much later.

An alarm is in time if it comes at most ten steps or two rows after that in a log of every step. Figures are of the
sample of the corpus, which the shipped model was trained on: `python -m benchmarks.forecast cadence` makes them.
"""

import pytest
from forecast import artefacts, cadence

from rlwatch.forecast.examples import LogCadence
from rlwatch.forecast.labels import RunOutcome, label_runs
from rlwatch.forecast.tables import read_runs

SETTINGS = [(every, how) for every in cadence.CADENCES[1:] for how in cadence.WAYS]
IN_TIME = {2: 32, 5: 27, 10: 30, 20: 31}
"""Of 39 failures that build up and are warned of in a log of every step: so many in time, and no more. Windows have a
least number of rows, and the thresholds are those of fine logs: here is the gap."""
NEWLY = 1
"""Sound runs of 49 without an alarm in a log of every step that have one in some coarse log."""


@pytest.fixture(scope="module")
def table():
    return read_runs(artefacts.SAMPLE)


def some(table, outcome, count=None):
    """The first failures that build up, or the first sound runs, at all cadences."""
    labels = label_runs(table).of(table)
    gradual = [not at_once and fault is not None for at_once, fault in zip(table.at_once, table.faults, strict=True)]
    fits = [
        i
        for i, label in enumerate(labels)
        if label.outcome is outcome
        and (outcome is RunOutcome.CLEAN or (gradual[i] and label.onset - table.fault[i] >= cadence.BUILT_UP))
    ]
    places = fits[:count]
    return cadence.judged_runs(table.only(places), [labels[i] for i in places])


def test_rows_are_the_mean_of_a_window_or_the_last_of_it():
    """Of the same steps either way."""
    rows = [(step, {"policy/entropy": float(step)}) for step in range(10)]

    assert LogCadence(1).of(rows) == rows
    assert LogCadence(5).of(rows) == [(4, {"policy/entropy": 2.0}), (9, {"policy/entropy": 7.0})]
    assert LogCadence(5, last=True).of(rows) == [(4, {"policy/entropy": 4.0}), (9, {"policy/entropy": 9.0})]


def test_sound_runs_stay_quiet_in_coarse_logs(table):
    """Four of the first: none that is quiet in a log of every step is warned of in a coarser one."""
    runs = some(table, RunOutcome.CLEAN, 4)

    assert [cadence.figures(runs, *setting)["newly alarmed"][0] for setting in SETTINGS] == [0] * len(SETTINGS)


def test_a_failure_that_builds_up_is_warned_of_in_time_at_two_steps_a_row(table):
    """Three of the first, all warned of in a log of every step: at least two of them in time."""
    runs = some(table, RunOutcome.EVENT, 3)

    for how in cadence.WAYS:
        kept, fine = cadence.figures(runs, 2, how)["in time"]
        assert fine == 3
        assert kept >= 2


@pytest.mark.thorough
def test_the_gap_of_coarse_logs_is_what_it_is_said_to_be(table):
    """On the whole sample: no fewer in time than the figures, no more sound runs alarmed."""
    failing, clean = some(table, RunOutcome.EVENT), some(table, RunOutcome.CLEAN)

    for every, how in SETTINGS:
        assert cadence.figures(failing, every, how)["in time"][0] >= IN_TIME[every]
        assert cadence.figures(clean, every, how)["newly alarmed"][0] <= NEWLY
