"""SkyRL and AReaL, against stand-ins of their trainers (``driven_trainers``)."""

import sys
import time
import uuid
from types import SimpleNamespace

import pytest
from driven_trainers import ARealTrainer, SkyRLTrainer, batch_of

from rlwatch.errors import ConfigError
from rlwatch.integrations import areal, skyrl
from rlwatch.records import Command, CommandStatus
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def ray(monkeypatch):
    """Answers of workers are there at once."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer: answer))


def rows_of(store):
    (run,) = store.runs()
    rows = {}
    for record in store.records(run.run_id):
        rows.setdefault(record.step, {}).update(record.metrics)
    return run, rows


def ask(store, run, wanted):
    """Send commands, and wait until the run has them; kind -> id."""
    now, ids = time.time(), {}
    for kind, args in wanted:
        ids[kind] = uuid.uuid4().hex
        store.submit(Command(ids[kind], run.info.run_id, kind, args, created_at=now, expires_at=now + 600))
    while wanted and store.commands(run.info.run_id, CommandStatus.QUEUED) and time.time() < now + 20:
        time.sleep(0.02)
    while wanted and not run.has_commands() and time.time() < now + 20:
        time.sleep(0.02)
    return ids


def ordered(trainer, where, commands):
    """Train with ``commands`` (kind, args), each given at the end of its step; their answers by kind."""
    run = skyrl.watch(trainer, store=str(where / "store"))
    store, asked = open_store(str(where / "store")), {}

    class Asks:
        def __getattr__(self, name):
            return self.on_step_end if name == "on_step_end" else lambda *_: None

        def on_step_end(self, _trainer, given, _control):
            asked.update(ask(store, run, commands.get(given.global_step, ())))

    trainer.callbacks.insert(0, Asks())
    trainer.run()
    answers = {one.command_id: one for one in store.commands(run.info.run_id)}
    return {kind: answers[one] for kind, one in asked.items()}


def test_skyrls_rows_and_batches_are_recorded_with_the_run_that_its_configuration_names(tmp_path):
    """Tokens of the loss without padding rows and those of tools, before SkyRL scales advantages."""
    trainer = SkyRLTrainer(tmp_path / "ckpt", steps=2)
    skyrl.watch(trainer, store=str(tmp_path / "store"))
    trainer.run()
    run, rows = rows_of(open_store(str(tmp_path / "store")))
    data = batch_of(2)
    own = data["loss_mask"][:4].bool()

    assert (run.project, run.name, run.source, str(run.state)) == ("math", "sky", "skyrl", "finished")
    assert list(rows) == [1, 2]
    row = rows[2]
    assert row["reward/avg_raw_reward"] == row["reward/mean"] == 0.75
    assert row["policy/logp_mean"] == pytest.approx(float(data["action_log_probs"][:4][own].mean()), rel=1e-5)
    assert row["policy/kl_ref_k1"] == pytest.approx(0.1, rel=1e-4)
    assert row["mismatch/logp_absdiff"] == pytest.approx(0.05, rel=1e-4)
    assert row["adv/max"] == 1.0
    assert row["len/mean"] == 17 / 4
    assert row["reward/zero_std_frac"] == 0.5
    assert "rlwatch/errors" not in row


def test_a_crash_of_skyrl_is_recorded_and_raised(tmp_path):
    """With what was measured before."""
    trainer = SkyRLTrainer(tmp_path / "ckpt", fails=2)
    skyrl.watch(trainer, store=str(tmp_path / "store"))
    with pytest.raises(RuntimeError, match="a worker died"):
        trainer.run()
    store = open_store(str(tmp_path / "store"))
    run, rows = rows_of(store)

    assert str(run.state) == "crashed"
    assert "policy/logp_mean" in rows[2]
    assert [one.kind for one in store.events(run.run_id)].count("exception") == 1


def test_commands_act_between_update_and_the_sending_of_weights(tmp_path):
    """A checkpoint is saved, the training returns to it, and the next batch is sampled with its weights."""
    trainer = SkyRLTrainer(tmp_path / "ckpt", steps=7)
    answers = ordered(
        trainer,
        tmp_path,
        {
            2: [("save-checkpoint", {})],
            4: [("rollback", {"to": 2}), ("set-kl-coef", {"value": 0.5}), ("lower-lr", {"scale": 0.1})],
            5: [("reset-reference", {"optimizer": "keep"})],
            6: [("stop", {"save": "no"})],
        },
    )

    assert {kind: one.status for kind, one in answers.items()} == dict.fromkeys(answers, CommandStatus.DONE), answers[
        "rollback"
    ].result
    assert trainer.dispatch.sent == [1.0, 2.0, 3.0, 2.0, 3.0, 4.0]
    assert trainer.dispatch.algorithm == {"kl_loss_coef": 0.5}
    assert trainer.dispatch.used == pytest.approx([1.0, 0.5, 0.25, 0.125, 0.00625, 0.003125])
    assert trainer.resets == [5]


def test_what_skyrl_cannot_do_is_refused_with_the_reason(tmp_path):
    """No checkpoint, no reference, a frozen schedule."""
    trainer = SkyRLTrainer(tmp_path / "ckpt", steps=3, use_kl_loss=False)
    trainer.ref_model = None
    asked = [
        ("rollback", {"to": 7}),
        ("reset-reference", {"optimizer": "keep"}),
        ("set-kl-coef", {"value": 1.0}),
        ("lower-lr", {"scale": 0.5, "freeze": "yes"}),
    ]
    answers = ordered(trainer, tmp_path, {2: asked})
    said = {kind: one.result for kind, one in answers.items()}

    assert {one.status for one in answers.values()} == {CommandStatus.REJECTED}
    assert "no snapshot of step 7" in said["rollback"]
    assert "no reference" in said["reset-reference"]
    assert "no KL term" in said["set-kl-coef"]
    assert "frozen" in said["lower-lr"]


@pytest.mark.parametrize("watch", [skyrl.watch, areal.watch])
def test_a_trainer_of_another_kind_or_watched_twice_is_refused_with_one_error(watch, tmp_path):
    """It names what is missing, before a run is begun."""
    with pytest.raises(ConfigError, match=r"cannot be watched .*has no train"):
        watch(object(), store=str(tmp_path / "none"))
    trainer = SkyRLTrainer(tmp_path / "ckpt") if watch is skyrl.watch else ARealTrainer()
    run = watch(trainer, store=str(tmp_path / "store"))
    with pytest.raises(ConfigError, match="watched already"):
        watch(trainer, store=str(tmp_path / "store"))
    run.finish()


def test_areals_rows_are_recorded_and_commands_act_while_rollouts_are_paused(tmp_path):
    """Save at one step, stop at a later one; a roll-back is refused with the reason."""
    trainer = ARealTrainer(steps=6)
    run = areal.watch(trainer, store=str(tmp_path))
    store, asked = open_store(str(tmp_path)), {}
    at = {1: ("save-checkpoint", {}), 2: ("rollback", {"to": 1}), 3: ("stop", {"save": "no"})}
    inner = trainer.stats_logger.commit

    def commit(epoch, step, global_step, data):
        inner(epoch, step, global_step, data)
        asked.update(ask(store, run, [at[global_step + 1]] if global_step + 1 in at else []))

    trainer.stats_logger.commit = commit
    trainer.train()
    known, rows = rows_of(store)
    answers = {one.command_id: one for one in store.commands(known.run_id)}

    assert (known.project, known.name, known.source, str(known.state)) == ("gsm8k", "t1", "areal", "finished")
    assert list(rows) == [0, 1, 2, 3]
    assert "n__count" not in rows[0]
    assert trainer.saved == trainer.recovers == [1]
    assert answers[asked["rollback"]].status is CommandStatus.REJECTED
    assert answers[asked["stop"]].finished_step == 3


def test_areal_with_a_driver_on_each_rank_records_and_takes_no_commands(tmp_path, caplog):
    """One warning; a crash is recorded."""
    trainer = ARealTrainer(fails=2)
    trainer.scheduler = None
    areal.watch(trainer, store=str(tmp_path))
    with pytest.raises(RuntimeError, match="a worker died"):
        trainer.train()
    run, rows = rows_of(open_store(str(tmp_path)))

    assert "SPMD" in caplog.text
    assert str(run.state) == "crashed"
    assert list(rows) == [0, 1]
