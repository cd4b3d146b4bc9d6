"""clip_layers(trainer): any Trainer and TRL's, with and without watch, resumed, with a loss scale."""

import logging

import pytest
import tiny_trainer
import tiny_trl
import torch
from transformers import TrainerCallback

from rlwatch.clipping import AGGC, By, LayerClip, LayerMaxNorm, LayerMedian
from rlwatch.errors import ConfigError
from rlwatch.integrations import trl
from rlwatch.integrations.transformers import clip_layers, watch
from rlwatch.integrations.transformers.layer_clipping import FILE, clipping_of

pytestmark = pytest.mark.torch
NEVER = LayerMaxNorm(each=1e30)
QUICK = AGGC(high=0.2, by=By.LAYER)
"""Clips in nearly every step, by what it remembers."""


class Rows(TrainerCallback):
    """What the trainer logs, and its gradients when the optimizer steps."""

    def __init__(self):
        self.logged, self.norms = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.logged.append({k: v for k, v in logs.items() if "time" not in k and "per_second" not in k})


def outcome(trainer):
    """Parameters, moments and random state."""
    moments = [torch.as_tensor(v) for s in trainer.optimizer.state_dict()["state"].values() for v in s.values()]
    return [*(p.detach().clone() for p in trainer.model.parameters()), *moments, torch.get_rng_state()]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(tmp_path, rule=None, *, make=tiny_trainer.make_trainer, resume=None, **config):
    trainer, rows = make(tmp_path, **config), Rows()
    trainer.add_callback(rows)
    clip = None if rule is None else clip_layers(trainer, rule)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, clip, rows


def test_a_rule_that_never_binds_changes_no_bit_of_training(tmp_path):
    """Nor of what the trainer logs; the global clip binds in every step."""
    plain, _, theirs = trained(tmp_path / "a")
    clipped, clip, ours = trained(tmp_path / "b", NEVER)

    assert same(outcome(plain), outcome(clipped))
    assert ours.logged == theirs.logged
    assert ours.norms == theirs.norms
    assert clip.counts() == {"steps": 4, "clipped": 0, "nonfinite": 0}


def test_layers_come_before_the_global_clip_and_the_log_has_the_norm_before_both(tmp_path):
    """Layers to 0.02 each leave less than max_grad_norm, so that it does not bind any more."""
    _, _, plain = trained(tmp_path / "a", max_steps=1)
    _, clip, rows = trained(tmp_path / "b", LayerMaxNorm(each=0.02), max_steps=1)

    assert rows.logged[0]["grad_norm"] == pytest.approx(plain.logged[0]["grad_norm"], rel=1e-6)
    assert rows.norms[0] == pytest.approx(0.02 * 2**0.5, rel=1e-4)
    assert plain.norms[0] == pytest.approx(0.1, rel=1e-4)
    assert clip.last.layers_clipped == 2


def test_layers_only_where_the_global_norm_is_infinite(tmp_path):
    """As the docstring says."""
    _, _, rows = trained(tmp_path, LayerMaxNorm(each=0.5), max_steps=1, max_grad_norm=float("inf"))

    assert rows.norms[0] == pytest.approx(0.5 * 2**0.5, rel=1e-4)


@pytest.mark.parametrize("watch_first", [True, False])
def test_watching_sees_gradients_before_clipping_in_either_order(tmp_path, watch_first):
    """And records what was clipped."""
    trainer, run = tiny_trainer.make_trainer(tmp_path), tiny_trl.FakeRun()
    steps = [lambda: watch(trainer, run=run), lambda: clip_layers(trainer, LayerMaxNorm(each=0.02))]
    for attach in steps if watch_first else reversed(steps):
        attach()
    trainer.train()

    assert run.counters.snapshot() == {}
    assert len(run.taps()) == 4
    for step, metrics in run.taps().items():
        layers = [v for name, v in metrics.items() if name.startswith("grad_layer/")]
        assert metrics["optim/grad_norm"] == pytest.approx(sum(v**2 for v in layers) ** 0.5, rel=1e-5)
        assert metrics["optim/grad_norm"] == pytest.approx(run.rows()[step]["grad_norm"], rel=1e-6)
        assert max(layers) > 0.1
        assert metrics["optim/layers_clipped"] == 2
        assert metrics["optim/clip_scale_min"] == pytest.approx(0.02 / max(layers), rel=1e-5)


