"""Watching OpenRLHF's trainer from within: what is recorded, obeyed, reported, and that the trainer goes on as it was."""

import logging
import threading
from types import SimpleNamespace as Names

import pytest
import torch

import rlwatch
from rlwatch.control.mailbox import PendingCommand
from rlwatch.integrations.openrlhf.compat import OpenRLHFSettings
from rlwatch.integrations.openrlhf.driver import FinishedStep, OpenRLHFDriver, RLWatchLogger, init_arguments, taken_out
from rlwatch.integrations.openrlhf.taps import PARCEL
from rlwatch.integrations.step_tally import StepTally, encoded_tally
from rlwatch.records import Command
from rlwatch.tensors.tokens import TokenBatch

pytestmark = pytest.mark.torch


def arguments(tmp_path, **kl):
    """OpenRLHF's, as far as they are read."""
    return Names(
        logger=Names(wandb=Names(project="math", run_name="seed3", key="secret"), logging_steps=1),
        ckpt=Names(path=str(tmp_path / "ckpt"), load_enable=False, save_steps=float("inf"), max_num=3),
        rollout=Names(n_samples_per_prompt=2),
        algo=Names(kl=Names(**{"init_coef": 0.1, "target": None, **kl})),
        actor=Names(adam=Names(lr=1e-6)),
    )


def experience(rewards=(1.0, 0.0)):
    """Two responses to one prompt, of two and three tokens."""
    return Names(
        sequences=torch.tensor([[5, 7, 8, 0], [5, 9, 9, 2]]),
        action_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        index=[0, 1],
        response_length=torch.tensor([2, 3]),
        truncated=torch.tensor([False, True]),
        rewards=torch.tensor(rewards) - 0.5,
        info={"reward": torch.tensor(rewards)},
    )


def parcel(logp=-1.0):
    """What a policy actor sends."""
    tally, mask = StepTally(), torch.ones(1, 2, dtype=torch.bool)
    tally.add_batch(TokenBatch(logp=torch.full((1, 2), logp), mask=mask))
    return {"parcel": encoded_tally(tally, 0), "numbers": {"policy/vocab_size": 32.0}, "errors": 0}


class Trainer:
    """Works as ``BasePPOTrainer`` does, without the work."""

    def __init__(self, args):
        self.args, self.saved = args, []
        self.kl_ctl = Names(value=0.1)
        self.reference_model_group = "group"
        self.tokenizer = Names(decode=lambda ids: f"<{ids[0]}>")
        self.wandb_logger = self.tensorboard_logger = None
        self.experience_maker = Names(make_experience_batch=lambda samples: [experience()])
        self.samples_generator = Names(generate_samples=lambda **kwargs: (["sample"], None, 1, False))
        self.status, self.error = {"policy_loss": 0.5, "kl": 0.01}, None

    def train_step(self, rollout_samples, global_step):
        self.experience_maker.make_experience_batch(rollout_samples)
        status = dict(self.ppo_train(global_step))
        return {**status, "generated_samples": ["text", 1.0]}, global_step + 1

    def ppo_train(self, global_steps):
        if self.error is not None:
            raise self.error
        return {**self.status, f"{PARCEL}0": parcel(-1.0), f"{PARCEL}1": parcel(-3.0)}

    def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None):
        if global_step % self.args.logger.logging_steps == 0 and self.wandb_logger:
            self.wandb_logger.log_train(global_step, logs_dict)
        if global_step % self.args.ckpt.save_steps == 0:
            self.saved.append((global_step, client_states))

    def fit(self, steps):
        step, statuses = 0, []
        for _ in range(steps):
            samples, _, _, exhausted = self.samples_generator.generate_samples(temperature=1.0)
            if not samples and exhausted:
                break
            status, step = self.train_step(samples, step)
            statuses.append(status)
            self.save_logs_and_checkpoints(step, status, {"step": step})
        if self.wandb_logger:
            self.wandb_logger.close()
        return statuses


@pytest.fixture
def watched(tmp_path):
    """(trainer, driver, store) of a watched trainer."""
    store = str(tmp_path / "runs")

    def make(settings=None, trainer=None, **kl):
        trainer = trainer or Trainer(arguments(tmp_path, **kl))
        driver = OpenRLHFDriver(trainer, settings or OpenRLHFSettings(init={"store": store}))
        driver.attach()
        return trainer, driver, rlwatch.open_store(store)

    return make


def steps_of(store, run):
    merged = {}
    for record in store.records(run.info.run_id):
        merged.setdefault(record.step, {}).update(record.metrics)
    return merged


def test_a_step_is_what_openrlhf_logs_and_what_actors_and_responses_tell(watched):
    """All ranks together, at the step OpenRLHF counts; text is left out; the end of training finishes the run."""
    trainer, driver, store = watched()
    trainer.fit(2)
    steps = steps_of(store, driver.run)

    assert sorted(steps) == [1, 2]
    assert steps[1]["policy_loss"] == 0.5
    assert steps[1]["policy/logp_mean"] == -2.0
    assert steps[1]["policy/vocab_size"] == 32.0
    assert steps[1]["policy/kl_coef"] == 0.1
    assert (steps[1]["reward/mean"], steps[1]["len/mean"], steps[1]["len/clipped"]) == (0.5, 2.5, 0.5)
    assert steps[1]["reward/zero_std_frac"] == 0.0
    assert "generated_samples" not in steps[1]
    assert store.run(driver.run.info.run_id).state == "finished"


