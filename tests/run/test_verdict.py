"""State and headline of a run: from what was found, what was logged and how it ended."""

import json
import math
from dataclasses import replace

import pytest

from rlwatch.importers.base import ImportedRun
from rlwatch.ports import Progress
from rlwatch.records import IMPORTED, Event, Finding, RunInfo, RunState, Severity, Stage, StepRecord
from rlwatch.scanner import replay, scan
from rlwatch.state import End, Ending, State, ending_of, explained, forecast_allowed, headline_of, verdict_of
from rlwatch.store.url import open_store
from rlwatch.view import diagnosis_of, stored_explanation, stored_verdict, unjudged_from, view_of_run

CRITICAL, WARNING, INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO
STEPS = {1: range(1, 301)}
KILLED = Ending(End.KILLED, 240, "CUDA error: out of memory")
GOES_ON = Ending(End.GOES_ON, 240)


def found(kind, severity, onset, stage=Stage.BEGAN, step=None, attempt=1):
    at = onset + 9 if step is None else step
    return Finding("d", kind, severity, at, onset, "", seq=at, stage=stage, attempt=attempt)


COLLAPSE = found("entropy_collapse", CRITICAL, 198)
SPIKE = found("grad_spike", CRITICAL, 60)
SPIKE_OVER = found("grad_spike", INFO, 60, Stage.RESOLVED, 102)
EASED = found("entropy_collapse", WARNING, 198, Stage.EASED, 230)
FALL = found("reward_drop", WARNING, 150)
DRIFT = found("kl_drift", WARNING, 31)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ([], "healthy"),
        ([DRIFT], "at risk"),
        ([SPIKE, SPIKE_OVER], "recovered"),
        ([COLLAPSE, EASED], "at risk"),
        ([SPIKE, SPIKE_OVER, DRIFT], "at risk"),
        ([SPIKE], "damaged"),
        ([SPIKE, SPIKE_OVER, FALL], "damaged"),
        ([COLLAPSE], "collapsed@198"),
        ([SPIKE, SPIKE_OVER, COLLAPSE], "collapsed@198"),
        ([COLLAPSE, EASED, found("entropy_collapse", CRITICAL, 198, Stage.WORSENED, 260)], "collapsed@198"),
        ([found("reward_drop", INFO, 8), found("reward_drop", CRITICAL, 220)], "collapsed@220"),
        ([found("reward_drop", WARNING, 210), found("reward_drop", CRITICAL, 220)], "collapsed@210"),
        ([found("no_signal", CRITICAL, 1)], "not learning"),
        ([found("never_learns", WARNING, 1)], "not learning"),
        ([found("no_signal", WARNING, 1)], "at risk"),
        ([found("no_signal", CRITICAL, 120)], "collapsed@120"),
        ([found("nonfinite", CRITICAL, 2)], "collapsed@2"),
        ([found("crash_forecast", CRITICAL, 90)], "healthy"),
    ],
)
def test_a_run_that_ended_by_itself_gets_a_word_for_what_was_found(told, name):
    """Whatever order the rows are in."""
    assert verdict_of(told, STEPS).name == verdict_of(told[::-1], STEPS).name == name


def test_how_it_ended_goes_before_what_it_could_have_survived_and_not_before_a_collapse():
    """A run that was killed after it had collapsed was lost before."""
    assert verdict_of([], STEPS, ending=KILLED).text == (
        "Killed at step 240: CUDA error: out of memory; until then healthy: no failure was found"
    )
    assert verdict_of([SPIKE], STEPS, ending=KILLED).name == "killed@240"
    lost = verdict_of([COLLAPSE], STEPS, ending=KILLED)
    assert (lost.name, lost.text.endswith("; killed at step 240: CUDA error: out of memory")) == ("collapsed@198", True)


