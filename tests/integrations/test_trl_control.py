"""What a live TRL trainer does when told to: lower its rate, change beta, save, pause, stop."""

import pytest
import torch
from tiny_trl import FakeRun, make_trainer
from transformers import TrainerCallback

from rlwatch.control.policy import RunHealth
from rlwatch.control.rescue import RescuePolicy
from rlwatch.integrations.trl import watch
from rlwatch.records import Alert, AlertState, Command, CommandStatus, JudgedRow, Severity

pytestmark = pytest.mark.torch


class After(TrainerCallback):
    """Acts when a step has ended, before the callbacks added later."""

    def __init__(self, acts):
        self.acts = acts

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.acts:
            self.acts[state.global_step]()


def told(tmp_path, at, *, findings=(), **config):
    """Train, with commands sent at the end of steps: ``at`` maps a step to ``(kind, args)``."""
    trainer, run = make_trainer(tmp_path, **{"max_steps": 5, **config}), FakeRun()
    run.findings = findings

    def send(step):
        kind, args = at[step]
        run.queue.append(Command(f"c{step}", "r1", kind, args, requested_by="ann@lab", why="I want it"))

    trainer.add_callback(After({step: lambda step=step: send(step) for step in at}))
    watch(trainer, run=run)
    trainer.train()
    return trainer, run


def results(run):
    return [(answer.command.kind, answer.status.value, answer.step, answer.result) for answer in run.answers]


def rates(run):
    return {step: row["learning_rate"] for step, row in run.rows().items()}


def test_a_lowered_rate_lasts_under_a_real_schedule(tmp_path):
    """HF's linear decay goes on at a tenth of its height, in the trainer's own log too, until its step."""
    config = {"lr_scheduler_type": "linear", "learning_rate": 1e-2, "max_steps": 6}
    _, plain = told(tmp_path / "a", {}, **config)
    _, lowered = told(tmp_path / "b", {2: ("lower-lr", {"scale": 0.1, "until": 4})}, **config)
    expected = {step: rate * (0.1 if step in (3, 4) else 1) for step, rate in rates(plain).items()}

    assert rates(lowered) == pytest.approx(expected, rel=1e-9)
    assert results(lowered)[0][:3] == ("lower-lr", "done", 2)
    assert [(e.step, e.body["command"], e.body["by"]) for e in lowered.events] == [
        (2, "lower-lr", "ann@lab"),
        (4, "lower-lr", "rlwatch"),
    ]


def test_a_lowered_rate_changes_the_weights_as_a_smaller_rate_would(tmp_path):
    """Not only the log: steps 3 to 5 are those of a run whose rate fell by itself."""

    def by_hand(trainer):
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 0.25
        schedule = trainer.lr_scheduler
        schedule.base_lrs = [rate * 0.25 for rate in schedule.base_lrs]

    trainer, _ = told(tmp_path / "a", {2: ("lower-lr", {"scale": 0.25})})
    other = make_trainer(tmp_path / "b", max_steps=5)
    other.add_callback(After({2: lambda: by_hand(other)}))
    other.train()
    pairs = zip(trainer.model.parameters(), other.model.parameters(), strict=True)

    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_kl_coefficient_is_what_the_loss_uses_from_then_on(tmp_path, kind):
    """The next step is that of a trainer with this beta, and the recorded coefficient says so."""
    common = {"kind": kind, "beta": 0.1, "learning_rate": 3e-3}
    _, plain = told(tmp_path / "a", {}, **common)
    trainer, changed = told(tmp_path / "b", {2: ("set-kl-coef", {"value": 50.0})}, **common)

    assert results(changed) == [("set-kl-coef", "done", 2, "KL coefficient 0.1 -> 50")]
    assert [changed.taps()[step]["policy/kl_coef"] for step in (2, 3)] == [0.1, 50.0]
    assert changed.taps()[2]["loss/raw"] == plain.taps()[2]["loss/raw"]
    assert changed.taps()[3]["loss/raw"] != plain.taps()[3]["loss/raw"]
    assert trainer.beta == 50.0


