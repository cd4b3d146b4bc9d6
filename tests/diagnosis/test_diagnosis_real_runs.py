"""What is said of real public runs (skipped where ../shared/real_runs is absent): the labelled failure, or nothing sure."""

import csv
import gzip
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from rlwatch.records import StepRecord
from rlwatch.scanner import scan

RUNS = Path(__file__).parents[3] / "shared" / "real_runs"
if not (RUNS / "runs.csv.gz").exists():
    pytest.skip(f"{RUNS} is absent: the diagnosis of real runs is NOT checked here", allow_module_level=True)

INDEX = {row["run_id"]: row for row in csv.DictReader((RUNS / "index.csv").open())}
EXPECTED = {
    "no-signal": {"no_signal", "zero_variance", "reward_constant", "kl_drift"},
    "zero-variance": {"no_signal", "zero_variance", "reward_constant"},
    "KL": {"kl_drift", "kl_saturation", "grad_spike"},
    "entropy collapse": {"entropy_collapse"},
    "length explosion": {"length_explosion"},
}
"""By the first words of the label: kinds the first cause may begin with."""


@cache
def rows() -> dict[str, dict[int, dict[str, float]]]:
    """Metrics by run and step; an empty cell was not measured."""
    runs: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with gzip.open(RUNS / "runs.csv.gz", "rt") as lines:
        for row in csv.DictReader(lines):
            if row["value"]:
                runs[row["run_id"]][int(float(row["step"]))][row["metric"]] = float(row["value"])
    return runs


def diagnosis(run):
    source = "verl" if INDEX[run]["framework"] == "verl" else "trl/grpo"
    return scan([StepRecord(step, metrics) for step, metrics in sorted(rows()[run].items())], source=source).diagnosis


@pytest.mark.parametrize("run", [run for run, row in INDEX.items() if row["severity"] in ("instability", "dead")])
def test_the_first_cause_is_the_labelled_failure(run):
    """Of an unstable or dead run."""
    said = diagnosis(run)
    kinds = next(kinds for words, kinds in EXPECTED.items() if INDEX[run]["label"].startswith(words))

    assert said.causes, INDEX[run]["label"]
    shown = {said.causes[0].kind, *said.causes[0].symptoms}
    assert shown & kinds, (INDEX[run]["label"], said.causes[0].summary)


def test_healthy_runs_are_rarely_given_a_cause():
    """At most one in twenty is told a cause that claims to be more than a guess."""
    healthy = [run for run, row in INDEX.items() if row["severity"] == "healthy"]
    named = {run: said.summary for run in healthy if (said := diagnosis(run)).enough}

    assert len(named) <= len(healthy) / 20, named
