"""A reference that moved without anybody saying so, read from KL alone."""

import math
from dataclasses import replace

import pytest
from exact_runs import exact
from shaped_runs import coarse, findings, run

from rlwatch.detectors.trust_region.reference_continuity import REPORT_ROWS, ReferenceContinuity
from rlwatch.monitor.engine import Monitor
from rlwatch.records import ClosedStep, Event, Severity, StepRecord
from rlwatch.testing.healthy_runs import healthy_run

KL = "policy/kl_ref"


def grown(step, since=0, rate=0.002):
    """KL grows by ``rate`` a step from the step at which policy and reference were one."""
    return max(step - since, 0) * rate


def reset_at(at):
    """A curve: KL that grows to 0.2, falls to nothing and grows again."""
    return lambda step: grown(step, 0 if step <= at else at + 1)


def said(detector, rows):
    """(kind, step of the first time, onset) of what is said."""
    first = {}
    for finding in findings(detector, rows):
        first.setdefault(finding.kind, (finding.kind, finding.step, finding.onset_step))
    return list(first.values())


def told(detector, rows, *events):
    """The same, with events noticed as a live run notices them: after the record, before its step closes."""
    found = {}
    for row in rows:
        for event in events:
            if event.step == row.step:
                detector.notice(event)
        for finding in detector.update(row):
            found.setdefault(finding.kind, (finding.kind, finding.step, finding.onset_step))
    return list(found.values())


def test_a_fall_to_nothing_is_a_silent_reset():
    """Two rows later, dated back to the first row that was low; a warning, with the level it fell from."""
    rows = exact({KL: reset_at(100)}, length=140)
    (first, *_) = findings(ReferenceContinuity(), rows)

    assert said(ReferenceContinuity(), rows) == [("silent_reference_reset", 103, 101)]
    assert first.severity is Severity.WARNING
    assert first.metric == KL
    assert first.baseline == pytest.approx(0.181, abs=0.01)
    assert "fell from 0.18" in first.message
    assert "at step 101" in first.message


def test_it_is_said_for_some_rows_and_no_longer():
    """An event, not a state."""
    rows = exact({KL: reset_at(100)}, length=200)
    assert [finding.step for finding in findings(ReferenceContinuity(), rows)] == list(range(103, 103 + REPORT_ROWS))


def test_an_announced_reset_is_none():
    """Whether the event comes before or with the last high row, or while the fall is being confirmed."""
    rows = exact({KL: reset_at(100)}, length=140)
    for step in (100, 101):
        assert told(ReferenceContinuity(), rows, Event("reference_reset", step)) == []
    late = ReferenceContinuity()
    assert findings(late, rows[:102]) == []
    late.notice(Event("reference_reset", 100))
    assert findings(late, rows[102:]) == []
    timeless = ReferenceContinuity()
    findings(timeless, rows[:101])
    timeless.notice(Event("reference_reset"))
    assert findings(timeless, rows[101:]) == []


def test_an_announced_reset_explains_no_later_fall():
    """Each reset explains one."""
    rows = exact({KL: lambda s: grown(s, 0 if s <= 100 else 101 if s <= 200 else 201)}, length=240)
    assert told(ReferenceContinuity(), rows, Event("reference_reset", 100)) == [("silent_reference_reset", 203, 201)]


@pytest.mark.parametrize("seed", range(6))
def test_it_is_found_in_noise(seed):
    """A healthy run's KL, noisy by a third, whose reference is captured anew."""
    rows = healthy_run(seed, length=200)
    level = rows[119].metrics[KL] / rows[119].step
    after = [
        replace(row, metrics={**row.metrics, KL: row.metrics[KL] * 0.0005 * (row.step - 120)}) for row in rows[120:]
    ]
    assert level > 0
    ((kind, step, onset),) = said(ReferenceContinuity(), rows[:120] + after)
    assert (kind, onset) == ("silent_reference_reset", 121)
    assert step == 123


def test_it_is_found_at_a_resume_too():
    """A trainer that captures its reference after it has loaded the checkpoint."""
    before = exact({KL: reset_at(999)}, length=80)
    after = [replace(row, attempt=2) for row in exact({KL: reset_at(60)}, length=90)[61:]]
    assert said(ReferenceContinuity(), before[:61] + after) == [("silent_reference_reset", 63, 61)]


@pytest.mark.parametrize(
    "curve",
    [
        lambda s: 0.0 if s == 100 else 0.2,
        lambda s: 0.0 if s in (100, 101) else 0.2,
        lambda s: 0.0 if s % 8 == 0 else 0.2,
        lambda s: 0.2 * 0.9 ** max(s - 100, 0),
        lambda s: 0.2 if s < 100 else 0.05,
        lambda s: 0.005 if s < 100 else 0.0,
        lambda s: None if s >= 100 else 0.2,
        lambda s: 0.0,
        lambda s: 0.2 if s < 4 else 0.0,
    ],
    ids=[
        "one row at zero", "two rows at zero", "every eighth row at zero", "a slow decline", "a fall that is not to "
        "nothing", "from next to nothing", "no longer measured", "always zero", "no level yet",
    ],
)  # fmt: skip
def test_what_is_no_reset(curve):
    """Odd rows, schedules and small levels."""
    assert findings(ReferenceContinuity(), exact({KL: curve}, length=200)) == []


