"""verl's real v1 trainer class, hooked: its own checkpoint code over a real worker in this process, without Ray."""

import errno
import logging
import types
from concurrent.futures import wait
from contextlib import nullcontext

import pytest
import ray
import tiny_verl as tiny
import torch
import transfer_queue
from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tracking import Tracking

import rlwatch
from rlwatch.control.mailbox import PendingCommand
from rlwatch.control.policy import RunHealth
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.checkpoints import read_facts
from rlwatch.integrations.stages import tap_methods
from rlwatch.integrations.verl import attach as hooks
from rlwatch.integrations.verl import heartbeat
from rlwatch.integrations.verl.compat import missing_parts
from rlwatch.records import STAGES, Command, Finding, RunState, Severity
from rlwatch.store.url import open_store


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """No Ray here: what the group returns are the answers."""
    monkeypatch.setattr(ray, "get", lambda pending, timeout: list(pending))
    yield
    tiny.untap()


class Trainer(PPOTrainerSync):
    """verl's trainer around a worker that is there already; ``_setup`` is what would build it."""

    def __init__(self, policy, directory, *overrides, role="actor_rollout_ref"):
        self.config = tiny.config_of(policy, *overrides)
        with open_dict(self.config):
            self.config.trainer.default_local_dir = str(directory / "checkpoints")
            self.config.trainer.rlwatch = {"store": str(directory / "runs")}
        self.worker = tiny.make_worker(policy, *overrides, role=role)
        self.actor_rollout_wg = self.ref_policy_wg = tiny.LocalGroup(self.worker)
        self.use_reference_policy, self.use_critic, self.ref_in_actor = role == "actor_rollout_ref", False, False
        self.trainer_mode, self.checkpoint_callback = "sync", types.SimpleNamespace(on_save=lambda **_: None)
        self.train_dataloader = types.SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        self.checkpoint_manager = types.SimpleNamespace(update_weights=lambda step: None)
        self.total_training_steps, self.timing_raw = 100, {}

    def _setup(self):
        self.tokenizer = types.SimpleNamespace(eos_token_id=2)
        self._load_checkpoint()

    def step_to(self, step):
        """One update of the actor, as a step of ``fit`` would make it."""
        self.global_steps = step
        return tiny.update(self.worker, tiny.batch_of(step))


@pytest.fixture
def make(policy, tmp_path):
    made = []

    def build(*overrides, **kwargs):
        made.append(Trainer(policy, tmp_path, *overrides, **kwargs))
        return made[-1]

    yield build
    for trainer in made:
        driver = getattr(trainer, hooks.HELD, None)
        if driver is not None:
            driver.run.finish()


def driver_of(trainer):
    return getattr(trainer, hooks.HELD)


def started(trainer):
    """As after ``init`` and at the beginning of ``fit``."""
    trainer.init()
    hooks.tap_steps(trainer, driver_of(trainer))
    return driver_of(trainer)


def send(driver, kind, *, force=False, **args):
    """A person's command, and what became of it at the next boundary."""
    answers = []
    command = Command("c1", driver.run.info.run_id, kind, args, force, requested_by="ann@lab", why="a test")
    driver.run.commands = lambda **_: [PendingCommand(command, answers.append)] if not answers else []
    driver.run.has_commands = lambda **_: not answers
    driver.trainer.on_step_end()
    del driver.run.commands, driver.run.has_commands
    return answers[0]


def events(driver, kind):
    driver.run.flush()
    store = open_store(driver.trainer.config.trainer.rlwatch["store"])
    return [event for event in store.events(driver.run.info.run_id) if event.kind == kind]


def apart(trainer):
    return (tiny.log_probs(trainer.worker) - tiny.log_probs(trainer.worker, ref=True)).abs().max().item()


def test_the_class_is_hooked_at_three_places():
    """Subclasses of other modes inherit them; nothing else of the class is touched."""
    wrapped = {name for name, value in vars(PPOTrainer).items() if hasattr(value, "__wrapped__")}

    assert {"init", "fit", "_load_checkpoint"} <= wrapped
    assert "step" not in wrapped
    assert "fit" not in vars(PPOTrainerSync)


