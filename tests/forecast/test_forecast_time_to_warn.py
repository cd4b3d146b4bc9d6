"""Failures that nobody could have warned of are counted apart from those that could be seen coming."""

from dataclasses import replace

import numpy as np
from forecast.scoring.pages import pages
from forecast.scoring.scorer import evaluate
from forecast.scoring.skill import ToolScores
from forecast_runs import steady

from rlwatch.forecast.labels import Label, Labels, RunOutcome
from rlwatch.forecast.tables import joined_tables, table_of_rows


def test_events_are_grouped_by_how_long_their_fault_was_there_before():
    """One fault 100 steps before the onset, one 5 before, one that strikes at random; of a fourth nobody knows."""
    names = ("slow", "sudden", "random", "unknown", *(f"clean-{i}" for i in range(3)))
    table = table_of_rows({name: steady(220) for name in names})
    table = replace(table, faults=(60, 155, 70, *[None] * 4), at_once=(False, False, True, *[False] * 4))
    events = [Label(name, RunOutcome.EVENT, 160, "reward", 220) for name in names[:4]]
    labels = Labels("by hand", (*events, *(Label(name, RunOutcome.CLEAN, steps=220) for name in names[4:])))
    alarm = np.where((table.run_of == 0) & (table.step >= 110), 1.0, np.nan)

    found = evaluate(table, labels, [ToolScores("one", alarm, alarms_only=True)], split="none", draws=20).to_dict()

    groups = found["tools"][0]["groups"]["time to warn"]
    told = {name: (group["events"], group["forecast"]) for name, group in groups.items()}
    assert told == {
        "built up over 20 steps or more": (1, 1),
        "fault less than 20 steps before": (1, 0),
        "of a kind that comes at once": (1, 0),
    }
    point = found["tools"][0]["headline"]
    assert (point["events"], point["built_up"], point["built_up_forecast"]) == (4, 1, 1)
    assert [page.title for page in pages(found)].count("By time to warn") == 1


def test_a_table_without_faults_has_no_such_groups():
    """And one joined to it keeps its own."""
    plain = table_of_rows({"a": steady(60)})
    known = replace(table_of_rows({"b": steady(60)}), faults=(50,), at_once=(True,))
    both = joined_tables([plain, known])
    assert (both.faults, both.at_once) == ((None, 50), (False, True))
    assert (known.only([0]).faults, known.only([0]).at_once) == ((50,), (True,))
    assert (plain.only([0]).faults, plain.only([0]).at_once) == ((), ())