@pytest.mark.parametrize(
    ("level", "rest", "silent"),
    [
        (0.0099, [1e-5], True),
        (0.0101, [1e-5], False),
        (0.2, [0.00101], True),
        (0.2, [0.00099], False),
        (0.02, [0.00041], True),
        (0.02, [0.00039], False),
        (0.2, [1e-4, 0.103], True),
        (0.2, [1e-4, 0.097], False),
        (0.2, [1e-4, 1e-4, 0.103], True),
        (0.2, [1e-4, 1e-4, 0.097], False),
    ],
)
def test_each_limit_of_a_fall_met_exactly(level, rest, silent):
    """A level of a hundredth, a fall to a thousandth and to a fiftieth of it, two more rows below half of it."""
    rows = exact({KL: lambda s: level if s < 60 else rest[min(s - 60, len(rest) - 1)]}, length=70)

    assert (said(ReferenceContinuity(), rows) == []) is silent


@pytest.mark.parametrize(
    ("dip", "ago", "silent"), [(0.29, 5, True), (0.31, 5, False), (0.29, 1, True), (0.29, 6, False)]
)
def test_a_level_that_was_not_there_all_the_time_is_none(dip, ago, silent):
    """Five rows before the fall lay above 0.3 of it."""
    rows = exact({KL: lambda s: 1e-4 if s >= 60 else 0.2 * dip if s == 60 - ago else 0.2}, length=70)

    assert (said(ReferenceContinuity(), rows) == []) is silent


@pytest.mark.parametrize(("fall", "silent"), [(4.3, True), (4.6, False)])
def test_a_fall_is_measured_by_what_rows_do_anyway(fall, silent):
    """Six of their spreads, in log space: rows half a nat to either side have a spread of 0.741."""
    swing = lambda s: 0.05 * math.exp(0.5 if s % 2 else -0.5)  # noqa: E731
    rows = exact({KL: lambda s: swing(s) if s < 60 else 0.05 * math.exp(-fall)}, length=70)

    assert (said(ReferenceContinuity(), rows) == []) is silent


def test_a_kl_that_some_trainers_report_as_zero_without_a_coefficient_is_not_judged():
    """The coefficient was set to 0: KL is not measured any more."""
    rows = exact(
        {KL: lambda s: 0.2 if s < 100 else 0.0, "policy/kl_coef": lambda s: 0.1 if s < 100 else 0.0}, length=140
    )
    assert findings(ReferenceContinuity(), rows) == []


@pytest.mark.parametrize("name", [KL, "policy/kl_ref_k1"])
def test_an_estimate_that_crosses_zero_again_and_again_was_never_reset(name):
    """k1 of an own loop: a slow wave around nothing that lingers there, and is as often below."""
    curve = lambda step: 0.08 * math.copysign(abs(math.sin(step / 15)) ** 3, math.sin(step / 15))  # noqa: E731

    assert said(ReferenceContinuity(), exact({name: lambda step: curve(step + 70)}, length=400)) == []


def test_a_signed_estimator_near_zero_is_no_reset():
    """k1 of a policy close to its reference swings through zero."""
    rows = run({"policy/kl_ref_k1": lambda s, n: n.gauss(0.02, 0.03)}, length=600, only=())
    assert findings(ReferenceContinuity(), rows) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 10])
def test_healthy_runs_resumed_anywhere_are_silent(seed, every):
    """KL is continuous over a resume, after a reset and without."""
    rows = run({KL: lambda s, n: grown(s, 100 if s > 100 else 0) * (1 + n.gauss(0, 0.2))}, length=300, seed=seed)
    rows = rows if every == 1 else coarse(rows, every)
    detector, cut = ReferenceContinuity(), [row for row in rows if row.step <= 200]
    again = [replace(row, attempt=2) for row in rows if row.step > 200]
    assert told(detector, [*cut, *again], Event("reference_reset", 100)) == []


def lost(detector, *, jump=0.5, resume=160, reset=100, at_once=()):
    """Reset at ``reset``; resumed after ``resume`` with KL to the old reference ``jump`` again."""
    before = exact({KL: lambda s: grown(s, 0 if s <= reset else reset)}, length=resume + 1)
    after = exact({KL: lambda s: jump + grown(s, resume)}, length=resume + 30)[resume + 1 :]
    found = told(detector, before, Event("reference_reset", reset))
    assert found == []
    for event in at_once:
        detector.notice(event)
    return findings(detector, [replace(row, attempt=2) for row in after])


def dated(found):
    return list(dict.fromkeys((finding.kind, finding.onset_step) for finding in found))