def test_a_run_that_goes_on_collapses_fails_or_is_at_risk():
    """A collapse is one while the run still goes on, and says so."""
    lost = verdict_of([COLLAPSE], STEPS, ending=GOES_ON, since_s=4320.0)
    assert (lost.state, lost.brief) == (
        State.COLLAPSED,
        "Collapsed at step 198: entropy fell; still running 1.2\u202fh later",
    )
    assert verdict_of([SPIKE], STEPS, ending=GOES_ON).state is State.FAILING
    assert verdict_of([FALL], STEPS, ending=GOES_ON).state is State.AT_RISK
    assert verdict_of([found("crash_forecast", WARNING, 90)], STEPS, ending=GOES_ON).state is State.AT_RISK
    assert verdict_of([found("never_learns", WARNING, 1)], STEPS, ending=GOES_ON).state is State.NOT_LEARNING
    assert verdict_of([], STEPS, ending=GOES_ON).text == "Healthy at step 240: no failure was found"
    assert verdict_of([SPIKE, SPIKE_OVER], STEPS, ending=GOES_ON).text == (
        "Recovered: gradient spike from step 60, resolved at step 102"
    )


def test_a_warning_that_is_over_asks_for_nothing():
    """Neither "no failure", nor a colour, nor a cause; one that stands is all three."""
    over = found("reward_drop", INFO, 150, Stage.RESOLVED, 180)
    past, stands = verdict_of([FALL, over], STEPS), verdict_of([FALL, over, DRIFT], STEPS)
    assert past.text == "Healthy: no failure was found; earlier: the reward fell from step 150, resolved at step 180"
    assert (past.state, past.level, past.urgency, past.exit_code) == (State.HEALTHY, WARNING, None, 0)
    assert stands.text.startswith("At risk since step 31: KL to the reference grew")
    assert stands.urgency is WARNING
    diagnosis = diagnosis_of([FALL], STEPS)
    assert diagnosis.causes[0].kind == "reward_drop"
    assert not explained(diagnosis, past).causes
    assert not explained(diagnosis, verdict_of([SPIKE, SPIKE_OVER], STEPS)).causes
    assert explained(diagnosis, verdict_of([FALL], STEPS)) is diagnosis


def test_a_cause_that_begins_after_the_failure_is_not_named():
    """What began at step 205 did not break at 198 what was broken then."""
    later = found("mismatch_growth", CRITICAL, 205)
    verdict = verdict_of([COLLAPSE, later], STEPS)
    diagnosis = diagnosis_of([COLLAPSE, later], STEPS)

    assert diagnosis.causes
    assert all(cause.onset_step <= 198 for cause in explained(diagnosis, verdict).causes)
    alone = replace(diagnosis, causes=tuple(c for c in diagnosis.causes if c.onset_step > 198), enough=True)
    assert not explained(alone, verdict).enough


@pytest.mark.parametrize(
    ("told", "ending", "allowed"),
    [
        ([], GOES_ON, True),
        ([DRIFT], GOES_ON, True),
        ([COLLAPSE], GOES_ON, False),
        ([SPIKE], GOES_ON, False),
        ([found("never_learns", WARNING, 1)], GOES_ON, False),
        ([], Ending(), False),
        ([], KILLED, False),
    ],
)
def test_a_forecast_is_shown_only_of_a_run_that_goes_on_and_has_not_failed(told, ending, allowed):
    """The failure is not ahead once it is there."""
    assert forecast_allowed(verdict_of(told, STEPS, ending=ending)) is allowed


@pytest.mark.parametrize("ending", [GOES_ON, Ending()])
def test_only_a_run_that_has_failed_is_to_be_rolled_back(ending):
    """A warning is no reason to lose steps, and what never learnt has nowhere to go back to."""

    def advised(*told):
        shown = explained(diagnosis_of(told, STEPS), verdict_of(told, STEPS, ending=ending))
        return {action.id for cause in shown.causes for action in cause.actions}

    assert "roll-back" in advised(COLLAPSE)
    assert "roll-back" not in advised(found("grad_spike", WARNING, 60), DRIFT)
    assert "roll-back" not in advised(found("reward_constant", WARNING, 1))


def test_what_failed_at_its_first_steps_has_no_state_to_go_back_to():
    """The same failure at step 4 and at step 60; a policy that never learnt is not asked to learn more slowly either."""

    def advised(*told):
        shown = explained(diagnosis_of(told, STEPS), verdict_of(told, STEPS))
        return {action.id for cause in shown.causes for action in cause.actions}

    early, late = advised(found("entropy_collapse", CRITICAL, 4)), advised(found("entropy_collapse", CRITICAL, 60))
    assert late - early == {"roll-back"}
    assert "lower-lr" in early
    dead = advised(found("grad_spike", WARNING, 1), found("reward_constant", WARNING, 2))
    assert dead
    assert dead.isdisjoint({"roll-back", "lower-lr"})


