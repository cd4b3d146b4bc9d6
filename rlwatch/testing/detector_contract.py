"""Contract of every detector; subclass :class:`DetectorContract` with a ``make`` fixture to test yours.

Needs pytest and hypothesis (the ``dev`` extra).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.catalogue import entry
from rlwatch.metrics import BY_NAME, OPEN, Family
from rlwatch.ports import Detector
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.testing.healthy_runs import (
    EMPTY,
    HELD_OUT,
    ROLLOUTS_BROKEN,
    VANISHES,
    engine_broken,
    healthy_run,
    machine_broken,
)

Make = Callable[[], Detector]
LAYERS = 6
"""Number of layers whose gradient norms the simulated runs have."""
TAPS_BROKEN = {
    "policy/entropy_neg": 10.0,
    "ratio/clipfrac": 200.0,
    "ratio/max": 20.0,
    "ratio/p99": 10.0,
    "ratio/m2": 100.0,
    "ratio/ess": 0.05,
    "ratio/geo_mean": 1.5,
    "ratio/product_ess": 0.01,
    "ratio/log_var_growth": 1e5,
    "policy/kl_ref_k1": -200.0,
    "policy/kl_ref_saturated": 1e4,
    "offpolicy/masked": 50.0,
    "offpolicy/masked_neg": 40.0,
    "staleness/mean": 8.0,
    "staleness/max": 8.0,
    "staleness/updates": 100.0,
    "ratio/router_layer_frac": 20.0,
}
"""Factors by which :func:`broken_run` multiplies metrics that need per-token tensors."""
EVENT_KINDS = (
    "reference_reset",
    "reference_restored",
    "reference_not_restored",
    "resume",
    "rollback",
    "exception",
    "signal",
    "command",
    "note",
    "unheard-of",
)

# Any float at all, with the ones that matter made likely.
values = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324]),
    st.floats(min_value=0.0, max_value=2.0),
)


def metric_names(detector: Detector) -> list[str]:
    """Return the metrics that a detector requires or reads if present, and a few others, sorted."""
    asked = {*(name for option in detector.requires for name in option), *getattr(detector, "reads", ())}
    own = {name for one in asked for name in _members(one)}
    return sorted(own | {"reward/mean", "reward/zero_std_frac", "optim/grad_norm", "policy/vocab_size"})


def _members(name: str) -> list[str]:
    """Return the metric, or some members of an open family."""
    return [f"{name}layers.{i}" for i in range(LAYERS)] if name.endswith("/") else [name]


def streams(detector: Detector, max_size: int = 40) -> st.SearchStrategy[list[ClosedStep]]:
    """Return a Hypothesis strategy for runs of a detector's metrics: rows with increasing steps, any gaps and any
    missing metrics.

    ``max_size``: largest number of rows.
    """
    metrics = st.dictionaries(st.sampled_from(metric_names(detector)), values, max_size=6)
    rows = st.lists(st.tuples(st.integers(1, 20), metrics), max_size=max_size)
    return rows.map(_closed)


def _closed(rows: Sequence[tuple[int, dict[str, float]]]) -> list[ClosedStep]:
    step, closed = 0, []
    for seq, (gap, metrics) in enumerate(rows, start=1):
        step += gap
        closed.append(ClosedStep(step=step, metrics=metrics, seq=seq))
    return closed


def outputs(detector: Detector, stream: Sequence[ClosedStep]) -> list[list[Finding]]:
    """Return the findings that a detector reports for ``stream``: one list for each row, empty where it reports
    nothing.
    """
    return [detector.update(step) for step in stream]


@cache
def broken_run(seed: int = 0, length: int = 230, at: int = 60) -> tuple[ClosedStep, ...]:
    """Return the rows of a run that is healthy until step ``at`` and then fails in many ways, so that detectors have
    findings.

    Held-out scores fall first. At ``at`` the entropy explodes, and 40 steps on it collapses, while KL to the reference
    and the reward fall to nothing. ``length``: number of rows. Calls with equal arguments return one cached run.
    """
    return tuple(
        _gamed(row, at) if row.step < at else replace(row, metrics=_broken(row, row.step - at))
        for row in whole_run(seed, length)
    )


def broken_runs() -> tuple[tuple[ClosedStep, ...], ...]:
    """Return two runs, broken in the middle and by the first updates: every detector has a finding in one of them."""
    return broken_run(), broken_run(at=3)


@cache
def whole_run(seed: int = 0, length: int = 300, every: int = 1) -> tuple[ClosedStep, ...]:
    """Return a healthy run with all metrics, logged every ``every`` steps; made once and shared by all tests.

    ``length``: number of steps.
    """
    return tuple(healthy_run(seed, length=length, every=every, layers=LAYERS, taps=True))


@cache
def _plain_run(length: int = 40) -> tuple[ClosedStep, ...]:
    return tuple(healthy_run(length=length))


@cache
def _later_run(length: int = 2000) -> tuple[ClosedStep, ...]:
    return tuple(replace(row, step=row.step + length) for row in whole_run(1, length=length))


def _gamed(row: ClosedStep, at: int) -> ClosedStep:
    return replace(row, metrics={**row.metrics, HELD_OUT: 0.5 if row.step < at - 35 else 0.1})


def _broken(row: ClosedStep, since: int) -> dict[str, float]:
    explodes = since < 40
    factors = {
        "policy/entropy": 10.0 if explodes else 1e-4,
        "policy/kl_ref": 200.0 if explodes else 0.0,
        "policy/kl_ref_k3": 200.0 if explodes else 0.0,
        "optim/grad_norm": 300.0,
        "reward/mean": 0.01 if explodes else 0.0,
        **TAPS_BROKEN,
        **ROLLOUTS_BROKEN,
    }
    worse = {name: value * factors.get(name, 1.0) for name, value in row.metrics.items() if name != VANISHES}
    worse |= {name: value * 200.0 for name, value in worse.items() if name.startswith("mismatch/")}
    worse["grad_layer/layers.1"] *= 200.0
    worse |= engine_broken(row.metrics, seen=explodes) | machine_broken(row.metrics, since)
    return worse | EMPTY | {"reward/zero_std_frac": 1.0, "len/clipped": 1.0, "loss/policy": math.nan}


def check_finding(detector: Detector, finding: Finding, step: ClosedStep) -> None:
    """Fail unless a finding is well formed for the row ``step``.

    It must have its detector's name, a declared kind, a severity that the catalogue permits, an onset that is not in
    the future, and numbers that JSON can hold.
    """
    assert finding.detector == detector.name
    assert finding.kind in detector.kinds
    assert finding.family == detector.family
    assert finding.severity in Severity
    assert finding.severity.rank <= entry(finding.kind).severity.rank, "worse than in the catalogue"
    assert finding.step == step.step
    assert finding.onset_step <= finding.step
    assert (finding.attempt, finding.seq) == (step.attempt, step.seq)
    assert finding.message
    assert finding.score is None or (math.isfinite(finding.score) and finding.score >= 1.0)
    assert finding.baseline is None or math.isfinite(finding.baseline)
    assert all(math.isfinite(v) for v in finding.evidence.values() if isinstance(v, float))


class DetectorContract:
    """Tests that every detector must pass. The fixture ``make`` returns a function that builds a fresh detector."""

    @pytest.fixture
    def make(self) -> Make:
        """Return a function that builds the detector under test; subclasses override this fixture."""
        raise NotImplementedError

    def test_declares_who_it_is(self, make: Make) -> None:
        """Check that name, family, kinds and required metrics are known to the catalogue and the metrics table."""
        detector = make()

        assert detector.name
        assert detector.kinds
        assert detector.family in {family.value for family in Family}
        assert detector.requires
        assert {name for option in detector.requires for name in option} <= {*BY_NAME, *(row.name for row in OPEN)}

    def test_a_prefix_of_the_run_gives_a_prefix_of_the_findings(self, make: Make) -> None:
        """Check that the detector is causal: later rows do not change earlier findings."""

        @settings(max_examples=10, deadline=None)
        @given(stream=streams(make()), cut=st.integers(0, 40))
        def check(stream: list[ClosedStep], cut: int) -> None:
            assert _same(outputs(make(), stream[:cut]), outputs(make(), stream)[:cut])

        check()

    def test_the_same_run_gives_the_same_findings(self, make: Make) -> None:
        """Check that the detector is deterministic, also while another instance runs."""
        for run in broken_runs():
            first, second = make(), make()
            together = [(first.update(row), second.update(row)) for row in run]

            assert _same([a for a, _ in together], [b for _, b in together])
            assert _same([a for a, _ in together], outputs(make(), run))

    def test_no_floats_make_it_raise(self, make: Make) -> None:
        """Check that NaN, infinite, huge, tiny and missing values give well-formed findings or none, and no
        exception.
        """

        @settings(max_examples=25, deadline=None)
        @given(stream=streams(make()))
        def check(stream: list[ClosedStep]) -> None:
            detector = make()
            for row in stream:
                for finding in [*detector.arrival(row), *detector.update(row)]:
                    check_finding(detector, finding, row)

        check()

    def test_steps_may_repeat_and_go_back(self, make: Make) -> None:
        """Check that a resumed run, whose steps go back, raises nothing and gives no onset in the future."""
        detector = make()

        for row in [*broken_run(length=100), *broken_run(length=80), *broken_run(length=80)[40:]]:
            for finding in detector.update(row):
                check_finding(detector, finding, row)

    def test_memory_does_not_grow_with_the_run(self, make: Make) -> None:
        """Check that twice as many rows leave the size of the detector's state the same."""
        detector = make()
        outputs(detector, whole_run(length=2000))
        size = len(pickle.dumps(detector))
        outputs(detector, _later_run(length=2000))

        assert len(pickle.dumps(detector)) <= 1.05 * size + 200

    @pytest.mark.parametrize("every", [1, 5, 10])
    @pytest.mark.parametrize("seed", range(4))
    def test_is_silent_on_a_healthy_run(self, make: Make, seed: int, every: int) -> None:
        """Check that a healthy run gives no finding above ``info``, at any logging interval."""
        findings = [f for per_row in outputs(make(), whole_run(seed, 600, every)) for f in per_row]

        assert [f for f in findings if f.severity is not Severity.INFO] == []

    def test_a_constant_run_raises_no_critical_alarm(self, make: Make) -> None:
        """Check that metrics that never change, as from a stuck logger, give no critical finding."""
        row = whole_run()[0]
        findings = outputs(make(), [replace(row, step=step) for step in range(200)])

        assert [f for per_row in findings for f in per_row if f.severity is Severity.CRITICAL] == []

    def test_arrival_does_not_change_the_findings_of_update(self, make: Make) -> None:
        """Check that calls of ``arrival`` (for a single row, before its step closes) do not change what ``update``
        reports for closed steps.
        """
        for run in broken_runs():
            eager = make()
            findings = []
            for row in run:
                for _ in range(2):
                    eager.arrival(row)
                findings.append(eager.update(row))

            assert _same(findings, outputs(make(), run))

    @pytest.mark.parametrize("kind", EVENT_KINDS)
    def test_any_event_is_accepted(self, make: Make, kind: str) -> None:
        """Check that any event, known or not, is accepted before the first row and in the middle, without a finding."""
        detector = make()
        detector.notice(Event(kind=kind))
        outputs(detector, _plain_run())
        detector.notice(Event(kind=kind, step=40, body={"optimizer": "clear"}))

        assert outputs(detector, _plain_run())[-1] == []

    def test_rows_without_its_metrics_are_silent(self, make: Make) -> None:
        """Check that rows without the detector's metrics give no findings."""
        assert outputs(make(), [ClosedStep(step=i, metrics={"time/step": 1.0}) for i in range(50)]) == [[]] * 50


def _same(left: list[list[Finding]], right: list[list[Finding]]) -> bool:
    # repr: NaN in evidence counts would never equal itself.
    return repr(left) == repr(right)
