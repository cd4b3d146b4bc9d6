"""The policy detectors together: what comes first in known failures, what stays silent through harmless events, and
what trainers' own names reach.
"""

import math
import random
from dataclasses import replace

import pytest
from shaped_runs import coarse, ramp

from rlwatch.alerts.rules import default_rules
from rlwatch.detectors.exploration.entropy import EntropyCollapse, EntropyExplosion
from rlwatch.detectors.exploration.entropy_budget import EntropyBudget
from rlwatch.detectors.exploration.entropy_sides import EntropySides
from rlwatch.detectors.rises import OffPolicyMask, RatioDrift, Staleness, WeightTail
from rlwatch.detectors.trust_region.clipping import ClipBlind, ClipSaturation
from rlwatch.detectors.trust_region.kl_estimator import KLEstimator
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.detectors.trust_region.ratio_growth import RatioGrowth
from rlwatch.diagnosis import advice
from rlwatch.monitor.engine import Monitor
from rlwatch.records import ClosedStep, Event, Severity, StepRecord
from rlwatch.testing.healthy_runs import healthy_run

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
    OffPolicyMask,
    Staleness,
)
RATIOS = (
    "ratio/clipfrac",
    "ratio/clipfrac_low",
    "ratio/clipfrac_high",
    "ratio/m2",
    "ratio/chi2",
    "ratio/log_var_growth",
)


def tapped(changes, *, length=300, every=1, seed=0):
    """A healthy run with everything taps record, some metrics multiplied: ``changes(step) -> {metric: factor}``."""
    rows = []
    for row in healthy_run(seed, length=length, taps=True):
        factors = changes(row.step)
        rows.append(replace(row, metrics={k: v * factors.get(k, 1.0) for k, v in row.metrics.items()}))
    return rows if every == 1 else coarse(rows, every)


def told(detectors, rows):
    """kind -> its first finding above info."""
    found = {}
    for row in rows:
        for detector in detectors:
            for finding in detector.update(row):
                if finding.severity is not Severity.INFO:
                    found.setdefault(finding.kind, finding)
    return found


def blip(step):
    """A learning rate five times too high for four steps."""
    return (
        dict.fromkeys((*RATIOS, "policy/kl_ref", "policy/kl_ref_k3", "optim/grad_norm"), 8.0)
        if 150 <= step < 154
        else {}
    )


def hard_data(step):
    """Three batches nobody can answer: less reward, longer and less certain."""
    factors = {"reward/mean": 0.4, "policy/entropy": 2.0, "policy/entropy_neg": 2.5, "policy/entropy_pos": 1.8}
    return factors | {"len/mean": 1.5} if step in (120, 121, 122, 200, 201) else {}


def spikes(step):
    """One row in twenty far out in every ratio."""
    return dict.fromkeys((*RATIOS, "ratio/p99", "staleness/max", "offpolicy/masked"), 20.0) if step % 20 == 7 else {}


def slow(step):
    """Everything grows by half over the run, as the policy learns."""
    return dict.fromkeys((*RATIOS, "offpolicy/masked", "staleness/mean", "policy/entropy_neg"), 1.0 + step / 600.0)


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize("event", [blip, hard_data, spikes, slow], ids=lambda event: event.__name__)
def test_harmless_events_raise_no_warning(event, every):
    """Of none of them, at any cadence."""
    for seed in range(2):
        assert told([make() for make in POLICY], tapped(event, every=every, seed=seed)) == {}


def test_a_reset_of_the_reference_raises_no_warning():
    """KL and its estimators fall to nothing and grow again."""
    rows = tapped(lambda s: {})
    detectors = [make() for make in POLICY]
    before = told(detectors, rows[:150])
    for detector in detectors:
        detector.notice(Event(kind="reference_reset", step=150))
    names = [name for name in rows[0].metrics if name.startswith("policy/kl_ref")]
    after = [
        replace(r, metrics=r.metrics | {n: r.metrics[n] * min((r.step - 150) / 100.0, 1.0) for n in names})
        for r in rows[150:]
    ]

    assert before == told(detectors, after) == {}


@pytest.mark.parametrize("lost", [1, 30, 80])
def test_a_resume_raises_no_warning(lost):
    """The run goes on from a checkpoint, with other batches."""
    detectors = [make() for make in POLICY]
    first, second = tapped(lambda s: {}), tapped(lambda s: {}, seed=1)

    assert told(detectors, first[:200]) == told(detectors, second[200 - lost :]) == {}