def test_of_many_recoveries_the_newest_is_named():
    """The headline stays short; the text below it has the others."""
    told = []
    for place, kind in enumerate(["grad_rise", "joint_collapse", "mismatch_growth"]):
        onset = 20 + 40 * place
        told += [found(kind, CRITICAL, onset), found(kind, INFO, onset, Stage.RESOLVED, onset + 30)]

    verdict = verdict_of(told, STEPS)

    assert verdict.brief.startswith(
        "Recovered: trainer and rollout engine drift apart from step 100, resolved at step 130"
    )
    assert verdict.brief.endswith(", and 2 more")
    assert len(verdict.brief) <= 120


def test_signs_that_came_together_are_named():
    """The heaviest first, by the names that people use."""
    weights = {"joint": 4.5, "weight reward/mean down": 4.5, "weight len/clipped up": 0.9, "weight optim/lr up": 0.1}
    joint = replace(found("joint_collapse", CRITICAL, 88), evidence=weights)
    assert verdict_of([joint], STEPS).brief == "Collapsed at step 88: reward fell, truncation rose"
    beside = verdict_of([found("reward_drop", CRITICAL, 88), joint], STEPS)
    assert beside.brief == "Collapsed at step 88: reward fell, truncation rose"


def test_one_sign_alone_is_not_called_several():
    """The reward fell and nothing else moved."""
    joint = replace(found("joint_collapse", CRITICAL, 88), evidence={"joint": 4.0, "weight reward/mean down": 4.0})
    assert verdict_of([joint], STEPS).brief == "Collapsed at step 88: reward fell"


def test_a_headline_that_would_be_too_long_names_one_failure():
    """Two long names and a count do not fit on a line."""
    told = [found(kind, WARNING, 88) for kind in ("mismatch_growth", "mismatch_correlation", "mismatch_mask")]
    verdict = verdict_of(told, STEPS)
    assert verdict.brief.endswith(", and 2 more")
    assert len(verdict.brief) <= 110


def test_a_healthy_run_whose_last_rows_earn_nothing_is_not_just_healthy():
    """Two low rows are too few for a warning, and are remarked on until the reward is back."""
    low = found("reward_drop", INFO, 290)
    back = found("reward_drop", INFO, 290, Stage.RESOLVED, 300)
    mix = replace(low, evidence={"mix": True})

    said = verdict_of([low], STEPS)

    assert said.brief == "Healthy, but reward fell from step 290: too few rows to judge"
    assert (said.state, said.exit_code) == (State.HEALTHY, 0)
    assert verdict_of([low, back], STEPS).brief == "Healthy: no failure was found"
    assert verdict_of([mix], STEPS).brief == "Healthy: no failure was found"


def test_the_headline_is_one_short_sentence():
    """State, step, what broke, cause, next action; about a hundred characters."""
    turn = found("lr", INFO, 161)
    assert turn.onset_step == 161
    diagnosis = diagnosis_of([COLLAPSE, FALL], STEPS)
    headline = headline_of(verdict_of([COLLAPSE, FALL], STEPS), diagnosis)

    assert headline.startswith("Collapsed at step 198: entropy fell")
    assert len(headline) <= 110
    assert headline.endswith(".")


EVERYTHING = ("reward/mean", "policy/entropy", "policy/kl_ref", "len/mean")


@pytest.mark.parametrize(
    ("metrics", "unknown", "text"),
    [
        (EVERYTHING, (), "Healthy: no failure was found"),
        (EVERYTHING, ("mine",), "Healthy: no failure was found"),
        (EVERYTHING[:3], (), "Healthy: no failure was found; not judged: no length is logged"),
        (EVERYTHING[:1], ("timing_s/gen",), "Healthy: no failure was found in the reward, and nothing else is logged; not judged: no entropy, KL or length is logged"),
        (EVERYTHING[:2], ("H", "div"), "Healthy: no failure was found; not judged: no KL or length is known; unknown names: H, div"),
    ],
)  # fmt: skip
def test_what_was_not_judged_is_said_beside_what_was_not_found(metrics, unknown, text):
    """In the first line, with the names that may be it; names that are known to tell nothing of it are not named."""
    assert verdict_of([], STEPS, metrics, unknown).text == text
    assert verdict_of([], STEPS, metrics, unknown).judged


