"""Detectors of rewards, rollouts and times on real public runs, where they exist (never copied: some have no licence)."""

from collections import Counter

import pytest
from test_public_runs_when_present import HOME, labelled

from rlwatch.detectors.exploration.diversity_decay import DiversityDecay
from rlwatch.detectors.reward.reward_constant import RewardConstant
from rlwatch.detectors.reward.reward_hacking import RewardHacking
from rlwatch.detectors.reward.silent_groups import ZeroVariance
from rlwatch.detectors.rises import Repetition
from rlwatch.detectors.rollouts.lengths import LengthCollapse, LengthSurge, LongTail
from rlwatch.detectors.system import MetricVanished, StalledSteps, ThroughputDrop
from rlwatch.metrics import canonicalise
from rlwatch.records import ClosedStep, Severity

OURS = (
    RewardConstant,
    RewardHacking,
    ZeroVariance,
    DiversityDecay,
    Repetition,
    LengthSurge,
    LengthCollapse,
    LongTail,
    ThroughputDrop,
    StalledSteps,
    MetricVanished,
)


def judged():
    """(label, detector name, severities said) of each run and detector."""
    for info, rows in labelled():
        source = "verl" if info["framework"] == "verl" else "trl/grpo"
        closed = [ClosedStep(step=step, metrics=canonicalise(metrics, source)[0]) for step, metrics in rows.items()]
        for make in OURS:
            detector = make()
            yield info["severity"], detector.name, {f.severity for row in closed for f in detector.update(row)}


def test_public_runs_when_present(record_property):
    """Healthy runs: no critical finding, and a warning in one of twenty at most; the figures are in the test report."""
    if not HOME.is_dir():
        pytest.skip(f"the public runs are not here: {HOME} does not exist")
    told, labels = Counter(), Counter(info["severity"] for info, _ in labelled())
    for label, name, said in judged():
        told.update((name, severity.value, label) for severity in said)
    for (name, severity, label), runs in sorted(told.items()):
        record_property(f"{name}, {severity}, {label}", f"{runs} of {labels[label]} runs")

    calm = [key for key in told if key[1] == "critical" and key[2] in ("healthy", "transient")]
    warned = sum(runs for key, runs in told.items() if key[1:] == (Severity.WARNING.value, "healthy"))
    seen = sum(runs for key, runs in told.items() if key[1:] == (Severity.WARNING.value, "instability"))
    assert calm == []
    assert warned <= labels["healthy"] // 20
    assert seen >= 4