def test_watching_changes_no_bit_of_clipped_training(tmp_path):
    """TRL, a rule that binds, watched as closely as can be and unwatched."""
    config = {"make": tiny_trl.make_trainer, "max_steps": 4, "gradient_accumulation_steps": 2}
    plain, _, _ = trained(tmp_path / "a", QUICK, **config)
    trainer, run = tiny_trl.make_trainer(tmp_path / "b", max_steps=4, gradient_accumulation_steps=2), tiny_trl.FakeRun()
    clip = trl.clip_layers(trainer, QUICK)
    trl.watch(trainer, run=run)
    trainer.train()

    assert same(outcome(plain), outcome(trainer))
    assert run.counters.snapshot() == {}
    assert clip.counts()["clipped"] > 0


def test_without_it_a_watched_run_says_nothing_of_clipped_layers(tmp_path):
    """Not measured is absent."""
    trainer, run = tiny_trainer.make_trainer(tmp_path, max_steps=1), tiny_trl.FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert not {"optim/layers_clipped", "optim/clip_scale_min"} & set(run.taps()[1])


def test_a_gradient_is_localised_before_layers_are_clipped(tmp_path):
    """What the taps call complete is the gradient as it came, with its norm."""
    trainer, run = tiny_trl.make_trainer(tmp_path, max_steps=2), tiny_trl.FakeRun()
    trl.watch(trainer, run=run)
    clip_layers(trainer, LayerMaxNorm(each=1e-3))
    (taps,) = [c.taps for c in trainer.callback_handler.callbacks if hasattr(c, "taps")]
    seen = []

    def complete(total):
        now = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
        seen.append((float(total), float(now)))

    taps.complete = complete
    trainer.train()

    assert [total for total, _ in seen] == pytest.approx([run.rows()[step]["grad_norm"] for step in (1, 2)], rel=1e-6)
    assert [now for _, now in seen] == pytest.approx([total for total, _ in seen], rel=1e-5)


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


@pytest.mark.parametrize("make", [tiny_trainer.make_trainer, tiny_trl.make_trainer], ids=["Trainer", "GRPOTrainer"])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path, make):
    """Weights, moments, random state and the rule's own, bit for bit, with a rule that clips in most steps."""
    straight, ours, _ = trained(tmp_path, QUICK, make=make, **SAVING)
    checkpoint = str(tmp_path / "out" / "checkpoint-4")
    resumed, again, _ = trained(tmp_path, QUICK, make=make, resume=checkpoint, **SAVING)

    assert same(outcome(straight), outcome(resumed))
    assert again.counts() == ours.counts()
    assert again.counts()["clipped"] >= 3
    assert str(again.state_dict()) == str(ours.state_dict())


def test_without_its_file_a_resumed_run_begins_anew_and_says_so(tmp_path, caplog):
    """What the test above can tell: the state is in the file, and it matters."""
    straight, _, _ = trained(tmp_path, QUICK, **SAVING)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    (checkpoint / FILE).unlink()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        resumed, clip, _ = trained(tmp_path, QUICK, resume=str(checkpoint), **SAVING)

    assert clip.counts()["steps"] == 2
    assert not same(outcome(straight), outcome(resumed))
    assert "what was kept of layer clipping" in caplog.text


@pytest.mark.parametrize("other", ["adagc", "spoilt"])
def test_a_file_that_does_not_fit_is_said_and_left(tmp_path, caplog, other):
    """Another rule, or no file of ours at all: training goes on with a fresh state."""
    trained(tmp_path, QUICK, **SAVING)
    checkpoint = tmp_path / "out" / "checkpoint-4"
    if other == "spoilt":
        (checkpoint / FILE).write_bytes(b"no state")
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        _, clip, _ = trained(tmp_path, QUICK if other == "spoilt" else other, resume=str(checkpoint), **SAVING)

    assert clip.counts()["steps"] == 2
    assert ("does not fit" if other == "adagc" else "what was kept of layer clipping") in caplog.text


