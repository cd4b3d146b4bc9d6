"""``rlwatch.init`` and the run it gives: what a training loop of one's own sees."""

import json
import logging
import math

import numpy as np
import pytest
import torch

import rlwatch
from rlwatch.alerts.rules import Rule
from rlwatch.control.commands import request
from rlwatch.errors import ConfigError, RunLockedError, StoreError, StoreURLError
from rlwatch.monitor.forecasting import OFF
from rlwatch.monitor.judge import without_forecasts
from rlwatch.records import AlertState, CommandStatus, OutboxStatus, RunState
from rlwatch.store.url import open_store
from rlwatch.testing.webhook_receiver import WebhookReceiver


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    return f"memory://{tmp_path}" if request.param == "memory" else str(tmp_path / "runs")


def series(store, run, name):
    got = open_store(store).series(run.info.run_id, [name])[name]
    return list(zip(got.steps.tolist(), got.values.tolist(), strict=True))


def test_what_is_logged_is_stored(store):
    """Floats and tensors, steps in any order, NaN and infinities kept apart."""
    with rlwatch.init(project="math", name="seed3", store=store, config={"lr": 1e-6}) as run:
        run.log({"entropy": 0.7, "grad_norm": torch.tensor(1.5)}, step=1)
        run.log({"entropy": math.nan, "grad_norm": math.inf}, step=2)
        run.log({"entropy": -math.inf}, step=3)
        run.log({"entropy": 0.1}, step=2)

    steps, values = zip(*series(store, run, "entropy"), strict=True)
    assert steps == (1, 2, 3, 2)
    assert repr(values) == "(0.7, nan, -inf, 0.1)"
    assert series(store, run, "grad_norm") == [(1, 1.5), (2, math.inf)]
    info = open_store(store).run(run.info.run_id)
    assert (info.project, info.name, info.state, info.config["lr"]) == ("math", "seed3", RunState.FINISHED, 1e-6)


def test_an_exception_is_the_runs_end(store):
    """It passes on unchanged, and the store knows the cause."""
    run = rlwatch.init(store=store)

    def train():
        with run:
            run.log({"entropy": 0.7}, step=1)
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        train()

    opened = open_store(store)
    info = opened.run(run.info.run_id)
    assert (info.state, info.state_reason) == (RunState.CRASHED, "ZeroDivisionError: division by zero")
    assert [event.kind for event in opened.events(run.info.run_id)] == ["exception"]


@pytest.mark.parametrize("step", [-1, 1.5, "7", None])
def test_a_bad_step_is_counted_and_training_goes_on(store, step):
    """Set-up is over: nothing raises."""
    with rlwatch.init(store=store) as run:
        run.log({"entropy": 0.6}, step=2)
        run.log({"entropy": 0.7}, step=step)

    assert run.counters["bad_records"] == 1
    assert series(store, run, "entropy") == [(2, 0.6)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [-1, 0.5, "7", None, float("nan")])
def test_a_step_that_is_none_is_refused_at_the_first_call(store, step, rank):
    """Else the whole run would be lost row by row. On every rank, so that none waits for another; only once."""
    with rlwatch.init(store=store, rank=rank) as run:
        with pytest.raises(ConfigError, match=r"run\.log: step must be an integer >= 0, got .*; give the trainer's"):
            run.log({"entropy": 0.7}, step=step)
        run.log({"entropy": 0.7}, step=step)


def test_whole_floats_are_steps(store):
    """``epoch * n / b``, numpy's, and what JSON gave back."""
    with rlwatch.init(store=store) as run:
        for step in (1.0, 2 * 8 / 4, np.float64(7.0)):
            run.log({"entropy": 0.7}, step=step)

    assert [step for step, _ in series(store, run, "entropy")] == [1, 4, 7]


def test_a_metric_that_is_text_is_counted_and_the_others_are_kept(store, caplog):
    """With one warning, however often it happens."""
    with caplog.at_level(logging.WARNING, "rlwatch"), rlwatch.init(store=store) as run:
        for step in range(3):
            run.log({"entropy": 0.7, "mode": "train"}, step=step)

    assert run.counters["bad_values"] == 3
    assert len([r for r in caplog.records if "'mode'" in r.message]) == 1
    assert len(series(store, run, "entropy")) == 3


