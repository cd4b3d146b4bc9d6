"""The policy detectors on real public runs beside the repository, where they exist: counts by label, printed by hand.

Run as a script it prints how many runs of each label were told what: ``python test_policy_on_public_runs.py``.
"""

import csv
import gzip
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rlwatch.detectors.exploration.entropy_budget import EntropyBudget
from rlwatch.detectors.exploration.entropy_sides import EntropySides
from rlwatch.detectors.rises import OffPolicyMask, RatioDrift, Staleness, WeightTail
from rlwatch.detectors.trust_region.clipping import ClipBlind, ClipSaturation
from rlwatch.detectors.trust_region.kl_estimator import KLEstimator
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.detectors.trust_region.ratio_growth import RatioGrowth
from rlwatch.detectors.trust_region.reference_continuity import ReferenceContinuity
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep

HOME = Path(__file__).parents[3] / "shared" / "real_runs"
POLICY = (
    EntropyBudget,
    EntropySides,
    ClipSaturation,
    ClipBlind,
    WeightTail,
    RatioDrift,
    RatioGrowth,
    KLReference,
    KLEstimator,
    ReferenceContinuity,
    OffPolicyMask,
    Staleness,
)


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
    read = ((step, canonicalise(metrics, source)) for step, metrics in rows.items())
    return [ClosedStep(step=step, metrics=values, origin=origin) for step, (values, origin) in read]


def said(rows):
    """(detector, severity) of everything that was ever said, and which detectors had their inputs."""
    told, ran = set(), set()
    seen = {name for row in rows for name in row.metrics}
    for make in POLICY:
        if any(set(option) <= seen for option in make.requires):
            ran.add(make.name)
        watch = make()
        told |= {(make.name, finding.severity.value) for row in rows for finding in watch.update(row)}
    return told, ran


def counted():
    """(detector, severity, label) -> runs, with "ran" for severity where it had its inputs; label -> runs."""
    counts, labels = Counter(), Counter()
    for label, rows in runs():
        labels[label] += 1
        told, ran = said(rows)
        counts.update((name, severity, label) for name, severity in told)
        counts.update((name, "ran", label) for name in ran)
    return counts, labels


def table(counts, labels):
    """Lines of the table people read."""
    heads = [f"{label} ({labels[label]})" for label in sorted(labels)]
    yield f"{'detector':22}{'':10}" + "".join(f"{head:>18}" for head in heads)
    for make in POLICY:
        for severity in ("ran", "info", "warning", "critical"):
            row = [counts[make.name, severity, label] for label in sorted(labels)]
            yield f"{make.name:22}{severity:10}" + "".join(f"{count:>18}" for count in row)


def test_policy_detectors_on_public_runs_when_present():
    """Healthy runs: nothing critical, and a warning on at most one in twenty of those with the detector's inputs."""
    if not HOME.is_dir():
        warnings.warn(f"policy detectors were NOT judged on public runs: {HOME} does not exist", stacklevel=1)
        pytest.skip(f"the public runs are not here: {HOME} does not exist")
    counts, _ = counted()

    assert {name for name, severity, label in counts if severity == "critical" and label == "healthy"} == set()
    for make in POLICY:
        ran, warned = (counts[make.name, what, "healthy"] for what in ("ran", "warning"))
        assert warned <= max(1, ran // 20), make.name


if __name__ == "__main__":
    print("\n".join(table(*counted())))  # noqa: T201
