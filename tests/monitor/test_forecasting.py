"""The forecast in the Monitor: of every step, causal, told as a finding, and harmless whatever the model does."""

import errno
import logging
import math
from dataclasses import replace
from functools import partial

import pytest
from forecast_models import small_model
from scripted import Oracle, Threshold, records, reset, told

from rlwatch.alerts.rules import Rule, default_rules
from rlwatch.forecast import LIMITS, Forecast, ForecastReason, forecaster
from rlwatch.forecast.forecast import REACHED, forecast_of, record_of
from rlwatch.forecast.forecast import alarm_message as words
from rlwatch.forecast.forecaster import MODEL_VARIABLE, Forecaster
from rlwatch.monitor import Monitor
from rlwatch.monitor.step_judge import joined
from rlwatch.records import ClosedStep, Severity, StepRecord
from rlwatch.testing.detector_contract import whole_run


def watching(make=Oracle, **kwargs):
    made = []

    def fresh():
        made.append(make())
        return made[-1]

    kwargs.setdefault("detectors", list)
    return Monitor(run_id="run", rules=[Rule("r")], forecaster=fresh, **kwargs), made


def feed(monitor, items, *, close=True):
    outcomes = [monitor.observe(item) for item in items]
    return joined([*outcomes, *([monitor.close()] if close else [])])


def chances(outcome):
    return [(forecast.step, forecast.p50) for forecast in outcome.forecasts]


def test_every_closed_step_has_its_forecast():
    """Given out with the step, the newest kept; stored under the step's own number."""
    monitor, _ = watching()
    outcome = feed(monitor, records(0.1, 0.2, 0.3))

    assert chances(outcome) == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert monitor.forecast == outcome.forecasts[-1]
    assert [(record.step, record.seq, record.attempt) for record in outcome.kept] == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    assert [forecast_of(record) for record in outcome.kept] == list(outcome.forecasts)


def test_an_alarm_is_a_warning_in_plain_words():
    """What, how likely, when, and what it rests on; the numbers beside it. Told once while it holds."""
    monitor, _ = watching()
    outcome = feed(monitor, records(0.1, 0.72, 0.75, 0.1))

    [finding] = outcome.findings
    assert (finding.kind, finding.detector, finding.severity) == ("crash_forecast", "forecast", Severity.WARNING)
    assert finding.message == (
        "failure likely within 50 steps (p = 0.72): KL to the reference would reach its limit in about 35 steps; "
        "main drivers: mismatch/k3 (42 %), policy/entropy (17 %)"
    )
    assert (finding.step, finding.onset_step, finding.seq, finding.metric) == (1, 1, 2, "mismatch/k3")
    assert finding.score == pytest.approx(1.44)
    assert finding.evidence == {
        "p20": 0.72,
        "p50": 0.72,
        "p100": 1.0,
        "risk": 1.44,
        "steps_to": 35.2,
        "limit": "ref_kl",
        "why": [{"metric": "mismatch/k3", "share": 0.42}, {"metric": "policy/entropy", "share": 0.17}],
    }
    assert monitor.active == ()


def test_a_forecast_ends_where_the_failure_begins():
    """Neither its finding nor a chance goes on beside the failure; the reason names it, and is stored once."""

    class Broken(Threshold):
        def update(self, step):
            return [replace(each, severity=Severity.CRITICAL, family="Optimisation") for each in super().update(step)]

    monitor, _ = watching(detectors=lambda: [Broken()])
    outcome = feed(monitor, records(0.9, 0.9, 1.1, 1.1, 1.1))

    assert [(f.kind.value, f.shown) for f in outcome.forecasts] == [("chance", True)] * 2 + [("over", False)] * 3
    assert outcome.forecasts[-1].reason == "no forecast because the failure is there: high since step 2"
    assert [record.step for record in outcome.kept] == [0, 1, 2]
    assert [finding.kind for finding in monitor.active] == ["high"]


def test_beyond_a_limit_nothing_is_forecast():
    """ "It would fall to its limit now" is said of no run that is there; the alarm is kept while it may be a single row."""

    class Beyond(Oracle):
        def update(self, step):
            made = super().update(step)
            return replace(made, passed="reward") if step.step >= 2 else made

    outcome = feed(watching(make=Beyond)[0], records(*[0.9] * 4))

    assert [forecast.kind.value for forecast in outcome.forecasts] == ["chance", "chance", "over", "over"]
    assert outcome.forecasts[-1].reason == "no forecast because the run is beyond a limit: the reward"
    assert [finding.stage.value for finding in outcome.findings] == ["began"]


@pytest.mark.parametrize("limit", LIMITS)
def test_every_limit_has_words(limit):
    """No alarm names a limit by its key."""
    assert REACHED[limit] in words(Forecast(1, p50=0.6, limit=limit))