def test_a_trainer_without_a_reference_cannot_weigh_a_kl(tmp_path):
    """beta was 0: none was built."""
    _, run = told(tmp_path, {2: ("set-kl-coef", {"value": 0.1})})

    assert results(run) == [
        (
            "set-kl-coef",
            "rejected",
            2,
            "beta was 0 when the trainer was made, so no reference was loaded and there is no KL to weigh",
        )
    ]


def test_a_checkpoint_is_saved_at_the_step_the_answer_names(tmp_path):
    """Though the trainer's own schedule saves none."""
    trainer, run = told(tmp_path, {3: ("save-checkpoint", {})})
    where = tmp_path / "out" / "checkpoint-3"

    assert results(run) == [("save-checkpoint", "done", 3, f"{where} is saved as soon as this step has ended")]
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert (where / "optimizer.pt").is_file()
    assert trainer.state.global_step == 5


@pytest.mark.parametrize(("save", "names"), [("yes", ["checkpoint-2"]), ("no", [])])
def test_stop_ends_training_in_good_order(tmp_path, save, names):
    """At the end of the step, after a checkpoint or without; ``train`` returns and the summary is logged."""
    trainer, run = told(tmp_path, {2: ("stop", {"save": save})})

    assert trainer.state.global_step == 2
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == names
    assert results(run)[0][:3] == ("stop", "done", 2)
    assert list(run.taps()) == [1, 2]
    assert "train_runtime" in trainer.state.log_history[-1]


def test_a_paused_trainer_goes_on_where_it_was(tmp_path, monkeypatch):
    """Resume arrives while it waits; what it trains is what it would have trained."""
    trainer, run = make_trainer(tmp_path / "a", max_steps=4), FakeRun()
    rounds = []

    def sleep(seconds):
        rounds.append(seconds)
        if len(rounds) == 3:
            run.queue.append(Command("c9", "r1", "resume"))

    monkeypatch.setattr("rlwatch.integrations.commands.PauseState.wait", lambda self: sleep(0.5))
    trainer.add_callback(After({2: lambda: run.send("pause", minutes=5)}))
    watch(trainer, run=run)
    trainer.train()
    plain, _ = told(tmp_path / "b", {}, max_steps=4)
    pairs = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)

    assert len(rounds) == 3
    assert [(kind, status, step) for kind, status, step, _ in results(run)] == [
        ("pause", "done", 2),
        ("resume", "done", 2),
    ]
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_commands_wait_for_the_boundary(tmp_path):
    """Rollouts are used for two steps: what is asked after the first is done after the second."""
    _, run = told(tmp_path, {1: ("lower-lr", {"scale": 0.5})}, num_iterations=2, max_steps=4)

    assert [(answer.status, answer.step) for answer in run.answers] == [(CommandStatus.DONE, 2)]
    assert rates(run)[3] == pytest.approx(5e-4)


class Failing(FakeRun):
    """Its reward fell after the first two steps, and its owner permits to save it."""

    rescue = RescuePolicy(dry_run=False)

    def health(self):
        step = max(self.rows(), default=0)
        rows = [JudgedRow(s, "" if s <= 2 else "it fell", 0.9, 0.01, None, 0.1) for s in range(0, step + 1, 2)]
        alert = Alert("a", "r", "rule", "reward_drop", Severity.CRITICAL, AlertState.FIRING, 3, 3, "it fell")
        return RunHealth(alerts=(alert,) if step >= 3 else (), rows=tuple(rows))


def test_a_rescue_measures_the_reward_of_a_generation_after_the_last_step_that_trains_on_it(tmp_path):
    """The trainer logs it with the first of the two, and commands wait for the second."""
    trainer, run = make_trainer(tmp_path, num_iterations=2, max_steps=12), Failing()
    watch(trainer, run=run)
    trainer.train()
    commands = [(e.step, e.body["command"]) for e in run.events if e.kind == "command"]
    (measured,) = [e for e in run.events if e.kind == "rescue" and e.body["why"] == "current weights"]
    rewards = [metrics["reward/mean"] for step, metrics in run.logged if step in (7, 9) and "reward/mean" in metrics]

    assert commands[0] == (6, "hold")
    assert (measured.step, measured.body["evidence"]["rewards"]) == (10, pytest.approx(rewards))
