"""The Monitor: closed steps, findings told once, attempts relived."""

import math
from dataclasses import replace

from scripted import Threshold, records, reset, rollback, sent, told

from rlwatch.alerts.rules import Rule
from rlwatch.detectors.exploration.entropy import EntropyExplosion
from rlwatch.detectors.optimisation.nonfinite import NonFinite
from rlwatch.diagnosis import diagnose
from rlwatch.monitor import Monitor, MonitorOutcome
from rlwatch.records import Severity, StepRecord


def watcher(detector=None, **kwargs):
    made = detector or Threshold()
    kwargs.setdefault("rules", [Rule("r")])
    return Monitor(run_id="run", detectors=lambda: [made], **kwargs), made


def feed(monitor, items):
    outcome = MonitorOutcome()
    for item in items:
        outcome += monitor.observe(item)
    return outcome


def test_records_of_a_step_merge_and_the_next_step_closes_it():
    """A trainer logs a step in pieces; detectors see it whole, once, with canonical names."""
    monitor, detector = watcher()
    pieces = [
        StepRecord(1, {"reward": 0.5}, seq=1),
        StepRecord(1, {"entropy": 0.7}, seq=2),
        StepRecord(1, {"reward": 0.6}, seq=3),
    ]
    feed(monitor, pieces)
    assert detector.seen == []

    feed(monitor, [StepRecord(2, {"reward": 0.5}, seq=4)])

    assert detector.seen == [(1, {"reward/mean": 0.6, "policy/entropy": 0.7})]


def test_a_finding_is_told_when_it_begins_and_when_it_gets_worse():
    """Not at every step it holds."""
    monitor, _ = watcher()

    outcome = feed(monitor, records(0, 2, 3, 20, 30, 2, 0))
    outcome += monitor.close()

    assert told(outcome) == [("high", "warning", 1), ("high", "critical", 3)]


def test_a_flicker_is_one_episode_and_a_return_another():
    """Five quiet steps end an episode."""
    monitor, _ = watcher()

    flicker = feed(monitor, records(2, 0, 2, 0, 2, 0))
    back = feed(monitor, records(0, 0, 0, 0, 0, 2, 0, start=6, seq=6))

    assert len(told(flicker)) == 1
    assert told(back) == [("high", "warning", 11)]


def test_findings_carry_the_seq_of_the_step_they_judge():
    """So that a store keeps one of each, whoever evaluated."""
    monitor, _ = watcher()

    outcome = feed(monitor, records(2, 0))

    assert [(f.seq, f.attempt) for f in outcome.findings] == [(1, 1)]


def test_late_records_are_counted_not_judged():
    """Their step is closed."""
    monitor, detector = watcher()
    feed(monitor, [*records(0, 0, 0), StepRecord(0, {"reward": 50.0}, seq=9)])
    monitor.close()

    assert monitor.late == 1
    assert [step for step, _ in detector.seen] == [0, 1, 2]


def test_non_finite_values_are_judged_on_arrival():
    """They do not wait for the next step, which may never come."""
    monitor, _ = watcher()

    outcome = feed(monitor, records(0, 0, math.nan))

    assert told(outcome) == [("high", "critical", 2)]
    assert sent(outcome) == [("fired_at_once", 2)]
    assert [f.kind for f in monitor.active] == ["high"]


def test_late_non_finite_values_are_judged_too():
    """Counted as late, and told."""
    monitor, _ = watcher()

    outcome = feed(monitor, [*records(0, 0, 0), StepRecord(1, {"reward": math.nan}, seq=9)])

    assert monitor.late == 1
    assert [kind for kind, _, _ in told(outcome)] == ["high"]


def test_a_step_closes_before_what_arrives_after_it_is_judged():
    """Order is kept even where an arrival is urgent."""
    monitor, _ = watcher()

    outcome = feed(monitor, records(2, math.nan))

    assert told(outcome) == [("high", "warning", 0), ("high", "critical", 1)]


def test_events_reach_the_detectors_in_order():
    """A reset restarts a baseline."""
    monitor, detector = watcher()
    feed(monitor, [*records(0, 0), reset(1, seq=3)])

    assert detector.noticed == ["reference_reset"]


def test_a_new_attempt_forgets_what_the_branch_it_continues_never_saw():
    """Attempt 1 rose at step 3; attempt 2 resumed from step 2 and never did."""
    rows = [*records(0, 0, 0, 5), *records(0, 0, 0, start=2, attempt=2, seq=4)]
    made = []

    def fresh():
        made.append(Threshold())
        return [made[-1]]

    def history(attempt, before):
        return [r for r in rows if r.attempt < attempt and r.step < before]

    monitor = Monitor(run_id="run", detectors=fresh, rules=[Rule("r")], history=history)
    feed(monitor, rows)
    monitor.close()

    assert [step for step, _ in made[-1].seen] == [0, 1, 2, 3, 4]
    assert monitor.active == ()


def test_a_monitor_that_joins_at_a_later_attempt_relives_the_history():
    """The process was restarted: its memory is in the store."""
    past = records(0, 2, 2)
    monitor, detector = watcher(history=lambda attempt, before: [r for r in past if r.step < before])

    feed(monitor, records(2, 2, start=3, attempt=2, seq=3))
    monitor.close()

    assert [step for step, _ in detector.seen] == [0, 1, 2, 3, 4]


def test_an_event_that_opens_an_attempt_waits_for_its_history():
    """A resume event is logged before the first step of the attempt."""
    past = [*records(0, 0), reset(1, seq=3)]
    monitor, detector = watcher(history=lambda attempt, before: past)

    feed(monitor, [reset(None, seq=4, attempt=2), *records(0, start=2, attempt=2, seq=4)])

    assert detector.noticed == ["reference_reset", "reference_reset"]
    assert [step for step, _ in detector.seen] == [0, 1]


