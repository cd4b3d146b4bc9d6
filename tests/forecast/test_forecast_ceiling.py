"""The ceiling: what a tool scores that is told of each fault when it begins."""

from dataclasses import replace

import numpy as np
import pytest
from forecast.scoring.baselines import CEILING, LATER, ceilings
from forecast.scoring.scorer import evaluate
from forecast_small_tables import fleet

ONSETS = (200, 220, 240, None, None, None)


def table_with(faults):
    table, labels = fleet(ONSETS)
    return replace(table, faults=tuple(faults)), labels


def test_it_knows_the_onset_from_the_step_on_at_which_the_fault_begins():
    """Not before, not earlier than 100 steps ahead, and of sound runs it says nothing."""
    table, labels = table_with([150, 90, None, None, 120, None])
    score = ceilings(table, labels)[0].score

    first = [np.flatnonzero(score[table.rows(i)])[:1].tolist() for i in range(6)]
    assert first == [[150], [120], [140], [], [], []]
    assert score[table.rows(0)][150:201].tolist() == list(map(float, range(51, 102)))


def test_it_forecasts_what_has_begun_and_alarms_falsely_nowhere():
    """Of three failures one begins three steps before the onset: nobody can forecast that one, only detect it."""
    table, labels = table_with([150, 90, 237, None, None, None])
    made = evaluate(table, labels, ceilings(table, labels), draws=20).to_dict()
    told = next(tool for tool in made["tools"] if tool["name"] == CEILING)

    assert (told["headline"]["forecast"], told["headline"]["detected"], told["headline"]["events"]) == (2, 3, 3)
    assert told["headline"]["per_1000"] == 0.0
    assert told["headline"]["clean_alarmed"] == 0
    assert 0.5 < told["skill"]["50"]["auroc"] < 1.0


def test_told_five_steps_later_it_misses_what_breaks_a_run_within_ten():
    """The fault of step 233 breaks the run at 240: an alarm must come by 235, and nothing is known before 238."""
    table, labels = table_with([150, 90, 233, None, None, None])
    made = evaluate(table, labels, ceilings(table, labels), draws=20).to_dict()
    forecast = {tool["name"]: tool["headline"]["forecast"] for tool in made["tools"]}

    assert forecast == {CEILING: 3, LATER: 2}


@pytest.mark.parametrize("faults", [(), (None,) * 6])
def test_where_no_fault_is_recorded_there_is_no_ceiling(faults):
    """Runs of others."""
    table, labels = table_with(faults)
    assert ceilings(table, labels) == []