@pytest.mark.parametrize("every", [1, 5])
def test_stale_rollouts_are_told_in_the_order_they_act(every):
    """Versions first, then the mask that drops them, then the weights of what is left."""

    def ages(step):
        return {
            "staleness/mean": 1.0 + 5.0 * _grown(step, 100, 120),
            "offpolicy/masked": 1.0 + 40.0 * _grown(step, 140, 160),
            "ratio/ess": 1.0 - 0.8 * _grown(step, 180, 200),
            "ratio/m2": 1.0 + 60.0 * _grown(step, 180, 200),
        }

    found = told([make() for make in POLICY], tapped(ages, every=every))

    assert found["staleness"].onset_step < found["off_policy_mask"].onset_step < found["weight_tail"].onset_step
    assert found["staleness"].step < found["off_policy_mask"].step < found["weight_tail"].step
    assert {finding.severity for finding in found.values()} == {Severity.WARNING}


def _grown(step, start, end):
    return min(max((step - start) / (end - start), 0.0), 1.0)


def test_growth_on_negative_samples_is_told_before_the_explosion():
    """Both are warned of; the side that drives it first."""
    noise = random.Random(0)
    negative, whole = ramp(0.4, 3.0, 100, 260), ramp(0.35, 1.2, 160, 300)
    rows = [
        ClosedStep(
            step=s,
            metrics={
                "policy/entropy_neg": negative(s, noise),
                "policy/entropy_pos": 0.3 * math.exp(noise.gauss(0.0, 0.05)),
                "policy/entropy": whole(s, noise),
                "reward/mean": 0.6 - 0.4 * _grown(s, 230, 280) + noise.gauss(0.0, 0.02),
            },
        )
        for s in range(320)
    ]
    found = told([EntropySides(), EntropyExplosion()], rows)

    assert found["entropy_negative"].step < found["entropy_explosion"].step


def test_the_budget_is_told_before_entropy_has_collapsed():
    """The forecast is out while there is something left."""
    rows = [
        ClosedStep(step=s, metrics={"policy/entropy": h, "reward/mean": 0.6 - 0.2 * math.exp(h)})
        for s, h in ((s, 0.6 * math.exp(-0.02 * s)) for s in range(300))
    ]
    budget = EntropyBudget()
    first = next(f for row in rows for f in budget.update(row))
    found = told([EntropyBudget(), EntropyCollapse()], rows)

    assert first.step < found["entropy_budget"].step < found["entropy_collapse"].step
    gone = next(s for s, row in enumerate(rows) if row.metrics["policy/entropy"] <= 0.06)
    assert first.step + first.evidence["arrival_low"] - 10 <= gone <= first.step + first.evidence["arrival_high"] + 10


def monitored(records, source):
    """kind -> its first finding, through the names of a trainer; and what could not run."""
    monitor = Monitor(source=source)
    found = {}
    for outcome in [*(monitor.observe(record) for record in records), monitor.close()]:
        for finding in outcome.findings:
            found.setdefault(finding.kind, finding)
    return found, {part.name: part.reason for part in monitor.not_run()}


def records(curves, length=120):
    return [
        StepRecord(step=s, metrics={name: float(curve(s)) for name, curve in curves.items()}) for s in range(length)
    ]


def up(before, after, at=60):
    return lambda s: (before if s < at else after) * (1.0 + 0.01 * (s % 3))


@pytest.mark.parametrize(
    ("source", "name", "before", "after", "kind"),
    [
        ("trl/grpo", "clip_ratio/region_mean", 0.002, 0.3, "clip_saturation"),
        ("trl/grpo", "clip_ratio/low_mean", 0.001, 0.3, "clip_saturation"),
        ("verl", "actor/pg_clipfrac", 0.002, 0.3, "clip_saturation"),
        ("verl", "actor/pg_clipfrac_lower", 0.0001, 0.05, "clip_saturation"),
        ("openrlhf", "ppo_clip_ratio", 0.002, 0.3, "clip_saturation"),
        ("verl", "training/off_policy/trajectory_staleness/mean", 1.0, 6.0, "staleness"),
        ("verl", "training/off_policy/trajectory_staleness_worst/mean", 1.0, 8.0, "staleness"),
        ("verl", "training/off_policy/trajectory_spans/max", 1.0, 12.0, "staleness"),
        ("trl/grpo", "sample/staleness_mean", 1.0, 6.0, "staleness"),
        ("verl", "actor/kl_loss", 0.05, 7.0, "k3_saturation"),
    ],
)
def test_trainers_own_names_reach_the_detectors(source, name, before, after, kind):
    """As they are logged."""
    found, _ = monitored(records({name: up(before, after)}), source)

    assert found[kind].severity is Severity.WARNING
    assert found[kind].onset_step in (60, 61)