def test_words_claim_no_more_than_the_numbers():
    """A raised chance is not called likely; what is unknown is left out."""
    assert words(Forecast(1, p50=0.31)) == "failure risk within 50 steps raised (p = 0.31)"
    assert words(Forecast(1)) == "a failure may begin soon"
    assert "in about" not in words(Forecast(1, p50=0.6, limit="reward"))


def test_it_is_critical_only_if_sure_for_long_and_a_detector_warns():
    """What has not happened yet wakes nobody by itself."""

    class Of(Threshold):
        def __init__(self, family):
            super().__init__()
            self.family = family

        def update(self, step):
            return [replace(finding, family=self.family) for finding in super().update(step)]

    def severities(value, family):  # the detector warns above 1
        found = feed(watching(detectors=lambda: [Of(family)])[0], records(*[value] * 8)).findings
        return [(f.severity.value, f.step) for f in found if f.kind == "crash_forecast"]

    assert severities(0.9, "Optimisation") == [("warning", 0)]
    assert severities(1.5, "System") == [("warning", 0)]
    assert severities(1.5, "Optimisation") == [("warning", 0), ("critical", 4)]


@pytest.mark.parametrize(("family", "foretold"), [("Optimisation", [8]), ("System", [2])])
def test_what_has_come_true_is_not_forecast(family, foretold):
    """While something critical is not over there is no forecast; of time or logging it says nothing of the policy."""

    class Broken(Threshold):
        def update(self, step):
            found = super().update(step) if step.step >= 2 else []
            return [replace(each, family=family, severity=Severity.CRITICAL) for each in found]

    found = feed(watching(detectors=lambda: [Broken()])[0], records(0.0, 0.0, 1.1, *[0.9] * 8)).findings
    assert [f.step for f in found if f.kind == "crash_forecast"] == foretold


def test_of_a_lean_log_it_is_a_remark_until_a_detector_warns():
    """Few averages, thin evidence: worth a line, but nobody is woken by it alone."""

    class Lean(Oracle):
        def update(self, step):
            return replace(super().update(step), lean=True)

    monitor, _ = watching(Lean, detectors=lambda: [Threshold()])
    outcome = feed(monitor, records(0.6, 0.6, 0.6, 0.6, 1.5, 1.5))
    told = [(f.severity.value, f.step) for f in outcome.findings if f.kind == "crash_forecast"]
    assert told == [("info", 0), ("warning", 4)]


@pytest.mark.parametrize("kind", ["lost_reference_reset", "silent_reference_reset"])
def test_what_is_said_of_a_resume_changes_no_forecast(kind):
    """Else a run that was restarted would be told something else than one that was not."""

    class Lean(Oracle):
        def update(self, step):
            return replace(super().update(step), lean=True)

    class Anchor(Threshold):
        def update(self, step):
            return [replace(each, kind=kind, severity=Severity.CRITICAL) for each in super().update(step)]

    found = feed(watching(Lean, detectors=lambda: [Anchor()])[0], records(1.5, 1.5, 1.5, 1.5, 1.5, 1.5)).findings
    assert [(f.severity.value, f.step) for f in found if f.kind == "crash_forecast"] == [("info", 0)]


def test_rows_without_a_forecast_are_no_news_for_a_while():
    """Some metrics are logged every few rows: an alarm goes on over ten of them, not for ever."""
    monitor, _ = watching()
    feed(monitor, records(0.6, *[-1] * 10), close=True)
    held = monitor.active
    feed(monitor, records(-1, start=11, seq=11), close=True)

    assert [(f.kind, f.step, f.onset_step) for f in held] == [("crash_forecast", 10, 0)]
    assert monitor.active == ()


def test_a_forecaster_that_raises_is_counted_said_once_and_asked_no_more(caplog):
    """Findings of detectors go on; so does the run."""
    monitor, made = watching(detectors=lambda: [Threshold()])
    with caplog.at_level(logging.WARNING, "rlwatch"):
        outcome = feed(monitor, records(0.1, -5, 20, 0.9))

    assert chances(outcome) == [(0, 0.1)]
    assert told(outcome) == [("high", "critical", 2)]
    assert (monitor.forecast_failures, len(made[0].seen), monitor.forecast) == (1, 2, None)
    assert caplog.messages == [
        "no forecast because the forecaster failed: RuntimeError: this model is not for such data"
    ]
    assert monitor.not_run()[-1].reason == caplog.messages[0]


@pytest.mark.parametrize(
    "said",
    [Forecast(0, p50=1.5), Forecast(0, p20=math.nan), Forecast(0, p50=0.5, risk=math.inf), None],
    ids=["p50 > 1", "NaN", "infinite", "nothing"],
)
def test_no_wrong_number_is_told(said):
    """A chance is within [0, 1] or there is none."""

    class Wrong(Oracle):
        def update(self, step):
            return said

    monitor, _ = watching(Wrong)
    outcome = feed(monitor, records(0.1, 0.2))

    assert (outcome.forecasts, monitor.forecast_failures) == ((), 1)
    assert [(record.metrics, record.body) for record in outcome.kept] == [
        ({}, {"absent": monitor.not_run()[-1].reason})  # once, so that a page can say why
    ]