def test_a_trainer_without_rlwatch_is_left_alone(make):
    """Its worker is not attached, its instance has no hooks."""
    trainer = make()
    with open_dict(trainer.config):
        trainer.config.trainer.logger = ["console"]

    trainer.init()

    assert not hasattr(trainer, hooks.HELD)
    assert not hasattr(trainer.worker, "rlwatch")
    assert "on_step_end" not in vars(trainer)


def test_set_up_opens_the_run_before_the_models_are_built(make, monkeypatch):
    """What is configured wrongly stops a training that has not cost anything yet."""
    trainer = make()
    trainer.config.trainer.rlwatch = {"level": "everything"}
    monkeypatch.setattr(trainer, "_setup", lambda: pytest.fail("the models are being built"))

    with pytest.raises(ConfigError, match="level must be one of"):
        trainer.init()


def test_a_set_up_that_fails_is_the_end_of_the_run(make, monkeypatch):
    """Out of memory while the models load."""
    trainer = make()

    def fail():
        raise MemoryError("no room for the model")

    monkeypatch.setattr(trainer, "_setup", fail)
    with pytest.raises(MemoryError):
        trainer.init()

    (run,) = open_store(trainer.config.trainer.rlwatch["store"]).runs()
    assert (run.state, run.state_reason) == (RunState.CRASHED, "MemoryError: no room for the model")


def test_a_trainer_with_a_loop_of_its_own_logs_to_the_same_run(make):
    """Its ``fit`` calls no ``super``, so that only ``Tracking`` tells us that it began."""
    trainer = make()
    trainer.init()

    tracker = Tracking("math", "seed3", ["rlwatch"], trainer.config)

    assert tracker.logger["rlwatch"].run is driver_of(trainer).run
    tracker.finish()
    assert len(open_store(trainer.config.trainer.rlwatch.store).runs()) == 1


@pytest.mark.parametrize(("error", "longest"), [(None, hooks.ENDED_S), (ValueError("broke"), hooks.CRASHED_S)])
def test_the_end_waits_for_the_last_statistics_but_not_for_ever(make, monkeypatch, error, longest):
    """Longer where training ended well than where an exception wants out."""
    trainer = make()
    driver, waited = started(trainer), []
    monkeypatch.setattr(driver.statistics, "close", waited.append)

    def loop(_self):
        if error is not None:
            raise error

    with nullcontext() if error is None else pytest.raises(type(error)):
        hooks.watched_fit(loop)(trainer)

    assert waited == [longest]


def test_workers_without_rlwatch_cost_the_taps_only(make, caplog):
    """Installed on the driver's node alone: one warning, and the batch is still measured."""
    trainer = make()
    trainer.actor_rollout_wg = types.SimpleNamespace()

    with caplog.at_level(logging.WARNING, "rlwatch"):
        trainer.init()

    assert "the workers do not know rlwatch: install it in the environment of every node" in caplog.text
    assert driver_of(trainer).run.active
    assert heartbeat.current.error.startswith("workers: "), "the doctor hears of it too"
    trainer.on_step_end()


def test_the_stages_of_the_driver_are_timed(make):
    """What verl's trainer calls in a step, to the row that ends it."""
    trainer = make()
    driver = started(trainer)
    seen = []
    trainer._update_actor = lambda batch, metrics: seen.append(driver.run.stages.now()[0])
    tap_methods(trainer, {"_update_actor": "update"}, driver.error_boundary)
    for step in (1, 2):
        trainer.step_to(step)
        trainer._update_actor(None, {})
        trainer.on_step_end()
        trainer._save_checkpoint()
        driver.run.log({"actor/loss": 0.5}, step=step)
    driver.run.flush()
    store = open_store(trainer.config.trainer.rlwatch["store"])
    found = {batch.step: list(batch.columns["stage"]) for batch in store.spikes(driver.run.info.run_id, reason=STAGES)}

    assert seen == ["update", "update"]
    assert found == {1: ["update", "weight_sync", "checkpoint"], 2: ["update", "weight_sync", "checkpoint"]}
    assert "time/stage/weight_sync" in store.metric_names(driver.run.info.run_id)