def test_a_jump_at_a_resume_after_a_reset_is_a_lost_reset():
    """At its second row; the evidence holds the levels before the reset, before the resume and now."""
    found = lost(ReferenceContinuity())
    assert dated(found) == [("lost_reference_reset", 161)]
    assert found[0].step == 162
    assert found[0].evidence == pytest.approx({"kl_before": 0.12, "kl": 0.502, "kl_before_reset": 0.196}, rel=0.02)
    assert "jumped from 0.12 to 0.5" in found[0].message


@pytest.mark.parametrize("walked", [1, 2, 3, 4])
def test_a_policy_that_walks_fast_right_after_a_reset_has_not_lost_it(walked):
    """KL grows with the square of its steps, tenfold within a few rows, on both sides of the resume."""
    detector = ReferenceContinuity()
    before = exact({KL: lambda s: 0.03 if s <= 20 else 0.006 * (s - 21) ** 2}, length=21 + walked)
    after = exact({KL: lambda s: 0.006 * (s - 21) ** 2}, length=40)[21 + walked :]
    found = told(detector, before, Event("reference_reset", 20))
    assert found == []
    assert findings(detector, [replace(row, attempt=2) for row in after]) == []


@pytest.mark.parametrize(("built", "lost"), [(8, False), (80, True)])
def test_how_fast_the_old_level_came_says_how_soon_it_comes_again(built, lost):
    """Reset to nothing, one row, resumed at half of the old level: natural where that took eight rows, not eighty."""
    detector = ReferenceContinuity()
    before = exact({KL: lambda s: 0.02 * min(1.0, s / built) if s <= built else 0.0}, length=built + 2)
    after = exact({KL: lambda s: 0.013}, length=built + 20)[built + 2 :]
    assert told(detector, before, Event("reference_reset", built)) == []
    found = findings(detector, [replace(row, attempt=2) for row in after])
    assert bool(found) == lost


def test_a_reset_lost_at_once_is_lost_too():
    """The checkpoint was saved at the very step of the reset: there is no level after it yet."""
    assert dated(lost(ReferenceContinuity(), resume=100)) == [("lost_reference_reset", 101)]


def test_without_a_reset_a_jump_is_not_this_detectors_business():
    """And a jump far below the old level is none of a lost reset."""
    rows = exact({KL: lambda s: 0.1 if s < 100 else 0.9}, length=150)
    resumed = [replace(row, attempt=1 if row.step < 100 else 2) for row in rows]
    assert findings(ReferenceContinuity(), resumed) == []
    assert lost(ReferenceContinuity(), jump=0.02, resume=102) == []


def test_what_the_trainer_says_is_told_at_the_first_row():
    """The file was damaged: no need to wait for KL to show it."""
    event = Event("reference_not_restored", 160, {"reason": "reference.json cannot be read"})
    found = lost(ReferenceContinuity(), jump=0.121, at_once=[event])
    assert (found[0].kind, found[0].step) == ("lost_reference_reset", 161)
    assert "reference.json cannot be read" in found[0].message


def test_a_reset_that_came_after_the_checkpoint_is_not_lost():
    """It is undone with everything after it: the branch that is continued has none."""
    rows = exact({KL: grown}, length=90)
    detector = ReferenceContinuity()
    findings(detector, rows[:60])
    detector.notice(Event("reference_not_restored", 59, {"reason": "came after this checkpoint"}))
    assert findings(detector, [replace(row, attempt=2) for row in rows[60:]]) == []


def test_a_monitor_relives_the_branch_and_finds_the_loss():
    """Through the real order of events, records and attempts."""
    kl = {step: grown(step, 0 if step <= 100 else 100) for step in range(161)}
    first = [StepRecord(step, {KL: value}, attempt=1, seq=step + 1) for step, value in kl.items()]
    reset = Event("reference_reset", 100, attempt=1)
    items = [*first[:101], reset, *first[101:]]
    monitor = Monitor(detectors=lambda: [ReferenceContinuity()], history=lambda attempt, before: items)
    found = []
    for item in items:
        found += monitor.observe(item).findings
    second = [StepRecord(s, {KL: 0.5}, attempt=2, seq=s + 1) for s in range(161, 180)]
    for item in second:
        found += monitor.observe(item).findings

    assert [(f.kind, f.step) for f in found][:1] == [("lost_reference_reset", 162)]
    assert {f.kind for f in found} == {"lost_reference_reset"}


def test_the_metric_first_seen_is_followed():
    """A row that lacks it is not judged by another estimator."""
    rows = [ClosedStep(step=s, metrics={"policy/kl_ref_k3": 0.2, "policy/kl_ref_k1": 0.0}, seq=s) for s in range(60)]
    rows += [ClosedStep(step=s, metrics={"policy/kl_ref_k1": 0.0}, seq=s) for s in range(60, 90)]
    assert findings(ReferenceContinuity(), rows) == []