def scaler(trainer, **kwargs):
    """A float16 loss scaler on the CPU, as accelerate has one on a GPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", **kwargs)
    trainer.accelerator.native_amp = True


def half(tmp_path, rule, init_scale, **config):
    trainer, rows = tiny_trl.make_trainer(tmp_path, max_steps=3, fp16=True, **config), Rows()
    trainer.add_callback(rows)
    scaler(trainer, init_scale=init_scale, backoff_factor=1e-36 if init_scale > 1e30 else 0.5)
    clip = None if rule is None else clip_layers(trainer, rule)
    trainer.train()
    return trainer, clip, rows


def test_a_loss_scale_does_not_show_in_what_is_clipped(tmp_path):
    """Layers are clipped after the scale was taken out, and it is taken out once."""
    _, one, rows = half(tmp_path / "a", LayerMaxNorm(each=0.02), 1.0)
    trainer, other, scaled = half(tmp_path / "b", LayerMaxNorm(each=0.02), 1024.0)

    assert other.last.before.tolist() == pytest.approx(one.last.before.tolist(), rel=1e-3)
    assert scaled.norms == pytest.approx(rows.norms, rel=1e-3)
    assert "unscale_gradients" not in vars(trainer.accelerator)


def test_with_a_loss_scale_a_rule_that_never_binds_changes_nothing(tmp_path):
    """Bit for bit, against the trainer alone."""
    plain, _, _ = half(tmp_path / "a", None, 1024.0)
    clipped, _, _ = half(tmp_path / "b", NEVER, 1024.0)

    assert same(outcome(plain), outcome(clipped))


def test_an_overflow_of_the_loss_scale_is_no_step_of_the_rule(tmp_path):
    """The scaler skips it; it is counted, and the window holds two norms of three steps."""
    huge = {
        "reward": lambda completions, **kw: [1e3 * r for r in tiny_trl.digits(completions)],
        "scale_rewards": "none",
    }
    _, clip, _ = half(tmp_path, LayerMedian(), 1e38, **huge)

    assert clip.counts() == {"steps": 3, "clipped": 0, "nonfinite": 1}
    assert clip.state_dict()["state"]["at"].tolist() == [2] * 4


class Falling(LayerMaxNorm):
    """Fails from the third call on: the first two are its trial and the first step."""

    calls = 0

    def scales(self, norms, seen, state):
        type(self).calls += 1
        if self.calls > 2:
            raise RuntimeError("boom")
        return super().scales(norms, seen, state)


def test_a_rule_that_raises_is_left_out_and_training_goes_on_with_the_global_clip(tmp_path, caplog):
    """Warned of once, and once more when it is switched off."""
    Falling.calls = 0
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        trainer, _, rows = trained(tmp_path, Falling(each=0.02), max_steps=6)

    assert trainer.state.global_step == 6
    assert rows.norms[0] == pytest.approx(0.02 * 2**0.5, rel=1e-4)
    assert rows.norms[1] == pytest.approx(0.1, rel=1e-4)
    assert sum("RuntimeError: boom" in r.getMessage() for r in caplog.records) == 1


def test_a_trainer_that_clips_in_a_way_of_its_own_is_reported_once(tmp_path, caplog):
    """Nothing is clipped by layer, and nobody believes it is."""

    class Own(tiny_trainer.Trainer):
        def _clip_grad_norm(self, model):
            return torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        _, clip, _ = trained(tmp_path, "layer-median", cls=Own)

    assert clip.last is None
    assert [r.getMessage() for r in caplog.records if "clip" in r.getMessage()] == [
        "rlwatch does not clip layers: this trainer does not clip through its accelerator"
    ]


def engine(name, version=1):
    def change(trainer, monkeypatch):
        monkeypatch.setattr("rlwatch.integrations.transformers.layer_clipping.sharding_engine", lambda trainer: name)
        plugin = type("Plugin", (), {"fsdp_version": version})()
        monkeypatch.setattr(type(trainer.accelerator.state), "fsdp_plugin", plugin, raising=False)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda trainer, _: setattr(trainer.args, "max_grad_norm", 0.0), "max_grad_norm is 0.*float\\('inf'\\)"),
        (lambda trainer, _: clip_layers(trainer), "clipped already"),
        (engine("DEEPSPEED"), "DEEPSPEED holds the gradients"),
        (engine("FSDP"), "FSDP holds the gradients"),
    ],
)
def test_where_layers_cannot_be_clipped_that_is_said_before_training(tmp_path, monkeypatch, change, said):
    """And nothing is attached."""
    trainer = tiny_trainer.make_trainer(tmp_path)
    change(trainer, monkeypatch)
    attached = clipping_of(trainer)
    with pytest.raises(ConfigError, match=said):
        clip_layers(trainer)

    assert clipping_of(trainer) is attached


def test_fsdp2_is_not_refused(tmp_path, monkeypatch):
    """Its gradients can be measured and scaled where they lie."""
    trainer = tiny_trainer.make_trainer(tmp_path)
    engine("FSDP", version=2)(trainer, monkeypatch)

    assert isinstance(clip_layers(trainer), LayerClip)


def test_only_the_instance_is_changed(tmp_path):
    """Another trainer clips as ever."""
    trainer, other = tiny_trainer.make_trainer(tmp_path / "a"), tiny_trainer.make_trainer(tmp_path / "b")
    clip_layers(trainer)

    assert "clip_grad_norm_" in vars(trainer.accelerator)
    assert "clip_grad_norm_" not in vars(other.accelerator)