def test_a_reset_at_a_step_is_in_the_checkpoints_from_then_on(make):
    """verl saves at step 1 (before), 2 (in the very step) and 3; a resume from each has the reference of its step."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    trainer._save_checkpoint()
    trainer.step_to(2)
    trainer._save_checkpoint()

    answer = send(driver, "reset-reference", optimizer="keep")
    assert (answer.status, answer.step) == ("done", 2)
    assert "reference = policy (26 tensors on 1 ranks), optimizer state kept" in answer.result
    trainer.step_to(3)
    trainer._save_checkpoint()
    distance = apart(trainer)
    assert distance > 0
    driver.run.finish()

    for step, expected in ((3, distance), (2, 0.0), (1, None)):
        again = make()
        with open_dict(again.config):
            again.config.trainer.resume_mode = "resume_path"
            path = f"{trainer.config.trainer.default_local_dir}/global_step_{step}"
            again.config.trainer.resume_from_path = path
        resumed = started(again)
        if expected is None:
            assert "reset at step 2 came after" in events(resumed, "reference_not_restored")[-1].body["reason"]
            assert apart(again) > 0
        else:
            restored = events(resumed, "reference_restored")[-1]
            assert (restored.step, restored.body["reset_step"]) == (step, 2)
            assert apart(again) == pytest.approx(expected, abs=1e-6)
            again.step_to(4)
            again._save_checkpoint()
            assert read_facts(resumed.checkpoints.here / "actor").step == 2, "a resumed run keeps it too"
        resumed.run.finish()
        tiny.untap()


def test_a_checkpoint_written_again_forgets_an_undone_reset(make):
    """Resumed from before the reset: the same step, saved anew, has the old reference."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    send(driver, "reset-reference")
    trainer._save_checkpoint()
    kept = driver.checkpoints.here / "actor" / "rlwatch_reference"
    assert kept.exists()
    driver.run.finish()

    tiny.untap()
    again = make()
    with open_dict(again.config):
        again.config.trainer.resume_mode = "disable"
    started(again)
    again.step_to(1)
    again._save_checkpoint()

    assert not kept.exists()


def other_ranks(kept):
    (kept / "world_size_1_rank_0.pt").rename(kept / "world_size_2_rank_0.pt")


def another_reset(kept):
    path = kept / "reference.json"
    path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0'))


def no_shards(kept):
    (kept / "world_size_1_rank_0.pt").unlink()


def no_facts(kept):
    (kept / "reference.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (other_ranks, "of another number of ranks"),
        (another_reset, "is not the reference of the reset at step 1"),
        (no_shards, "some ranks do not find their part"),
        (no_facts, "cannot be read"),
    ],
)
def test_a_reference_that_does_not_fit_is_not_restored(make, caplog, damage, reason):
    """Said, with the reason, and training goes on with verl's own reference."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    send(driver, "reset-reference")
    trainer._save_checkpoint()
    damage(driver.checkpoints.here / "actor" / "rlwatch_reference")
    driver.run.finish()

    tiny.untap()
    again = make()
    with caplog.at_level(logging.WARNING, "rlwatch"):
        resumed = started(again)
    (event,) = events(resumed, "reference_not_restored")

    assert "did not take up the reference" in caplog.text
    assert (event.step, reason in event.body["reason"]) == (1, True)
    assert apart(again) > 0


def no_space(_what, where):
    where.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_costs_the_copy_only(make, caplog, monkeypatch):
    """verl's checkpoint is there; what it lacks is said, and the next one tries again."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    send(driver, "reset-reference")

    with monkeypatch.context() as full:
        full.setattr(torch, "save", no_space)
        driver.checkpoints.saved()
    (event,) = events(driver, "reference_not_kept")
    assert not list((driver.checkpoints.here / "actor" / "rlwatch_reference").iterdir())
    trainer._save_checkpoint()

    assert "No space left" in event.body["reason"]
    assert caplog.text.count("did not keep the reference") == 1
    assert (driver.checkpoints.here / "actor" / "rlwatch_reference" / "reference.json").exists()