def test_what_actors_send_is_seen_by_nobody_else(watched):
    """Not by OpenRLHF's console, loggers or KL controller."""
    trainer, _, _ = watched()
    statuses = trainer.fit(1)

    assert statuses == [{"policy_loss": 0.5, "kl": 0.01, "generated_samples": ["text", 1.0]}]
    assert taken_out({"a": 1, f"{PARCEL}3": "x"}) == {3: "x"}
    assert taken_out(None) == {}


@pytest.mark.parametrize("level", ["scalars", "tokens", "full"])
def test_levels_say_how_much_is_measured_of_responses(watched, tmp_path, level):
    """Text and groups are for the full level; lengths and rewards cost nothing."""
    trainer, driver, store = watched(OpenRLHFSettings(level, init={"store": str(tmp_path / "runs")}))
    trainer.fit(1)
    names = set(steps_of(store, driver.run)[1])

    assert "policy_loss" in names
    assert ("reward/mean" in names) is (level != "scalars")
    assert any(name.startswith("text/") for name in names) is (level == "full")


class Logger:
    """One of OpenRLHF's own."""

    def __init__(self):
        self.calls, self.handle = [], "wandb"

    def log_train(self, step, logs):
        self.calls.append(("train", step, dict(logs)))

    def log_eval(self, step, logs):
        self.calls.append(("eval", step, dict(logs)))

    def close(self):
        self.calls.append("closed")


def test_openrlhfs_own_logger_gets_what_it_would_have_got(watched, tmp_path):
    """Rows, evaluations and the end; whatever else is asked of it is its own."""
    trainer = Trainer(arguments(tmp_path))
    theirs = trainer.wandb_logger = Logger()
    trainer, driver, _ = watched(trainer=trainer)
    trainer.fit(1)

    assert theirs.calls == [
        ("train", 1, {"policy_loss": 0.5, "kl": 0.01, "generated_samples": ["text", 1.0]}),
        "closed",
    ]
    assert trainer.wandb_logger.handle == "wandb"
    with pytest.raises(AttributeError):
        RLWatchLogger(driver.run).handle  # noqa: B018


def test_evaluations_are_recorded_at_their_step(watched):
    """Under OpenRLHF's names."""
    trainer, driver, store = watched()
    trainer.wandb_logger.log_eval(7, {"eval_math_pass1": 0.25})
    trainer.wandb_logger.close()

    assert steps_of(store, driver.run)[7] == {"eval_math_pass1": 0.25}


def test_an_exception_ends_the_run_with_what_ray_wrapped(watched):
    """The cause within Ray's error, once, and the error itself raised on."""

    class RayTaskError(Exception):
        cause = ZeroDivisionError("no such reward")

    trainer, driver, store = watched()
    trainer.train_step([], 0)
    trainer.error = RayTaskError("ray::PolicyModelActor")
    with pytest.raises(RayTaskError):
        trainer.fit(1)
    info = store.run(driver.run.info.run_id)
    events = [event for event in store.events(info.run_id) if event.kind == "exception"]

    assert (info.state, info.state_reason) == ("crashed", "ZeroDivisionError: no such reward")
    assert len(events) == 1
    assert (events[0].step, events[0].body["type"]) == (1, "ZeroDivisionError")


class Orders:
    """Commands for a run, and their answers."""

    def __init__(self, run, monkeypatch):
        self.queue, self.answers = [], []
        monkeypatch.setattr(run, "commands", self._take)
        monkeypatch.setattr(run, "has_commands", lambda **_: bool(self.queue))

    def send(self, kind, **args):
        self.queue.append(Command("c", "r", kind, args, False, requested_by="ann", why="so"))

    def _take(self, **_):
        taken, self.queue = self.queue, []
        return [PendingCommand(command, self.answers.append) for command in taken]


def test_a_checkpoint_is_saved_by_openrlhfs_own_code_at_the_step_asked_for(watched, monkeypatch):
    """Once, with the states OpenRLHF keeps, and its schedule as it was."""
    trainer, driver, _ = watched()
    orders = Orders(driver.run, monkeypatch)
    orders.send("save-checkpoint")
    trainer.fit(3)

    assert trainer.saved == [(1, {"step": 1})]
    assert trainer.args.ckpt.save_steps == float("inf")
    assert orders.answers[0].status == "done"


