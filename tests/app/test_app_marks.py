"""Marks of a run: alarms, resets, resumes and commands at their steps."""

from dataclasses import replace

from app_world import alert, finding
from rlwatch_app import marks

from rlwatch.records import AlertState, Event, Severity, Stage


def test_an_alarm_marks_its_onset_dashed_and_itself_solid():
    """When it began, looking back; when it was seen."""
    began, seen = marks.marks_of_run([alert()], [finding()], [], {1: 1})
    assert (began.step, began.dashed, seen.step, seen.dashed) == (12, True, 20, False)
    assert (seen.shape, seen.families) == ("■", {"Exploration"})


def test_an_alarm_concerns_the_family_of_its_metric_too():
    """A NaN is an optimiser's finding, in whatever metric it shows."""
    found = marks.marks_of_run(
        [alert(kind="nonfinite")], [finding(kind="nonfinite", family="Optimisation")], [], {1: 1}
    )
    assert found[0].families == {"Optimisation", "Exploration"}


def test_a_resolved_alert_is_marked_where_it_was_seen_not_where_it_ended():
    """Its row keeps the step it ended at; the finding the step it was seen at."""
    over = alert(state=AlertState.RESOLVED, step=90, resolved_step=90)
    assert [m.step for m in marks.marks_of_run([over], [finding()], [], {1: 1})] == [12, 20]


def test_a_band_lasts_from_the_onset_until_the_alarm_was_resolved():
    """One that still fires has no end."""
    over = alert(state=AlertState.RESOLVED, step=90, resolved_step=95)
    ends = [marks.marks_of_run([one], [finding()], [], {1: 1})[0].until for one in (over, alert())]
    assert ends == [95, None]


def test_a_critical_finding_without_an_alert_has_its_onset_and_band_too():
    """As in an imported log, which nothing watched; a warning is a symbol alone."""
    ended = finding(severity=Severity.INFO, step=60, stage=Stage.RESOLVED)
    began, seen = marks.marks_of_run([], [finding()], [], {1: 1}, recoveries=[ended])
    assert (began.step, began.dashed, began.until, seen.step, seen.shape) == (12, True, 60, 20, "■")
    assert marks.marks_of_run([], [finding()], [], {1: 1})[0].until is None
    (alone,) = marks.marks_of_run([], [finding(severity=Severity.WARNING)], [], {1: 1})
    assert (alone.step, alone.dashed) == (20, False)


def test_a_band_does_not_end_with_what_an_earlier_attempt_resolved():
    """A run that was resumed before its failure may fail again, and stay so."""
    again = finding(step=25, attempt=2, seq=70)
    ended = finding(severity=Severity.INFO, step=60, stage=Stage.RESOLVED, attempt=1, seq=60)
    assert marks.marks_of_run([], [again], [], {1: 1}, recoveries=[ended])[0].until is None
    later = replace(ended, step=50, attempt=2, seq=95)
    assert marks.marks_of_run([], [again], [], {1: 1}, recoveries=[ended, later])[0].until == 50


def test_alerts_that_were_not_published_are_not_marked():
    """Gone before they fired."""
    gone = alert(state=AlertState.RESOLVED, fired_at=None)
    pending = alert(state=AlertState.PENDING, fired_at=None)
    assert marks.marks_of_run([gone, pending], [], [], {1: 1}) == []


def test_resets_and_resumes_are_marked():
    """Without them a jump looks like news."""
    reset = Event("reference_reset", step=40)
    found = marks.marks_of_run([], [], [reset, Event("note", step=5), Event("signal")], {1: 1, 2: 30})
    assert [(m.step, m.shape) for m in found] == [(30, "↻"), (40, "⟲")]


def test_commands_that_bend_the_curves_are_marked():
    """A rate that fell, a weight that changed, a stretch without steps; what resumed is an event of its own."""
    told = [Event("command", step=s, body={"command": kind}) for s, kind in enumerate(
        ["lower-lr", "set-kl-coef", "pause", "save-checkpoint", "resume"])]  # fmt: skip
    assert [(m.step, m.shape, m.text) for m in marks.marks_of_run([], [], told, {1: 1})] == [
        (0, "↓", "lower learning rate"),
        (1, "β", "set KL coefficient"),
        (2, "‖", "pause"),
        (3, "⤓", "save checkpoint"),
    ]