def test_lora_adapters_are_kept_too(make, policy):
    """The frozen adapter is a file of its own, and verl's checkpoint loads as if there had been none."""
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"]
    trainer = make(*lora, role="actor_rollout")
    trainer.use_reference_policy = True
    driver = started(trainer)
    trainer.step_to(1)
    assert send(driver, "reset-reference").status == "done"
    trainer.step_to(2)
    trainer._save_checkpoint()
    anchored = tiny.log_probs(trainer.worker, no_adapter=True)
    driver.run.finish()

    tiny.untap()
    again = make(*lora, role="actor_rollout")
    started(again)

    assert torch.equal(tiny.log_probs(again.worker, no_adapter=True), anchored)
    assert torch.equal(tiny.log_probs(again.worker), tiny.log_probs(trainer.worker))


def test_a_rate_is_raised_in_place_of_the_lowered_one_whose_limit_no_longer_counts_but_not_in_a_collapse(make):
    """Twice the schedule's, also after the step up to which it would have been lowered."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    rate = trainer.worker.actor.engine.optimizer.param_groups[0]["lr"]
    assert send(driver, "lower-lr", scale=0.5, until=3).status == "done"
    assert send(driver, "raise-lr", scale=2.0).status == "done"
    trainer.step_to(4)
    trainer.on_step_end()

    assert trainer.worker.actor.engine.optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * rate)
    collapse = Finding("d", "entropy_collapse", Severity.CRITICAL, 4, 3, "it fell")
    driver.run.health = lambda: RunHealth((collapse,))
    assert "would speed the collapse up" in send(driver, "raise-lr", scale=3.0).result
    driver.run.finish()


def test_a_set_coefficient_and_a_lowered_rate_outlive_the_process(make):
    """verl keeps the rate in the optimizer's state; the coefficient would be its configuration's again."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    assert send(driver, "set-kl-coef", value=0.25).status == "done"
    assert send(driver, "lower-lr", scale=0.5, until=5).status == "done"
    trainer._save_checkpoint()
    rate = trainer.worker.actor.engine.optimizer.param_groups[0]["lr"]
    driver.run.finish()

    tiny.untap()
    again = make()
    resumed = started(again)

    assert again.worker.rlwatch_kl_coef()["value"] == 0.25
    assert again.worker.actor.engine.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    again.step_to(5)
    again.on_step_end()
    assert again.worker.actor.engine.optimizer.param_groups[0]["lr"] == pytest.approx(2 * rate)
    assert events(resumed, "command")[-1].body["by"] == "rlwatch"


def test_stop_saves_and_leaves_verls_loop(make):
    """No step is left after this one; a checkpoint is there unless it was not wanted."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(3)

    assert "training ends with step 3, after saving a checkpoint" in send(driver, "stop").result
    assert trainer.total_training_steps == 3
    assert driver.checkpoints.here.exists()


def test_save_checkpoint_saves_once_a_step(make, monkeypatch):
    """verl has just saved by its own schedule: that is the checkpoint."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    trainer._save_checkpoint()
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: pytest.fail("saved twice"))

    assert send(driver, "save-checkpoint").result.endswith("global_step_1")


def test_how_many_checkpoints_verl_keeps(make):
    """All, a number, or one by the older setting: a save may cost an older one during a collapse."""
    trainer = make()
    driver = started(trainer)

    assert driver.checkpoints.kept() is None
    with open_dict(trainer.config):
        trainer.config.trainer.max_actor_ckpt_to_keep = 3
    assert driver.checkpoints.kept() == 3
    with open_dict(trainer.config):
        trainer.config.trainer.remove_previous_ckpt_in_save = True
    assert driver.checkpoints.kept() == 1