@pytest.mark.parametrize("save", ["yes", "no"])
def test_stop_ends_training_before_the_next_rollouts(watched, monkeypatch, save):
    """As if the prompts were exhausted, so that OpenRLHF closes and saves as it does at its end."""
    trainer, driver, store = watched()
    orders = Orders(driver.run, monkeypatch)
    orders.send("stop", save=save)
    statuses = trainer.fit(5)

    assert len(statuses) == 1
    assert trainer.saved == ([(1, {"step": 1})] if save == "yes" else [])
    assert orders.answers[0].status == "done"
    assert store.run(driver.run.info.run_id).state == "finished"


def test_the_kl_coefficient_is_set_for_the_next_update(watched, monkeypatch):
    """The controller is the experience maker's too."""
    trainer, driver, _ = watched()
    orders = Orders(driver.run, monkeypatch)
    orders.send("set-kl-coef", value=0.2)
    trainer.fit(1)

    assert trainer.kl_ctl.value == 0.2
    assert (orders.answers[0].status, orders.answers[0].result) == ("done", "KL coefficient 0.1 -> 0.2")


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("reset-reference", {}, "only load weights from a directory; save a checkpoint and start again"),
        ("lower-lr", {}, "DeepSpeed engines"),
        ("set-kl-coef", {"target": 6.0}, "adaptive"),
        ("set-kl-coef", {"reference": None}, "no reference model"),
        ("stop", {"generator": None}, "asynchronous"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(watched, monkeypatch, tmp_path, kind, change, reason):
    """And training goes on."""
    kl = {name: value for name, value in change.items() if name == "target"}
    trainer = Trainer(arguments(tmp_path, **kl))
    if "reference" in change:
        trainer.reference_model_group = None
    trainer, driver, _ = watched(trainer=trainer)
    if "generator" in change:
        del trainer.samples_generator
    orders = Orders(driver.run, monkeypatch)
    orders.send(kind, **({"value": 0.5} if kind == "set-kl-coef" else {"scale": 0.5} if kind == "lower-lr" else {}))
    trainer.save_logs_and_checkpoints(1, {})

    assert orders.answers[0].status == "rejected"
    assert reason in orders.answers[0].result


def test_errors_of_rlwatch_stay_inside(watched, monkeypatch, caplog):
    """Counted, and training and its own rows go on."""
    trainer, driver, store = watched()
    monkeypatch.setattr("rlwatch.integrations.openrlhf.driver.response_stats", lambda *a, **k: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        statuses = trainer.fit(2)
    steps = steps_of(store, driver.run)

    assert len(statuses) == 2
    assert driver.run.counters["errors"] >= 1
    assert steps[2]["policy_loss"] == 0.5
    assert "reward/mean" not in steps[2]


def test_errors_in_policy_actors_are_counted_on_the_run(watched):
    """They have no run of their own."""
    _, driver, _ = watched()
    for actor, total in (("0", 2), ("1", 1), ("0", 2)):
        driver.recording.thread.count_errors(actor, total)

    assert driver.run.counters["errors"] == 3


class Slow(dict):
    """Numbers that are not there before ``go``."""

    def __init__(self, go):
        super().__init__()
        self.go = go

    def items(self):
        self.go.wait(600)
        return super().items()


def test_statistics_that_lag_are_left_out_and_counted(watched):
    """Training never waits for them."""
    _, driver, _ = watched()
    go = threading.Event()
    for step in range(4):
        driver.recording.submit(step, FinishedStep(numbers=Slow(go)))
    go.set()
    driver.close()

    assert driver.run.counters["dropped"] == 2


def test_a_run_is_named_by_openrlhfs_arguments_without_its_secrets(tmp_path):
    """wandb's key is called just ``key``."""
    known = init_arguments(arguments(tmp_path), OpenRLHFSettings(init={"project": "mine"}))

    assert (known["project"], known["name"], known["source"]) == ("mine", "seed3", "openrlhf")
    assert (known["rank"], known["resume"], known["output_dir"]) == (0, "never", str(tmp_path / "ckpt"))
    assert known["config"]["logger"]["wandb"]["key"] == "[redacted]"
    assert known["config"]["actor"]["adam"]["lr"] == 1e-6
    assert "secret" not in repr(known)


def test_a_training_that_loads_its_checkpoint_continues_its_run(tmp_path):
    """The run is remembered beside the checkpoints."""
    args = arguments(tmp_path)
    args.ckpt.load_enable = True

    assert init_arguments(args, OpenRLHFSettings())["resume"] == "auto"


def test_a_run_that_cannot_be_made_stops_training_before_it_starts(tmp_path):
    """What is asked for must work."""
    with pytest.raises(rlwatch.RLWatchError, match="nosuch"):
        OpenRLHFDriver(Trainer(arguments(tmp_path)), OpenRLHFSettings(init={"store": "nosuch://x"}))


def test_text_of_extreme_tokens_is_kept_only_on_request(watched, tmp_path):
    """A decoder is made only then."""
    _, plain, _ = watched()
    plain.run.finish()
    _, texting, _ = watched(OpenRLHFSettings(text=True, init={"store": str(tmp_path / "runs"), "run_id": "t"}))

    assert plain.recording.decode is None
    assert texting.recording.decode([3]) == "<3>"
