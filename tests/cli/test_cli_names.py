"""``rlwatch names``: the table, and how single names are read."""

from __future__ import annotations

import json

from cli_helpers import Invoke

from rlwatch.metrics import OPEN, TABLE


def test_the_whole_table_is_listed(invoke: Invoke):
    """Every metric with its unit, range and meaning, by family, and what trainers call it."""
    listed = invoke("names").stdout

    assert all(metric.name in listed for metric in (*TABLE, *OPEN))
    assert "verl: actor/entropy" in listed or "actor/entropy" in listed
    assert len(json.loads(invoke("names", "--format", "json").stdout)) == len(TABLE) + len(OPEN)


def test_names_are_read_as_a_log_of_the_trainer_would_be(invoke: Invoke):
    """Known, seen with a reason, unknown with what is close to it."""
    told = invoke("names", "actor/entropy", "timing_s/gen", "actor/entorpy", "--source", "verl", "--format", "json")
    known, seen, unknown = json.loads(told.stdout)

    assert known == {
        "name": "actor/entropy", "metric": "policy/entropy", "how": "the same quantity, in runs of verl", "known": True
    }  # fmt: skip
    assert seen["known"]
    assert seen["how"] == "recognised, not used: speed"
    assert not unknown["known"]
    assert "close to it: actor/entropy" in unknown["how"]
    assert told.exit_code == 1
    assert invoke("names", "actor/entropy", "--source", "verl").exit_code == 0


def test_metrics_are_found_by_what_they_mean(invoke: Invoke):
    """Or that there is none."""
    assert "ratio/ess" in invoke("names", "--find", "effective sample").stdout
    assert "no metric has 'qqq'" in invoke("names", "--find", "qqq").stdout