@pytest.mark.parametrize(
    ("metrics", "unknown", "count", "brief"),
    [
        (EVERYTHING[1:], ("score_x",), 300, "Not judged: no reward is known; unknown names: score_x"),
        (("optim/lr",), (), 300, "Not judged: no reward, entropy, KL or length is logged"),
        (EVERYTHING, (), 1, "Not judged: only 1 step, at least 10 are needed"),
        (EVERYTHING, (), 9, "Not judged: only 9 steps, at least 10 are needed"),
        ((), (), 0, "Not judged: there is no training step"),
    ],
)
def test_a_run_without_a_reward_or_with_few_steps_is_not_judged(metrics, unknown, count, brief):
    """That nothing was found says nothing of it: neither healthy nor exit code 0."""
    verdict = verdict_of([], STEPS if count else {}, metrics, unknown, count=count)

    assert (verdict.state, verdict.brief) == (State.NOT_JUDGED, brief)
    assert (verdict.judged, verdict.exit_code, verdict.urgency) == (False, 3, WARNING)


def test_a_mean_reward_without_information_is_not_judged_until_it_moves():
    """A reward of 0 in every row was once called healthy."""
    still = Finding("reward_constant", "reward_uninformative", Severity.INFO, 12, 3, "", metric="reward/mean")
    moved = replace(still, step=40, seq=2, stage=Stage.RESOLVED)

    verdict = verdict_of([still], STEPS, EVERYTHING[:3], count=300)
    assert verdict.brief == "Not judged: the mean reward never moved; no length is logged"
    assert (verdict.missing, verdict.exit_code) == (("reward", "length"), 3)
    assert verdict_of([still, COLLAPSE], STEPS, EVERYTHING).text.endswith("not judged: the mean reward never moved")
    assert verdict_of([still, moved], STEPS, EVERYTHING, count=300).state is State.HEALTHY


def test_what_was_found_is_told_though_no_reward_was_read():
    """Beside that no reward was read."""
    verdict = verdict_of([COLLAPSE], STEPS, EVERYTHING[1:], ("score_x",), count=5)
    assert verdict.name == "collapsed@198"
    assert "not judged: no reward is known; unknown names: score_x" in verdict.text


def test_what_steps_showed_that_were_run_again_is_no_part_of_it():
    """Neither a collapse nor its end."""
    again = {1: range(1, 251), 2: range(100, 301)}

    assert verdict_of([COLLAPSE], again).name == "healthy"
    assert verdict_of([SPIKE, found("grad_spike", INFO, 60, Stage.RESOLVED, 140)], again).name == "damaged"
    over = found("grad_spike", INFO, 60, Stage.RESOLVED, 140, attempt=2)
    assert verdict_of([SPIKE, over], again).name == "recovered"


def dip(*after):
    """Records of a run whose reward falls at step 100 for 25 steps, and is then as given."""
    before = [0.7 + 0.02 * math.sin(1.3 * i) for i in range(100)]
    values = [*before, *[0.05] * 25, *after]
    return [
        StepRecord(i + 1, {"reward": v, "entropy": 0.6 if v > 0.1 else 3.0}, seq=i + 1) for i, v in enumerate(values)
    ]


def test_a_dip_that_recovered_ends_recovered_and_one_that_did_not_collapsed():
    """By the detectors that are shipped; the log, its import and the run that was watched say the same."""
    back = [0.7 + 0.02 * math.sin(1.7 * i) for i in range(120)]

    assert scan(dip(*back)).view.verdict.state is State.RECOVERED
    assert scan(dip(*[0.05] * 120)).view.verdict.state is State.COLLAPSED