# A roll-back: the branch that goes on.


def broken_and_rolled_back(after, *, to=29, broken=range(30, 46), length=80):
    """Rows of a run that broke and was rolled back at the end of ``broken``; ``after``: the reward from then on."""
    items = []
    for step in range(length):
        reward = 0.0 if step in broken else after if step > broken[-1] else 0.6 + 0.01 * (step % 3)
        metrics = {"reward": reward, "entropy": 1.0, "kl": 0.01, "grad_norm": 1.0}
        items.append(StepRecord(step, metrics, seq=len(items) + 1))
        if step == broken[-1]:
            items.append(rollback(step, to, len(items) + 1))
    return items


def judged(items):
    """The monitor and what it published, with the stored items as history."""

    def history(attempt, before):
        return (item for item in items if item.attempt < attempt and item.step < before)

    monitor = Monitor(run_id="run", history=history)
    return monitor, feed(monitor, items)


def test_after_a_roll_back_rows_are_judged_as_if_the_undone_ones_had_never_been():
    """The detectors have seen the rows up to the snapshot and those after the roll-back; a second one likewise."""
    rows = records(*[0] * 10)
    stream = [*rows[:6], rollback(5, 2, 0), *rows[6:8], rollback(7, 6, 0), *rows[8:]]
    items = [replace(item, seq=seq) for seq, item in enumerate(stream, 1)]
    made = []

    def fresh():
        made.append(Threshold())
        return [made[-1]]

    def history(attempt, before):
        return (item for item in items if item.attempt < attempt and item.step < before)

    monitor = Monitor(run_id="run", detectors=fresh, rules=[Rule("r")], history=history)
    feed(monitor, items)
    monitor.close()

    assert [step for step, _ in made[0].seen] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in made[-1].seen] == [0, 1, 2, 6, 8, 9]


def test_a_roll_back_that_helps_is_a_recovery_and_one_that_does_not_is_none():
    """What was found goes on until the values are back."""
    helped, _ = judged(broken_and_rolled_back(0.61))
    not_helped, _ = judged(broken_and_rolled_back(0.0))

    assert not [finding for finding in helped.active if finding.severity is Severity.CRITICAL]
    assert [finding for finding in not_helped.active if finding.severity is Severity.CRITICAL]


def test_a_second_failure_after_a_roll_back_is_found_again():
    """The detectors know the level of before, and nothing of the undone rows."""
    items = broken_and_rolled_back(0.61, length=120)
    items += [StepRecord(step, {"reward": 0.0, "entropy": 1.0}, seq=200 + step) for step in range(120, 150)]
    monitor, outcome = judged(items)

    criticals = [finding.onset_step for finding in outcome.findings if finding.severity is Severity.CRITICAL]
    assert any(25 <= onset <= 35 for onset in criticals)
    assert any(115 <= onset <= 125 for onset in criticals)
    assert [finding for finding in monitor.active if finding.severity is Severity.CRITICAL]


def test_a_fall_after_a_roll_back_is_over_when_the_level_of_before_the_undone_rows_is_back():
    """The undone rows, at 0, are not what it came from."""
    items = broken_and_rolled_back(0.0, length=75)
    back = [
        {"reward": 0.6 + 0.01 * (step % 3), "entropy": 1.0, "kl": 0.01, "grad_norm": 1.0} for step in range(75, 130)
    ]
    monitor, _ = judged([*items, *(StepRecord(75 + n, row, seq=300 + n) for n, row in enumerate(back))])

    assert [(f.kind, f.severity) for f in monitor.active if f.severity is not Severity.INFO] == []


def test_what_could_not_run_says_why():
    """And stops saying so once it could."""
    monitor, _ = watcher()
    before = {n.name: n.reason for n in monitor.not_run()}
    feed(monitor, records(0, 0))
    after = {n.name for n in monitor.not_run()}

    assert "reward/mean" in before["threshold"]
    assert "threshold" not in after
    assert "forecast" in after


def test_a_detector_that_raises_is_left_out_and_the_others_go_on(caplog):
    """It ended the scan of a whole log with a traceback; now it is said once, and named among what was not judged."""

    class Breaks(EntropyExplosion):
        def judge(self, step):
            raise ZeroDivisionError(f"no entropy at {step.step}")

    own = [Breaks(), NonFinite()]
    monitor = Monitor(detectors=lambda: own)
    rows = [
        StepRecord(i, {"policy/entropy": 1.0, "loss/policy": math.nan if i > 2 else 0.1}, seq=i + 1) for i in range(9)
    ]

    findings = feed(monitor, rows).findings

    assert {finding.kind for finding in findings} == {"nonfinite"}
    assert [part.reason for part in monitor.not_run() if part.name == Breaks.name] == [
        "failed at step 0 (ZeroDivisionError: no entropy at 0) and was disabled"
    ]
    assert len([message for message in caplog.messages if "no entropy" in message]) == 1


def test_the_cause_is_known_while_the_run_lives():
    """The same judgement as of the published findings; memory of them is bounded."""
    monitor = Monitor()
    findings = feed(monitor, records(*[0.1 * (i % 3) for i in range(30)], *[math.nan] * 5)).findings
    said = monitor.diagnosis()

    assert [cause.kind for cause in said.causes] == ["nonfinite"]
    assert said.causes == diagnose(findings).causes
    assert Monitor().diagnosis().causes == ()
