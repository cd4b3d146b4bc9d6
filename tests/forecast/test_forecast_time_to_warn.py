"""Failures that nobody could have warned of are counted apart from those that could be seen coming."""

from dataclasses import replace

import numpy as np
from forecast_runs import steady

from rlwatch.forecast.evaluation import Label, Labels, Outcome, ToolScores, evaluate
from rlwatch.forecast.evaluation.assembled import joined_tables, table_of_rows
from rlwatch.forecast.evaluation.pages import pages


def test_events_are_grouped_by_how_long_their_fault_was_there_before():
    """One fault 100 steps before the onset, one 5 before; of a third nobody knows."""
    names = ("slow", "sudden", "unknown", *(f"clean-{i}" for i in range(3)))
    table = table_of_rows({name: steady(220) for name in names})
    table = replace(table, faults=(60, 155, None, None, None, None))
    events = [Label(name, Outcome.EVENT, 160, "reward", 220) for name in names[:3]]
    labels = Labels("by hand", (*events, *(Label(name, Outcome.CLEAN, steps=220) for name in names[3:])))
    alarm = np.where((table.run_of == 0) & (table.step >= 110), 1.0, np.nan)

    found = evaluate(table, labels, [ToolScores("one", alarm, alarms_only=True)], split="none", draws=20).to_dict()

    groups = found["tools"][0]["groups"]["time to warn"]
    told = {name: (group["events"], group["forecast"]) for name, group in groups.items()}
    assert told == {"fault 20 or more steps before": (1, 1), "fault less than 20 steps before": (1, 0)}
    assert [page.title for page in pages(found)].count("By time to warn") == 1


def test_a_table_without_faults_has_no_such_groups():
    """And one joined to it keeps its own."""
    plain, known = table_of_rows({"a": steady(60)}), replace(table_of_rows({"b": steady(60)}), faults=(50,))
    assert joined_tables([plain, known]).faults == (None, 50)
    assert known.only([0]).faults == (50,)
    assert plain.only([0]).faults == ()