@pytest.mark.parametrize(("planned", "state"), [(500, State.UNFINISHED), (221, State.HEALTHY), (-1, State.HEALTHY)])
def test_a_log_that_stops_before_its_trainer_was_done_is_unfinished(planned, state):
    """As far as it tells what its trainer meant to do."""
    records = [StepRecord(i + 1, {"reward": 0.3 + 0.002 * i + 0.01 * (i % 7)}, seq=i + 1) for i in range(220)]
    log = ImportedRun("r", "trl/grpo", "trainer-state", "state.json", records, config={"max_steps": planned})

    verdict = replay(log).view.verdict

    assert verdict.state is state
    assert ("the log stops at step 220 of 500" in verdict.text) is (state is State.UNFINISHED)


@pytest.mark.parametrize(
    ("state", "gone", "name"),
    [
        (RunState.FINISHED, False, "healthy"),
        (RunState.UNFINISHED, False, "unfinished"),
        (RunState.CRASHED, False, "killed@11"),
        (RunState.RUNNING, True, "killed@11"),
        (RunState.RUNNING, False, "healthy"),
    ],
)
def test_a_stored_run_is_judged_by_how_its_writer_left_it(state, gone, name, request):
    """One that says it runs and gives no sign was killed."""
    store = open_store(f"memory://{request.node.name}")
    writer = store.open_run(RunInfo("run"))
    writer.write([StepRecord(step, {"reward": 0.5}) for step in range(12)], Progress(judged=12))
    if state is not RunState.RUNNING:
        writer.finish(state, "why", 1.0)
    writer.close()

    verdict = stored_verdict(store, store.run("run"), gone=gone)

    assert verdict.name == name
    assert verdict.ongoing is (state is RunState.RUNNING and not gone)


@pytest.mark.parametrize(
    ("state", "judged", "headline"),
    [
        (RunState.RUNNING, 60, "Healthy at step 60: no failure was found."),
        (RunState.RUNNING, 52, "Healthy at step 60: no failure was found."),  # those that are judged together
        (RunState.RUNNING, 40, "Healthy before step 41: no failure was found, later steps are not judged yet."),
        (RunState.FINISHED, 52, "Healthy before step 53: no failure was found, later steps are not judged yet."),
        (RunState.FINISHED, 0, "Not judged: its rows were not searched for failures yet."),
        (RunState.RUNNING, 0, "Not judged: its rows were not searched for failures yet."),
        (
            RunState.CRASHED,
            40,
            "Killed at step 60: why; until then healthy before step 41: no failure was found, later steps are not judged yet.",
        ),
    ],
)
def test_no_step_is_called_healthy_that_was_not_searched_for_failures(state, judged, headline, request):
    """A judge that lags, or died with its process, leaves rows of which nothing is known."""
    store = open_store(f"memory://{request.node.name}")
    writer = store.open_run(RunInfo("run"))
    rows = [StepRecord(s, {"reward": 0.5 if s < 55 else math.nan, "entropy": 1.0}, ts=float(s)) for s in range(1, 61)]
    writer.write(rows, Progress(judged=judged) if judged else None)
    if state is not RunState.RUNNING:
        writer.finish(state, "why", 1.0)
    writer.close()
    run = store.run("run")

    assert headline_of(*stored_explanation(store, run)) == headline
    assert view_of_run(store, run).headline == headline


@pytest.mark.parametrize(("rows_per_second", "waits"), [(100, None), (5, 11)])
def test_rows_of_the_newest_seconds_of_a_live_run_may_wait(rows_per_second, waits):
    """A fast run is stored and judged some dozen rows at a time."""
    store = open_store(f"memory://waits-{rows_per_second}")
    writer = store.open_run(RunInfo("run"))
    rows = [StepRecord(s, {"reward": 0.5}, ts=100.0 + s / rows_per_second) for s in range(1, 61)]
    writer.write(rows, Progress(judged=10))
    run = store.run("run")

    assert unjudged_from(store, run, ending_of(run)) == waits
    assert unjudged_from(store, run, ending_of(run, gone=True)) == 11


def test_the_many_rows_of_an_open_step_wait_for_its_end():
    """Those of all ranks, over the seconds that the step takes; the steps after it are not many either."""
    store = open_store("memory://open-step")
    writer = store.open_run(RunInfo("run"))
    writer.write([StepRecord(step, {"reward": 0.5}, ts=float(step)) for step in range(1, 61)], Progress(judged=60))
    writer.write([StepRecord(61, {f"m{rank}": 0.5}, ts=61.0 + rank, rank=rank) for rank in range(200)])
    run = store.run("run")
    assert unjudged_from(store, run, ending_of(run)) is None

    writer.write([StepRecord(step, {"reward": 0.5}, ts=200.0 + step) for step in range(62, 80)])
    run = store.run("run")
    assert unjudged_from(store, run, ending_of(run)) == 61