def test_metrics_that_are_no_mapping_are_counted(store):
    """Whatever a loop hands over by mistake."""
    with rlwatch.init(store=store) as run:
        run.log(None, step=1)
        run.log(["entropy"], step=1)

    assert run.counters["bad_records"] == 2


def test_a_full_queue_drops_nothing_that_the_journal_has_and_counts_the_rest(store, caplog):
    """Training is never kept waiting."""
    run = rlwatch.init(store=store, queue_size=5)
    run._engine.writer._interval = 60.0
    run.flush()
    with caplog.at_level(logging.WARNING, "rlwatch"):
        for step in range(100):
            run.log({"entropy": 0.5}, step=step)
    run._engine.writer._wake.set()
    run.finish()

    stored = len(series(store, run, "entropy"))
    assert stored + run.counters["dropped"] == 100
    if run._engine.intake.journal is not None:
        assert (stored, run.counters["dropped"]) == (100, 0)
        return
    assert run.counters["dropped"] > 0
    assert len([r for r in caplog.records if "queue is full" in r.message]) == 1


def test_other_ranks_are_inert(tmp_path):
    """Rank 0 writes; the others must not even open the store."""
    run = rlwatch.init(store=str(tmp_path / "runs"), rank=1, world_size=2)
    run.log({"entropy": 0.7}, step=1)
    run.event("note")
    run.finish()

    assert not run.active
    assert run.commands() == []
    assert not (tmp_path / "runs").exists()