def test_a_forecaster_that_cannot_be_made_hurts_nobody():
    """Its file is damaged, say."""

    def broken():
        raise OSError("no such file")

    monitor = Monitor(detectors=lambda: [Threshold()], forecaster=broken)
    outcome = feed(monitor, [*records(0.1, 20), reset(1, seq=3)])

    assert told(outcome) == [("high", "critical", 1)]
    assert "OSError: no such file" in monitor.not_run()[-1].reason


@pytest.mark.parametrize(
    "lacks", [OSError(errno.EMFILE, "too many open files"), MemoryError()], ids=["files", "memory"]
)
def test_a_forecaster_loaded_late_forecasts_as_one_loaded_at_once(lacks):
    """While files or memory are lacking, its steps and events wait; none is forecast from a shorter history."""

    class Counts(Oracle):
        """Its chance is the number of steps and events that it has taken, in hundredths."""

        def update(self, step):
            super().update(step)
            return Forecast(step.step, p50=(len(self.seen) + 10 * len(self.noticed)) / 100)

    failures = [lacks] * 4
    given = [*records(0.1, 0.2), reset(2, seq=3), *records(0.3, 0.4, 0.5, start=2, seq=4)]

    def made(late):
        def make():
            if late and failures:
                raise failures.pop()
            return Counts()

        return Monitor(detectors=lambda: [Threshold()], forecaster=make)

    late, at_once = made(True), made(False)
    kept = feed(late, given).kept

    assert not failures
    assert kept == feed(at_once, given).kept
    assert len(kept) == 5
    assert late.not_run() == at_once.not_run()


class Unreadable(Forecaster):
    """The shipped forecaster, whose model's file cannot be read the first ``fails`` times that a row needs it."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    @property
    def model(self):
        if self.fails:
            self.fails -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return super().model


@pytest.mark.parametrize("fails", [1, 2, 30])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_model_that_could_not_be_read_forecasts_as_one_that_could(at_once, fails):
    """Its rows are taken once each: those of a batch, those before the first probability, those that waited."""
    rows = [StepRecord(row.step, row.metrics, seq=i) for i, row in enumerate(whole_run(3, 120, 1), 1)]

    def kept(fails):
        monitor = Monitor(detectors=list, forecaster=lambda: Unreadable(fails))
        of_rows = monitor.observing_all(rows) if at_once else map(monitor.observe, rows)
        outcome = joined([*of_rows, monitor.close()])
        assert monitor.forecast_failures == 0
        return outcome.kept

    late, wanted = kept(fails), kept(0)

    assert late == wanted
    assert sum("forecast/p50" in record.metrics for record in wanted) > 30


def test_why_there_is_no_forecast_is_said_only_where_there_was_none():
    """The forecaster's own reason; of a run that had one, nothing."""
    monitor, _ = watching()
    assert [part.reason for part in monitor.not_run()] == ["no step has closed yet"]
    feed(monitor, records(-1, -1))
    assert [part.reason for part in monitor.not_run()] == ["no forecast because there were 2 steps"]
    feed(monitor, records(0.1, -1, start=2, seq=2))
    assert monitor.not_run() == []


def test_the_same_reason_for_none_is_stored_once():
    """A run that can never be forecast leaves one row, not one a step."""

    class Never(Oracle):
        def update(self, step):
            return Forecast(step.step, absent="no forecast because this run logs nothing")

    monitor, _ = watching(Never)
    assert [record.step for record in feed(monitor, records(*[0.0] * 30)).kept] == [0]


def test_forecasts_are_never_learnt_from():
    """A log that another tracker kept of a watched run holds them: not a step, not late, seen by nobody."""
    detector = Threshold()
    monitor, made = watching(detectors=lambda: [detector])
    rows = [
        StepRecord(3, {"reward": 0.1, "forecast/p50": 0.9, "train/forecast/risk": 2.0}, seq=1),
        StepRecord(1, {"forecast/p50": 0.9, "forecast/p20": math.nan}, seq=2),
        StepRecord(4, {"forecast/p50": 0.9}, seq=3),
    ]
    outcome = feed(monitor, rows)

    assert made[0].seen == detector.seen == [(3, {"reward/mean": 0.1})]
    assert chances(outcome) == [(3, 0.1)]
    assert monitor.late == 0