def test_a_run_is_recovered_as_far_as_it_was_searched():
    """What came later may have failed again."""
    store = open_store("memory://recovered-as-far")
    writer = store.open_run(RunInfo("run"))
    writer.write([StepRecord(step, {"reward": 0.5}) for step in range(300)])
    writer.write([SPIKE, SPIKE_OVER], Progress(judged=200))
    writer.finish(RunState.FINISHED, "", 1.0)
    writer.close()
    verdict = stored_verdict(store, store.run("run"))

    assert verdict.state is State.RECOVERED
    assert verdict.brief.startswith("Recovered before step 200: ")
    assert verdict.brief.endswith(", later steps are not judged yet")


def test_a_run_whose_findings_were_stored_without_a_position_was_judged():
    """As earlier versions imported logs."""
    store = open_store("memory://imported-before")
    writer = store.open_run(RunInfo("run"))
    writer.write([*(StepRecord(step, {"reward": 0.5}) for step in range(300)), COLLAPSE])
    writer.finish(RunState.FINISHED, IMPORTED, 1.0)
    writer.close()

    assert stored_verdict(store, store.run("run")).state is State.COLLAPSED


def test_a_recovery_that_is_stored_is_read_again():
    """What began, eased and is over is one episode, of whichever process wrote it."""
    store = open_store("memory://recovery-is-stored")
    writer = store.open_run(RunInfo("run"))
    writer.write([StepRecord(step, {"reward": 0.5}) for step in range(300)])
    writer.write([SPIKE, replace(SPIKE_OVER, message="recovered at step 102 after 42 steps")])
    writer.finish(RunState.FINISHED, "", 1.0)
    writer.close()

    verdict = stored_verdict(store, store.run("run"))

    assert (verdict.name, verdict.level, verdict.urgency) == ("recovered", CRITICAL, WARNING)


def test_every_face_tells_of_the_recovery(tmp_path):
    """What eased and is over stands beside what was found: in the shell, in the report and in JSON."""
    from typer.testing import CliRunner

    from rlwatch.cli.app import app

    log, back = tmp_path / "dip.jsonl", [0.7 + 0.02 * math.sin(1.7 * i) for i in range(120)]
    rows = ({"step": record.step, **record.metrics} for record in dip(*back))
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def said(*arguments):
        return " ".join(CliRunner().invoke(app, [*map(str, arguments)]).stdout.split())

    said("import", log, "--run-id", "run-1", "--store", tmp_path / "store")
    document = json.loads(CliRunner().invoke(app, ["scan", str(log), "--format", "json"]).stdout)

    critical = {told["kind"] for told in document["findings"] if told["severity"] == "critical"}
    messages = [told["message"] for told in document["recoveries"] if told["kind"] in critical]
    over = [message for message in messages if message.startswith("recovered at step ")]
    assert over
    for text in (
        said("scan", "-v", log),
        said("show", "run-1", "--findings", "--store", tmp_path / "store"),
        said("report", "run-1", "--store", tmp_path / "store", "--format", "md", "-o", "-"),
    ):
        assert over[0][:30] in text
        assert "Recovered: " in text


@pytest.mark.parametrize("kept", [True, False])
def test_the_command_rollback_is_advised_where_the_run_keeps_snapshots(kept):
    """Elsewhere only the trainer's own checkpoints are."""
    findings = [Finding("nonfinite", "nonfinite", Severity.CRITICAL, 40, 40, "the loss is NaN", seq=1)]
    events = [Event("snapshots", 0, {"every": 10})] if kept else []
    diagnosis = diagnosis_of(findings, {1: range(1, 60)}, events=events, source="trl/grpo")
    (back,) = {action.id: action for action in diagnosis.causes[0].actions if action.id == "roll-back"}.values()

    assert back.options.get("rlwatch") == ("rlwatch command RUN rollback" if kept else None)
    assert "resume_from_checkpoint" in back.options["trl"]