def test_a_failing_save_is_answered_and_training_goes_on(make, monkeypatch):
    """A full disk."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)

    def fail(*_args):
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer, "_save_checkpoint", fail)
    assert send(driver, "save-checkpoint").status == "failed"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_reference_policy": False}, "there is no reference: neither"),
        ({"ref_policy_wg": object()}, "a worker group of its own"),
    ],
)
def test_a_reset_that_cannot_be_is_rejected_with_the_reason(make, change, reason):
    """And changes nothing."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    for name, value in change.items():
        setattr(trainer, name, value)

    answer = send(driver, "reset-reference")

    assert answer.status == "rejected"
    assert reason in answer.result
    assert trainer.worker.actor.engine.optimizer.state


def test_the_reason_of_a_worker_is_the_answer(make):
    """A policy that is not finite, on any rank."""
    trainer = make()
    driver = started(trainer)
    trainer.step_to(1)
    with torch.no_grad():
        next(trainer.worker.actor.engine.module.parameters()).to_local().view(-1)[0] = torch.nan

    assert "is not finite" in send(driver, "reset-reference").result


def test_kl_in_the_reward_is_weighed_by_the_driver(make):
    """``use_kl_in_reward``: the coefficient is here; without any KL term there is none."""
    trainer = make("actor_rollout_ref.actor.use_kl_loss=False")
    driver = started(trainer)

    assert "there is no KL term" in send(driver, "set-kl-coef", value=0.1).result
    trainer.kl_ctrl_in_reward = types.SimpleNamespace(value=0.001)
    assert send(driver, "set-kl-coef", value=0.1).status == "done"
    assert trainer.kl_ctrl_in_reward.value == 0.1


def test_a_hook_that_breaks_is_a_warning(make, caplog):
    """The error boundary holds: verl's own method runs, returns what it returns, and training goes on."""
    trainer = make()
    started(trainer)
    trainer.global_steps = "no number"

    with caplog.at_level(logging.WARNING, "rlwatch"):
        trainer.on_step_end()

    assert caplog.text.count("training goes on") == 1


def test_another_trainer_keeps_its_scalars():
    """A trainer we do not know is not hooked; it says why, and Tracking records what it logs."""

    class PPOTrainer:
        def fit(self):
            """As of verl 1.0."""

    module = types.SimpleNamespace(PPOTrainer=PPOTrainer)

    assert hooks.install_trainer(module) == "scalars only: PPOTrainer has no init"
    assert not hasattr(PPOTrainer.fit, "__wrapped__")


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0.dev0", "1.0"])
def test_no_version_is_refused_for_its_number(version, installed, caplog, make):
    """The same code under another number is watched the same: every part of it is there."""
    installed("verl", version)

    assert missing_parts(PPOTrainer) == {}
    with caplog.at_level(logging.WARNING, "rlwatch"):
        driver = started(make())
    assert driver.controller is not None
    assert caplog.text == ""


def test_a_trainer_without_a_part_has_the_others_and_one_line_says_which(make, installed, caplog):
    """No ``_compute_metrics`` any more: no tokens of the batch; commands, gradients and scalars all the same."""
    installed("verl", "0.11.0")
    trainer = make()
    trainer._compute_metrics = None
    with caplog.at_level(logging.WARNING, "rlwatch"):
        driver = started(trainer)

    assert [record.getMessage() for record in caplog.records] == [
        "of verl 0.11.0 rlwatch does not record everything (not the tokens of a step's batch: Trainer has no "
        "_compute_metrics); all the rest is, see docs/verl.md"
    ]
    assert driver.controller is not None