@pytest.mark.parametrize(
    ("source", "kl", "score"),
    [("verl", "actor/kl_loss", "val-core/openai/gsm8k/acc/mean@1"), ("trl/grpo", "kl", "eval_reward")],
)
def test_held_out_scores_are_read_under_the_names_of_the_trainer(source, kl, score):
    """Every tenth step; a reset is due once they have stalled."""
    rows = [StepRecord(step=s, metrics={kl: 0.4 * min(s / 60.0, 1.0), "reward": 0.5}) for s in range(260)]
    for row in rows[::10]:
        value = 0.3 + 0.3 * min(row.step / 100.0, 1.0) - 4e-4 * max(row.step - 100, 0)
        rows[row.step] = StepRecord(step=row.step, metrics={**row.metrics, score: value})
    found, _ = monitored(rows, source)

    assert found["reset_due"].step < 260


def test_what_is_missing_is_named():
    """A log of reward and loss alone: each detector that could not run says what it would have needed."""
    _, lacking = monitored(records({"reward": lambda s: 0.5, "loss": lambda s: 0.1}, length=20), "trl/grpo")

    for make in POLICY:
        assert lacking[make.name].startswith("needs ")
        assert lacking[make.name].endswith("which this run has not logged")
    assert "policy/entropy + reward/mean" in lacking["entropy_budget"]
    assert "policy/entropy_pos + policy/entropy_neg" in lacking["entropy_sides"]


RULES = {
    "entropy": ("entropy_budget", "entropy_negative", "entropy_positive"),
    "kl": (
        "k3_saturation",
        "k3_bias",
        "clip_saturation",
        "weight_tail",
        "ratio_drift",
        "ratio_length_growth",
    ),
    "reset-due": ("kl_saturation", "reset_due"),
    "mismatch": ("off_policy_mask", "staleness"),
}


def test_each_kind_is_grouped_with_its_family_and_has_advice():
    """What tells nobody (``clip_uninformative``) needs no rule of its own."""
    grouped = {kind for kinds in RULES.values() for kind in kinds}
    rules = {rule.name: rule.kinds for rule in default_rules()}

    assert grouped == {k for make in POLICY for k in make.kinds} - {"clip_uninformative", "kl_drift"}
    assert all(set(kinds) <= set(rules[name]) for name, kinds in RULES.items())
    assert all(advice(kind) is not None for make in POLICY for kind in make.kinds)


@pytest.mark.parametrize("make", POLICY, ids=lambda make: make.name)
def test_a_finding_holds_through_rows_that_measure_something_else(make):
    """At most ten; then nobody knows."""
    rows = tapped(lambda s: {"ratio/log_var_growth": 1e3, "staleness/mean": 9.0} if s >= 100 else {}, length=140)
    watch = make()
    last = [watch.update(row) for row in rows][-1]
    later = [watch.update(ClosedStep(step=141 + i, metrics={"time/step": 1.0})) for i in range(12)]

    assert [bool(found) for found in later] == [bool(last)] * 10 + [False] * 2
    assert all(f.step == 141 + i and f.onset_step <= 140 for i, found in enumerate(later) for f in found)


def test_findings_do_not_depend_on_the_order_of_metrics_in_a_row():
    """Logs of one run may be shuffled."""
    rows = tapped(lambda s: {"ratio/clipfrac": 100.0, "ratio/ess": 0.2} if s >= 100 else {}, length=160)
    turned = [replace(row, metrics=dict(reversed(row.metrics.items()))) for row in rows]

    for make in POLICY:
        left, right = make(), make()
        assert [left.update(row) for row in rows] == [right.update(row) for row in turned]