def test_the_rank_is_read_from_the_environment(tmp_path, monkeypatch):
    """As torchrun sets it."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")

    assert not rlwatch.init(store=str(tmp_path / "runs")).active


def test_a_second_writer_is_refused_before_training_starts(store):
    """Two processes must not interleave one run."""
    with rlwatch.init(store=store, run_id="same") as run:
        with pytest.raises(RunLockedError, match="same"):
            rlwatch.init(store=store, run_id="same")
        run.log({"entropy": 0.7}, step=1)

    assert len(series(store, run, "entropy")) == 1


def test_each_process_start_is_an_attempt(store):
    """The same run goes on."""
    for step in (1, 2):
        with rlwatch.init(store=store, run_id="again") as run:
            run.log({"entropy": float(step)}, step=step)

    records = open_store(store).records("again")
    assert [(r.attempt, r.seq, r.step) for r in records] == [(1, 1, 1), (2, 2, 2)]


def test_the_run_is_remembered_beside_the_checkpoints(store, tmp_path):
    """Training resumed from the same output directory continues its run."""
    out = tmp_path / "checkpoints"
    for step in (1, 2):
        with rlwatch.init(store=store, output_dir=out) as run:
            run.log({"entropy": 0.5}, step=step)
    fresh = rlwatch.init(store=store, output_dir=out, resume="never")
    fresh.finish()

    assert json.loads((out / "rlwatch.json").read_text())["run_id"] == fresh.info.run_id
    assert run.info.attempt == 2
    assert fresh.info.run_id != run.info.run_id


def test_a_new_training_in_an_old_directory_is_a_new_run(store, tmp_path):
    """Its first step tells. The old run stays as it was, to the last byte of what is known of it."""
    out = tmp_path / "checkpoints"
    with rlwatch.init(store=store, output_dir=out, config={"lr": 1e-5}) as old:
        for step in range(1, 61):
            old.log({"entropy": 0.5}, step=step)
    place = open_store(store)
    before = place.run(old.info.run_id), series(store, old, "entropy")

    with rlwatch.init(store=store, output_dir=out, config={"lr": 1e-4}) as new:
        assert new.active
        new.event("note", text="before the first step")
        new.log({"entropy": 0.4}, step=1)

    assert new.info.run_id != old.info.run_id
    assert new.info.attempt == 1
    assert (place.run(old.info.run_id), series(store, old, "entropy")) == before
    assert [event.kind for event in place.events(new.info.run_id) if event.kind == "note"] == ["note"]
    assert json.loads((out / "rlwatch.json").read_text())["run_id"] == new.info.run_id


def test_a_training_that_never_began_leaves_the_old_run_as_it_was(store, tmp_path):
    """Nothing is recorded of it; where it died, a run of its own says so."""
    with rlwatch.init(store=store, output_dir=tmp_path) as old:
        old.log({"entropy": 0.5}, step=1)
    before = open_store(store).runs()
    rlwatch.init(store=store, output_dir=tmp_path).finish()
    assert open_store(store).runs() == before

    with pytest.raises(RuntimeError), rlwatch.init(store=store, output_dir=tmp_path):
        raise RuntimeError("out of memory")
    (crashed,) = [run for run in open_store(store).runs() if run.run_id != old.info.run_id]
    assert crashed.state is RunState.CRASHED


def test_a_trainer_may_say_that_it_resumed(store, tmp_path):
    """Where its first row comes late, the step alone would not tell."""
    runs = []
    for resumed in (None, True, False):
        with rlwatch.init(store=store, output_dir=tmp_path) as run:
            run.decide(resumed=resumed)
            run.log({"entropy": 0.5}, step=10)
        runs.append((run.info.run_id, run.info.attempt))

    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert [attempt for _, attempt in runs] == [1, 2, 1]


def test_a_run_introduces_itself_once_on_one_line(store, tmp_path, capfd):
    """Its id, the store and the next command; after it is known which run it is."""
    for _ in range(2):
        with rlwatch.init(store=store, output_dir=tmp_path) as run:
            run.introduce()
            run.log({"entropy": 0.5}, step=1)
            run.log({"entropy": 0.5}, step=2)
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"rlwatch: run {run.info.run_id}, recorded in ")
        assert line.endswith(f"; rlwatch show {run.info.run_id} --store {run.where}" if run.where else "in memory")


def test_run_id_wins_over_the_environment_and_that_over_what_is_remembered(store, tmp_path, monkeypatch):
    """The nearest word counts."""
    (tmp_path / "rlwatch.json").write_text('{"run_id": "remembered"}')

    def chosen(**kwargs):
        run = rlwatch.init(store=store, output_dir=tmp_path, **kwargs)
        run.finish()
        return run.info.run_id

    assert chosen() == "remembered"
    monkeypatch.setenv("RLWATCH_RUN_ID", "environment")
    assert chosen() == "environment"
    assert chosen(run_id="argument") == "argument"


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"store": "mysql://host/db"}, StoreURLError, "mysql"),
        ({"resume": "maybe"}, ConfigError, "'maybe'"),
        ({"resume": "must"}, ConfigError, "no run_id was given"),
        ({"run_id": "../escape"}, StoreError, "escape"),
    ],
)
def test_set_up_errors_are_loud(tmp_path, kwargs, error, message):
    """What was wrong and the value got, before training starts."""
    with pytest.raises(error, match=message):
        rlwatch.init(**{"store": str(tmp_path / "runs"), **kwargs})


def test_a_remembered_id_that_cannot_be_read_is_loud(tmp_path):
    """A torn file must not become a new run by itself."""
    (tmp_path / "rlwatch.json").write_text('{"run_')

    with pytest.raises(ConfigError, match=r"rlwatch\.json"):
        rlwatch.init(store=str(tmp_path / "runs"), output_dir=tmp_path)


def test_secrets_in_the_configuration_are_blacked_out(store):
    """And nothing else is."""
    config = {
        "hub_token": "hf_abc",
        "nested": {"api_key": "sk", "max_tokens": 512},
        "pad_token": "<pad>",
        "model": object,
        "layers": (1, 2),
    }
    with rlwatch.init(store=store, config=config) as run:
        pass

    kept = open_store(store).run(run.info.run_id).config
    assert kept["hub_token"] == kept["nested"]["api_key"] == "[redacted]"
    assert kept["nested"]["max_tokens"] == 512
    assert kept["pad_token"] == "<pad>"
    assert kept["layers"] == [1, 2]
    assert "sk" not in json.dumps(kept)


def test_finishing_twice_and_logging_afterwards_do_nothing(store):
    """The end is the end."""
    run = rlwatch.init(store=store)
    run.log({"entropy": 0.5}, step=1)
    assert run.finish()
    assert run.finish(state="crashed", reason="again")
    run.log({"entropy": 0.5}, step=2)

    assert len(series(store, run, "entropy")) == 1
    assert open_store(store).run(run.info.run_id).state is RunState.FINISHED


def test_findings_and_alerts_are_stored_while_the_run_lives(store):
    """NaN in the log-probs: found on arrival, alerted, and the health says so."""
    with rlwatch.init(store=store) as run:
        for step in range(30):
            run.log({"entropy": 0.5, "grad_norm": 1.0, "loss": 0.1, "nonfinite/logp": 0.0}, step=step)
        for step in range(30, 33):
            bad = {"entropy": math.nan, "grad_norm": math.nan, "loss": math.nan, "nonfinite/logp": 64.0}
            run.log(bad, step=step)
        assert run.flush()
        opened = open_store(store)
        findings = opened.findings(run.info.run_id)
        alerts = opened.alerts(run.info.run_id)

        assert "nonfinite" in {f.kind for f in findings}
        assert {a.kind for a in alerts} >= {"nonfinite"}
        assert [f.kind for f in run.health().collapsing] == ["nonfinite"]


def test_a_command_reaches_the_loop_and_is_answered(store):
    """Claimed by the writer thread, carried out here, settled there."""
    with rlwatch.init(store=store) as run:
        run.commands()
        opened = open_store(store)
        sent = request(opened, run.info.run_id, "reset-reference", why="KL saturated")
        taken = []
        run._engine.mailbox._poll_due = 0.0
        while not taken:
            run.flush()
            taken = run.commands()
        taken[0].done("KL 0.3 -> 0.0", step=12)
        run.flush()
        (stored,) = opened.commands(run.info.run_id)

    assert stored.command_id == sent.command_id
    assert (stored.status, stored.finished_step) == (CommandStatus.DONE, 12)


def test_a_broken_disk_is_loud_at_set_up(tmp_path):
    """Not found out after a day of training."""
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(StoreError, match=str(tmp_path / "file")):
        rlwatch.init(store=str(tmp_path / "file"))


def test_an_unwritable_directory_is_loud_at_set_up():
    """The message names the directory; /proc refuses even root."""
    with pytest.raises(StoreError, match="/proc/rlwatch-runs"):
        rlwatch.init(store="/proc/rlwatch-runs")


def collapse(run, steps=40):
    for step in range(steps):
        bad = step >= 30
        run.log(
            {
                "entropy": math.nan if bad else 0.5,
                "grad_norm": math.nan if bad else 1.0,
                "nonfinite/logp": 64.0 if bad else 0.0,
            },
            step=step,
        )


def test_a_webhook_given_to_init_hears_of_the_crash(store):
    """From a log call to a signed delivery, through the outbox."""
    with WebhookReceiver() as receiver:
        with rlwatch.init(store=store, project="math", webhook_url=receiver.url) as run:
            collapse(run)
        told = [delivery.payload for delivery in receiver.deliveries]

    assert next(p["alert"]["kind"] for p in told if p["event"] == "firing") == "nonfinite"
    assert told[0]["run"] == {"id": run.info.run_id, "name": "", "project": "math", "source": ""}
    assert {m.status for m in open_store(store).outbox(run.info.run_id)} == {OutboxStatus.SENT}


def test_rules_of_the_caller_replace_all_others(store):
    """A rule that waits for longer than the run lasts fires nothing."""
    with rlwatch.init(store=store, rules=[Rule("patient", for_steps=1000)]) as run:
        collapse(run)

    assert {a.state for a in open_store(store).alerts(run.info.run_id)} == {AlertState.PENDING}


@pytest.mark.parametrize("url", ["ftp://host/hook", "not a url"])
def test_a_webhook_that_cannot_work_is_loud_at_set_up(store, url):
    """And no run is left behind."""
    with pytest.raises(ConfigError):
        rlwatch.init(store=store, webhook_url=url)

    assert open_store(store).runs() == []


def test_a_configuration_that_does_not_exist_is_loud_at_set_up(store, tmp_path):
    """Alerting that was asked for must work."""
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        rlwatch.init(store=store, config_file=tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("wanted", "in_file", "forecast"),
    [(None, "", True), (False, "", False), (None, "forecast = false", False), (True, "forecast = false", True)],
)
def test_forecasts_can_be_switched_off_by_the_caller_or_the_file(store, tmp_path, wanted, in_file, forecast):
    """The caller goes first; detectors judge either way, and the run says why there is no forecast."""
    (tmp_path / "own.toml").write_text(in_file)
    with rlwatch.init(store=store, config_file=tmp_path / "own.toml", forecast=wanted, system=False) as run:
        for step in range(60):
            run.log({"entropy": 0.5, "grad_norm": float("nan") if step == 50 else 1.0}, step=step)

    source = open_store(store)
    told = source.forecasts(run.info.run_id)
    assert {record.body.get("absent") == OFF for record in told} == {not forecast}
    assert (len(told) == 1) is not forecast
    assert without_forecasts(source.run(run.info.run_id)) is not forecast
    assert "nonfinite" in {finding.kind for finding in source.findings(run.info.run_id)}


def no_detectors():
    raise ConfigError("the detector's threshold must be > 0, got -1")


def a_file(tmp_path):
    (tmp_path / "taken").write_text("in the way")
    return tmp_path / "taken"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda _: {"detectors": no_detectors}, "the detector's threshold must be > 0, got -1"),
        (lambda _: {"queue_size": 0}, "queue_size must be >= 1, got 0"),
        (lambda _: {"queue_size": -5}, "queue_size must be >= 1, got -5"),
        (
            lambda _: {"detectors": []},
            "detectors must be a function that returns new detectors, such as `lambda: [MyDetector()]`, got []",
        ),
        (lambda _: {"detectors": lambda: 3}, "the function for detectors must return a list of them, got 3"),
        (
            lambda _: {"detectors": lambda: [3]},
            "a detector must have name, family, kinds, requires, update, arrival, notice (see rlwatch.ports.Detector), "
            "got 3",
        ),
        (lambda _: {"forecast": "no"}, "forecast must be True, False or None, got 'no'"),
        (
            lambda tmp_path: {"output_dir": a_file(tmp_path)},
            "the run's id cannot be kept in output_dir '{}/taken' (File exists); choose a directory that can be written",
        ),
        (
            lambda tmp_path: {"output_dir": a_file(tmp_path) / "under"},
            "the run's id cannot be kept in output_dir '{}/taken/under' (Not a directory); "
            "choose a directory that can be written",
        ),
    ],
)
def test_what_cannot_be_set_up_can_be_tried_again(store, tmp_path, wrong, says):
    """One clear error; the run is let go, so that the next try of this very process finds it free."""
    with pytest.raises(ConfigError) as raised:
        rlwatch.init(store=store, run_id="mended", **wrong(tmp_path))
    with rlwatch.init(store=store, run_id="mended") as run:
        run.log({"entropy": 0.5}, step=1)

    assert str(raised.value) == says.format(tmp_path)
    assert series(store, run, "entropy") == [(1, 0.5)]
    assert open_store(store).run("mended").state is RunState.FINISHED


def test_an_id_that_cannot_be_put_in_its_place_leaves_no_draft(store, tmp_path):
    """Written beside, then renamed: where that is refused nothing half-written stays, nor the lock of the run."""
    (tmp_path / "out" / "rlwatch.json" / "full").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"output_dir '.*out' \(Is a directory\)"):
        rlwatch.init(store=store, run_id="kept", output_dir=tmp_path / "out")
    rlwatch.init(store=store, run_id="kept").finish()

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rlwatch.json"]


@pytest.mark.parametrize(("variable", "rank"), [("", 0), ("two", 0), ("²", 0), ("-1", 0), ("0", 0), ("2", 2)])
def test_only_a_number_in_the_environment_is_a_rank(store, monkeypatch, variable, rank):
    """Whatever else a launcher leaves there is none: the process records as the only one."""
    monkeypatch.setenv("RANK", variable)
    run = rlwatch.init(store=store)
    run.finish()

    assert run.rank == rank