def test_a_second_driver_of_the_same_run_is_refused(make):
    """The store refuses a second writer before training starts."""
    first, second = make(), make()
    for trainer in (first, second):
        with open_dict(trainer.config):
            trainer.config.trainer.rlwatch.run_id = "one"
    first.init()

    with pytest.raises(RLWatchError):
        second.init()
    assert isinstance(driver_of(first).run, rlwatch.Run)


def test_a_reset_is_reported_with_the_kl_of_its_own_step(make, monkeypatch):
    """Which verl measures after the boundary; that of the step before is not it."""
    trainer = make()
    driver = started(trainer)
    keys = [f"prompt_{row}_0" for row in range(tiny.ROWS)]
    meta = types.SimpleNamespace(keys=keys, partition_id="train", tags=[{}] * len(keys))
    monkeypatch.setattr(transfer_queue, "kv_batch_get", lambda *_, **__: tiny.batch_of(trainer.global_steps))
    for step in (1, 2, 3):
        trainer.step_to(step)
        if step == 3:
            assert send(driver, "reset-reference").status == "done"
        driver.measure(meta)
        wait(driver.statistics.thread.pending)  # a step whose turn does not come goes without
    driver.settle(30.0)
    (reset,) = events(driver, "reference_reset")
    store = open_store(trainer.config.trainer.rlwatch["store"])
    kl = {record.step: record.metrics["policy/kl_ref_k3"] for record in store.records(driver.run.info.run_id)}

    assert (reset.step, reset.body["kl_before"]) == (3, kl[3])
    assert kl[3] not in (0.0, kl[2])


@pytest.mark.parametrize("level", ["full", "scalars"])
def test_a_reset_whose_step_is_never_measured_is_reported_without_a_kl(make, level):
    """Training ends at it, or nothing is measured at all: not measured is not zero."""
    trainer = make()
    with open_dict(trainer.config):
        trainer.config.trainer.rlwatch.level = level
    driver = started(trainer)
    trainer.step_to(1)
    send(driver, "reset-reference")
    if level == "scalars":
        driver.measure(None)
    else:
        driver.settle(30.0)
    driver.statistics.close()
    (reset,) = events(driver, "reference_reset")

    assert reset.body["kl_before"] is None


def test_a_step_beyond_the_budget_is_measured_in_part_and_says_so(make, monkeypatch):
    """Rewards, groups and lengths are those of every response; of tokens two of four responses are read."""
    trainer = make()
    with open_dict(trainer.config):
        trainer.config.trainer.rlwatch.budget_ms = 1e-6
    driver = started(trainer)
    whole = tiny.batch_of(1)
    lengths = whole["responses"].offsets().diff().tolist()
    budget = driver.statistics.budget
    budget.least, budget.per_token = 1, 2e-6 / sum(lengths)
    keys = [f"prompt_{row}_0" for row in range(tiny.ROWS)]
    asked = []

    def fetch(keys_of_rows, _partition, *, select_fields):
        asked.append((list(keys_of_rows), list(select_fields)))
        rows = [keys.index(key) for key in keys_of_rows]
        return {
            name: tiny.jagged([whole[name].unbind()[row] for row in rows]) for name in select_fields if name in whole
        }

    monkeypatch.setattr(transfer_queue, "kv_batch_get", fetch)
    tags = [{"response_len": n} for n in lengths]
    trainer.step_to(1)
    driver.measure(types.SimpleNamespace(keys=keys, partition_id="train", tags=tags))
    driver.settle(30.0)
    driver.run.flush()
    store = open_store(trainer.config.trainer.rlwatch["store"])
    (record,) = [one for one in store.records(driver.run.info.run_id) if "len/mean" in one.metrics]

    (read,) = [got for got, fields in asked if "old_log_probs" in fields]
    assert 0 < len(read) < len(keys)
    share = sum(lengths[keys.index(key)] for key in read) / sum(lengths)
    assert record.metrics["rlwatch/measured_share"] == pytest.approx(share)
    assert record.metrics["len/mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert record.metrics.get("rlwatch/errors", 0) == 0
    assert "policy/logp_mean" in record.metrics