def test_events_reach_the_forecaster_and_a_new_attempt_a_fresh_one():
    """It relives the branch it continues, as detectors do; what it said of it is said again under the same numbers."""
    first = [*records(0.1, 0.2, 0.9), reset(2, seq=4)]
    monitor, made = watching(history=lambda attempt, before: [i for i in first if i.step < before])
    before = feed(monitor, first, close=False)
    after = feed(monitor, records(0.3, start=2, attempt=2, seq=4))

    assert [[step for step, _ in one.seen] for one in made] == [[0, 1], [0, 1, 2]]
    assert [one.noticed for one in made] == [["reference_reset"], []]
    assert [(r.step, r.seq, r.attempt) for r in after.kept] == [(0, 1, 1), (1, 2, 1), (2, 5, 2)]
    assert before.kept == after.kept[:2]


def test_what_is_said_of_a_step_needs_nothing_after_it():
    """A prefix says a prefix, alarm and severity included."""
    rows = records(0.1, 0.6, -1, 0.95, 0.9, 0.9, 0.9, 0.9, 0.2, 0.7)
    whole = feed(watching()[0], rows)
    for cut in range(1, len(rows)):
        part = feed(watching()[0], rows[:cut])
        assert part.kept == whole.kept[:cut]
        assert told(part) == [finding for finding in told(whole) if finding[2] < cut]


def test_what_is_stored_of_a_forecast_reads_back():
    """Of an alarm with its reasons, and of none with the cause."""
    step = ClosedStep(9, {}, {}, ts=3.0, attempt=2, seq=7)
    for said in (
        Forecast(9, 0.1, 0.5, 0.9, 1.2, True, "reward", 12.5, (ForecastReason("optim/grad_norm", 0.25),)),
        Forecast(9, absent="no forecast because it needs 40 steps; at 9"),
    ):
        kept = record_of(said, step)
        assert (kept.ts, kept.attempt, kept.seq) == (3.0, 2, 7)
        assert forecast_of(kept) == said


def test_by_default_one_odd_forecast_tells_nobody_and_three_do():
    """On a log with a row for each step; on a coarser one two rows."""

    def alarms(values, gap):
        monitor = Monitor(run_id="run", rules=default_rules(), detectors=list, forecaster=Oracle)
        return [t.alert.step for t in feed(monitor, records(*values, gap=gap)).transitions if t.notify]

    assert alarms([0.1, 0.6, 0.6, 0.1, 0.1], 1) == []
    assert alarms([0.1, 0.6, 0.6, 0.6, 0.1], 1) == [3]
    assert alarms([0.1, 0.6, 0.1], 10) == []
    assert alarms([0.1, 0.6, 0.6, 0.6], 10) == [20]


def test_the_shipped_forecaster_is_asked_by_default(monkeypatch):
    """With the model the user names; one that cannot be read is said, and hurts nobody."""
    monkeypatch.setenv(MODEL_VARIABLE, "/nowhere/model.json")
    monitor = Monitor(detectors=list)
    feed(monitor, records(0.1, 0.2))

    assert "/nowhere/model.json cannot be read" in monitor.not_run()[-1].reason


def test_an_installation_without_a_model_says_so(monkeypatch, caplog):
    """As a reason, not as a failure."""

    def gone():
        raise FileNotFoundError("hazard.json")

    monkeypatch.setattr(forecaster, "default_forecaster", gone)
    monitor = Monitor(detectors=list)
    feed(monitor, records(0.1, 0.2))

    assert monitor.not_run()[-1].reason.endswith("holds no forecasting model")
    assert (monitor.forecast_failures, caplog.messages) == (0, [])


def falling(step):
    """A run whose entropy falls and whose mismatch grows from step 70 on."""
    gone = max(0, step - 70) / 30
    wave = 0.02 * (step * 7 % 5 - 2)
    return {"policy/entropy": max(0.01, 1.0 + wave - gone), "mismatch/k3": 1e-3 * 10 ** (2 * gone) * (1 + wave)}


def test_a_resumed_run_is_forecast_as_one_that_was_never_interrupted():
    """By the real forecaster: what it says depends on the branch's rows alone, not on batches or restarts."""
    whole = [StepRecord(step, falling(step), seq=step) for step in range(1, 121)]
    first, second = whole[:80], [replace(row, attempt=2, seq=row.seq + 20) for row in whole[60:]]

    def monitor(history=None):
        make = partial(Forecaster, small_model())
        return Monitor(run_id="run", detectors=list, forecaster=make, history=history)

    straight = feed(monitor(), whole)
    resumed = feed(monitor(lambda attempt, before: [row for row in first if row.step < before]), [*first, *second])

    numbers = {record.step: (record.metrics, record.body) for record in straight.kept}
    assert {record.step: (record.metrics, record.body) for record in resumed.kept} == numbers
    assert any(forecast.alarm for forecast in straight.forecasts)
    assert straight.findings[0].step == resumed.findings[-1].step
