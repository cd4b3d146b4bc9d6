"""The engine and data detectors on real public runs beside the repository, where they exist.

Run as a script it prints how many runs of each label were told what: ``python test_engine_on_public_runs.py``.
"""

import csv
import gzip
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

from rlwatch.detectors.exploration.likelihood_displacement import LikelihoodDisplacement
from rlwatch.detectors.mismatch.mismatch_growth import MismatchBlind, MismatchCorrelation, MismatchGrowth, MismatchLevel
from rlwatch.detectors.mismatch.mismatch_mask import MismatchMask
from rlwatch.detectors.optimisation.nonfinite import NonFinite
from rlwatch.detectors.optimisation.silent_freeze import SilentFreeze
from rlwatch.detectors.rises import MismatchTail, MoEImbalance, RoutingMismatch
from rlwatch.detectors.rollouts.broken_output import DegenerateBatch, GarbledOutput, Id0Run
from rlwatch.detectors.rollouts.token_ids import MaskLeakage, Retokenisation
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep

HOME = Path(__file__).parents[3] / "shared" / "real_runs"
ENGINE = (
    NonFinite,
    SilentFreeze,
    Id0Run,
    DegenerateBatch,
    GarbledOutput,
    MismatchGrowth,
    MismatchLevel,
    MismatchTail,
    MismatchCorrelation,
    MismatchMask,
    MismatchBlind,
    MoEImbalance,
    RoutingMismatch,
    Retokenisation,
    MaskLeakage,
    LikelihoodDisplacement,
)


@cache
def runs():
    """(label, closed steps) of each run, in file order."""
    rows = defaultdict(lambda: defaultdict(dict))
    with gzip.open(HOME / "runs.csv.gz", "rt") as file:
        for line in csv.DictReader(file):
            if line["step"] and line["value"]:
                rows[line["run_id"]][int(float(line["step"]))][line["metric"]] = float(line["value"])
    with (HOME / "index.csv").open() as file:
        return [(info["severity"], _closed(info, rows[info["run_id"]])) for info in csv.DictReader(file)]


def _closed(info, rows):
    source = "verl" if info["framework"] == "verl" else "trl/grpo"
    return [ClosedStep(step=step, metrics=canonicalise(metrics, source)[0]) for step, metrics in rows.items()]


def worst(detector, rows):
    """``critical``, ``warning`` or nothing."""
    said = {finding.severity.value for row in rows for finding in detector.update(row)}
    return next((severity for severity in ("critical", "warning") if severity in said), "")


def counts(detector):
    """(label, severity) -> runs, of those with the metrics it needs; how many those are under (label, "ran")."""
    told = Counter()
    for label, rows in runs():
        logged = {name for row in rows for name in row.metrics}
        if any(logged.issuperset(option) for option in detector.requires):
            told[label, "ran"] += 1
            told[label, worst(detector(), rows)] += 1
    return told


@pytest.mark.parametrize("detector", ENGINE, ids=lambda one: one.name)
def test_engine_detectors_on_public_runs_when_present(detector):
    """Nothing critical on runs that were well or got well, and a warning on one in ten of them at most."""
    if not HOME.is_dir():
        pytest.skip(f"the public runs are not here: {HOME} does not exist")
    told = counts(detector)
    well = [label for label in ("healthy", "transient") if told[label, "ran"]]

    assert [label for label in well if told[label, "critical"]] == []
    assert sum(told[label, "warning"] for label in well) <= 0.1 * sum(told[label, "ran"] for label in well)


if __name__ == "__main__":
    for one in ENGINE:
        found = [f"{label} {what} {n}" for (label, what), n in sorted(counts(one).items()) if what]
        print(f"{one.name:26}", ", ".join(found) or "not run")  # noqa: T201
