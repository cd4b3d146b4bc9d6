"""What became of a run, in a word: from what was found and how it ended, the same for every kind of run."""

import json
import math
from dataclasses import replace

import pytest

from rlwatch.importers.base import ImportedRun
from rlwatch.records import Finding, RunInfo, RunState, Severity, Stage, StepRecord
from rlwatch.scanner import replay, scan
from rlwatch.store.url import open_store
from rlwatch.view import End, Ending, Word, diagnosis_of, explained, stored_verdict, verdict_of

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
        ([DRIFT], "healthy"),
        ([SPIKE, SPIKE_OVER], "recovered"),
        ([COLLAPSE, EASED], "recovered"),
        ([SPIKE], "damaged"),
        ([SPIKE, SPIKE_OVER, FALL], "damaged"),
        ([COLLAPSE], "collapsed@198"),
        ([SPIKE, SPIKE_OVER, COLLAPSE], "collapsed@198"),
        ([COLLAPSE, EASED, found("entropy_collapse", CRITICAL, 198, Stage.WORSENED, 260)], "collapsed@198"),
        ([found("no_signal", CRITICAL, 1)], "dead from the start"),
        ([found("never_learns", WARNING, 1)], "dead from the start"),
        ([found("no_signal", WARNING, 1)], "healthy"),
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
        "killed@240: CUDA error: out of memory; until then healthy: no failure was found"
    )
    assert verdict_of([SPIKE], STEPS, ending=KILLED).name == "killed@240"
    lost = verdict_of([COLLAPSE], STEPS, ending=KILLED)
    assert (lost.name, lost.text.endswith("; killed at step 240: CUDA error: out of memory")) == ("collapsed@198", True)


def test_a_run_that_goes_on_is_in_danger_or_so_far_so_good():
    """Nothing of it is lost yet, nothing is won."""
    assert verdict_of([COLLAPSE], STEPS, ending=GOES_ON).word is Word.IN_DANGER
    assert verdict_of([found("never_learns", WARNING, 1)], STEPS, ending=GOES_ON).word is Word.IN_DANGER
    assert verdict_of([], STEPS, ending=GOES_ON).text == "healthy so far: no failure was found"
    assert verdict_of([SPIKE, SPIKE_OVER], STEPS, ending=GOES_ON).text == (
        "recovered so far: gradient spike from step 60, over at step 102"
    )


def test_a_warning_that_is_over_is_told_as_over_and_asks_for_nothing():
    """Neither "no failure", nor a colour, nor a likely cause beside the word healthy; one that stands is all three."""
    over = found("reward_drop", INFO, 150, Stage.RESOLVED, 180)
    past, stands = verdict_of([FALL, over], STEPS), verdict_of([FALL, over, DRIFT], STEPS)
    assert past.text == (
        "healthy: nothing critical was found; over by now: the reward fell from step 150, over at step 180"
    )
    assert (past.level, past.urgency) == (WARNING, None)
    assert stands.text.startswith("healthy: nothing critical was found; warnings: ")
    assert stands.urgency is WARNING
    diagnosis = diagnosis_of([FALL], STEPS)
    assert diagnosis.causes[0].kind == "reward_drop"
    assert not explained(diagnosis, past).causes
    for verdict in (stands, verdict_of([FALL], STEPS), verdict_of([SPIKE, SPIKE_OVER], STEPS)):
        assert explained(diagnosis, verdict) is diagnosis


EVERYTHING = ("reward/mean", "policy/entropy", "policy/kl_ref", "len/mean")


@pytest.mark.parametrize(
    ("metrics", "unknown", "text"),
    [
        (EVERYTHING, (), "healthy: no failure was found"),
        (EVERYTHING, ("mine",), "healthy: no failure was found"),
        (EVERYTHING[:3], (), "healthy: no failure was found; not judged: no length is logged"),
        (EVERYTHING[:1], ("timing_s/gen",), "healthy: no failure was found; not judged: no entropy, KL or length is logged"),
        (EVERYTHING[:2], ("H", "div"), "healthy: no failure was found; not judged: no KL or length is known; unknown names: H, div"),
    ],
)  # fmt: skip
def test_what_was_not_judged_is_said_beside_what_was_not_found(metrics, unknown, text):
    """In the first line, with the names that may be it; names that are known to tell nothing of it are not named."""
    assert verdict_of([], STEPS, metrics, unknown).text == text
    assert verdict_of([], STEPS, metrics, unknown).judged


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

    assert scan(dip(*back)).view.verdict.word is Word.RECOVERED
    assert scan(dip(*[0.05] * 120)).view.verdict.word is Word.COLLAPSED


@pytest.mark.parametrize(("planned", "word"), [(500, Word.UNFINISHED), (221, Word.HEALTHY), (-1, Word.HEALTHY)])
def test_a_log_that_stops_before_its_trainer_was_done_is_unfinished(planned, word):
    """As far as it tells what its trainer meant to do."""
    records = [StepRecord(i + 1, {"reward": 0.5 + 0.01 * (i % 7)}, seq=i + 1) for i in range(220)]
    log = ImportedRun("r", "trl/grpo", "trainer-state", "state.json", records, config={"max_steps": planned})

    verdict = replay(log).view.verdict

    assert verdict.word is word
    assert ("the log stops at step 220 of 500" in verdict.text) is (word is Word.UNFINISHED)


@pytest.mark.parametrize(
    ("state", "gone", "name"),
    [
        (RunState.FINISHED, False, "healthy"),
        (RunState.UNFINISHED, False, "unfinished"),
        (RunState.CRASHED, False, "killed@9"),
        (RunState.RUNNING, True, "killed@9"),
        (RunState.RUNNING, False, "healthy"),
    ],
)
def test_a_stored_run_is_judged_by_how_its_writer_left_it(state, gone, name, request):
    """One that says it runs and gives no sign was killed."""
    store = open_store(f"memory://{request.node.name}")
    writer = store.open_run(RunInfo("run"))
    writer.write([StepRecord(step, {"reward": 0.5}) for step in range(10)])
    if state is not RunState.RUNNING:
        writer.finish(state, "why", 1.0)
    writer.close()

    verdict = stored_verdict(store, store.run("run"), gone=gone)

    assert verdict.name == name
    assert ("so far" in verdict.text) is (state is RunState.RUNNING and not gone)


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
        said("scan", log),
        said("show", "run-1", "--findings", "--store", tmp_path / "store"),
        said("report", "run-1", "--store", tmp_path / "store", "--format", "md", "-o", "-"),
    ):
        assert over[0][:30] in text
        assert "recovered: " in text
