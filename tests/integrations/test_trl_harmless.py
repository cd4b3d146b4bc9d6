"""Watching changes nothing, costs no wait and never raises into training."""

import logging
import random
from collections import Counter

import numpy as np
import pytest
import torch
import trl
from fake_vllm import install
from peft import LoraConfig, get_peft_model
from tiny_trl import FakeRun, digits, make_trainer, model_on_disk
from torch.utils._python_dispatch import TorchDispatchMode

from rlwatch.error_boundary import LIMIT, ErrorBoundary
from rlwatch.errors import ConfigError
from rlwatch.integrations.transformers import taps as shared_taps
from rlwatch.integrations.trl import taps as taps_module
from rlwatch.integrations.trl import watch

pytestmark = pytest.mark.torch

REUSING = {"num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.1, "max_steps": 4}


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(tmp_path, *, watched, before=None, watching=None, **config):
    """Final weights, everything else that training leaves behind, what the reward function was asked, and the run."""
    asked = []

    def reward(completions, **kwargs):
        asked.extend(completions)
        return digits(completions)

    trainer, run = make_trainer(tmp_path, reward=reward, **config), FakeRun()
    if watched:
        watch(trainer, run=run, **(watching or {}))
    if before is not None:
        before(trainer)
    trainer.train()
    return weights(trainer), left_behind(trainer), asked, run


def left_behind(trainer):
    """The optimizer's moments and counts, and all random states, as tensors."""
    optimizer = trainer.optimizer.state_dict()["state"]
    moments = [torch.as_tensor(value) for entry in optimizer.values() for value in entry.values()]
    assert len(moments) >= 3
    assert any((moment != 0).any() for moment in moments)
    numpy_state, python_state = np.random.get_state(), random.getstate()
    drawn = [torch.as_tensor(numpy_state[1].astype(np.int64)), torch.tensor(numpy_state[2]), *moments]
    return [torch.get_rng_state(), torch.tensor(python_state[1]), *drawn]


def adapter(**kwargs):
    return LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", lora_dropout=0.1, **kwargs)


def retrained(tmp_path):
    """A model with an adapter already trained, which TRL keeps a copy of as its reference."""
    return get_peft_model(model_on_disk(tmp_path / "base"), adapter(init_lora_weights=False))


KINDS = {
    "dapo": REUSING,
    "unclipped": {**REUSING, "max_grad_norm": 0},
    "rloo": {**REUSING, "kind": "rloo"},
    "grpo": {**REUSING, "loss_type": "grpo"},
    "gspo": {**REUSING, "importance_sampling_level": "sequence"},
    "cispo": {**REUSING, "loss_type": "cispo", "epsilon_high": 2.0},
    "evaluated": {**REUSING, "eval_rows": 8, "eval_strategy": "steps", "eval_steps": 2},
    "new adapter": {**REUSING, "peft_config": adapter()},
    "rloo adapter": {**REUSING, "kind": "rloo", "peft_config": adapter()},
    "trained adapter": {**REUSING, "model": retrained},
    "half precision": {**REUSING, "bf16": True},
    "many rollouts": {"steps_per_generation": 4, "beta": 0.1, "max_steps": 5},
}


ONE_OF_A_KIND = ("dapo", "rloo", "evaluated", "new adapter", "half precision", "many rollouts")


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    """What is left of a training that nobody watches: ``REUSING``'s once for all tests."""
    return train(tmp_path_factory.mktemp("unwatched"), watched=False, **REUSING)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ONE_OF_A_KIND else pytest.mark.thorough) for kind in KINDS]
)
def test_training_is_bit_identical_to_training_unwatched(tmp_path, unwatched, kind):
    """The same seed, with and without: not one bit of weights, optimizer, rollouts and random states differs."""
    config = dict(KINDS[kind])

    def once(name, **kwargs):
        given = {"model": config["model"](tmp_path / name)} if "model" in config else {}
        return train(tmp_path / name, **{**config, **given}, **kwargs)

    plain, plain_rest, plain_asked, _ = unwatched if config == REUSING else once("a", watched=False)
    seen, seen_rest, seen_asked, run = once("b", watched=True, watching={"completions": True, "text": True})

    assert same(plain, seen)
    assert same(plain_rest, seen_rest)
    assert plain_asked == seen_asked
    assert len(run.taps()) == config["max_steps"]
    assert run.counters.snapshot() == {}


def test_another_seed_would_show(tmp_path, unwatched):
    """What the test above can tell."""
    plain, plain_rest, *_ = unwatched
    other, other_rest, *_ = train(tmp_path / "b", watched=False, **REUSING, learning_rate=1.0001e-3)

    assert not same(plain, other)
    assert not same(plain_rest, other_rest)


WATCHED = [{"level": level} for level in ("scalars", "tokens", "gradients", "full")]


@pytest.mark.parametrize("watching", [*WATCHED, {"completions": True}, {"text": True}], ids=str)
def test_no_level_and_no_option_changes_training(tmp_path, unwatched, watching):
    """However closely it is watched."""
    plain, plain_rest, plain_asked, _ = unwatched
    seen, seen_rest, seen_asked, _ = train(tmp_path / "b", watched=True, watching=watching, **REUSING)

    assert same([*plain, *plain_rest], [*seen, *seen_rest])
    assert plain_asked == seen_asked


@pytest.mark.parametrize("mode", ["token_truncate", pytest.param("sequence_mask", marks=pytest.mark.thorough)])
def test_a_second_engine_is_sampled_the_same_way(tmp_path, mode):
    """Identical also where the rollouts come from an engine of their own."""
    config = {"before": lambda t: install(t, noise=0.02), "vllm_importance_sampling_mode": mode, **REUSING}
    plain, plain_rest, *_ = train(tmp_path / "a", watched=False, **config)
    seen, seen_rest, *_ = train(tmp_path / "b", watched=True, **config)

    assert same([*plain, *plain_rest], [*seen, *seen_rest])


class Waits(TorchDispatchMode):
    """Counts the operations that make the CPU wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "nonzero", "masked_select", "equal"}:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def test_watching_adds_no_wait_for_the_device(tmp_path):
    """Not one scalar read or data-dependent shape more than training unwatched."""
    counts = []
    for watched in (False, True):
        trainer = make_trainer(tmp_path / str(watched), **REUSING)
        if watched:
            watch(trainer, run=FakeRun())
        with Waits() as waits:
            trainer.train()
        counts.append(waits.seen)

    assert counts[0]["_local_scalar_dense"] > 0
    assert counts[1] == counts[0]


def test_each_step_comes_to_the_cpu_in_one_copy(tmp_path, monkeypatch):
    """One transfer a step, whatever the number of micro-batches."""
    made = []
    original = taps_module.StepTally.seal
    monkeypatch.setattr(
        taps_module.StepTally, "seal", lambda self, step, **kw: made.append(step) or original(self, step, **kw)
    )
    trainer = make_trainer(tmp_path, **REUSING)
    watch(trainer, run=FakeRun())
    trainer.train()

    assert made == [1, 2, 3, 4]


def explode(*args, **kwargs):
    raise RuntimeError("boom")


@pytest.mark.parametrize("broken", ["token_batch", "model_norms", "correction_stats", "vocab_size_of"])
def test_a_failing_tap_neither_stops_nor_changes_training(tmp_path, unwatched, monkeypatch, caplog, broken):
    """Errors of ours are counted, said once and once more when the tap is switched off."""
    plain, *_ = unwatched
    module = taps_module if hasattr(taps_module, broken) else shared_taps
    monkeypatch.setattr(module, broken, explode)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        seen, _, _, run = train(tmp_path / "b", watched=True, **REUSING)
    said = [r.getMessage() for r in caplog.records]

    assert same(plain, seen)
    assert run.counters["errors"] == LIMIT
    assert sum("RuntimeError: boom" in line for line in said) == 1
    assert sum("switched its tap" in line for line in said) == 1
    assert len(run.rows()) == 4


def test_an_error_while_recording_does_not_stop_training(tmp_path):
    """Also what the run itself raises stays with us."""

    class Broken(FakeRun):
        def log(self, metrics, step):
            raise OSError("disk gone")

    trainer, run = make_trainer(tmp_path, max_steps=5), Broken()
    watch(trainer, run=run)
    trainer.train()

    assert trainer.state.global_step == 5
    assert run.counters["errors"] >= LIMIT


def test_interrupts_are_not_errors_of_rlwatch():
    """KeyboardInterrupt passes the error boundary."""

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ErrorBoundary().attempt("x", interrupt)


def test_a_run_that_does_not_record_costs_nothing(tmp_path):
    """On other ranks the run is inert, and so are the taps."""
    trainer, run = make_trainer(tmp_path, max_steps=2), FakeRun()
    run.active = False
    watch(trainer, run=run)
    trainer.train()

    assert run.taps() == {}


def test_a_version_that_has_what_we_wrap_is_watched_whatever_its_number(tmp_path, installed, caplog):
    """The number is for messages: tokens are read of a TRL nobody has read, as long as its methods are there."""
    installed("trl", "2.0.0")
    trainer, run = make_trainer(tmp_path, max_steps=2), FakeRun()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        watch(trainer, run=run)
    trainer.train()

    assert not [r for r in caplog.records if r.name == "rlwatch"]
    assert "policy/logp_mean" in run.taps()[1]


@pytest.mark.parametrize("method", ["_compute_loss", "_get_per_token_logps_and_entropies"])
def test_a_trainer_without_the_private_methods_is_watched_as_any_trainer(tmp_path, monkeypatch, caplog, method):
    """Renamed internals: one warning that names them, the log rows and what every Trainer has."""
    trainer, run = make_trainer(tmp_path, max_steps=1), FakeRun()
    needs = {f"{name}_renamed" if name == method else name: p for name, p in taps_needs().items()}
    monkeypatch.setattr("rlwatch.integrations.trl.taps.NEEDS", needs)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        watch(trainer, run=run)
    trainer.train()

    assert [r.getMessage() for r in caplog.records] == [
        f"rlwatch records the log, the raw loss and gradients, but nothing per token: GRPOTrainer has no "
        f"{method}_renamed (TRL {trl.__version__}); tokens are read of GRPO and RLOO"
    ]
    assert list(run.rows()) == list(run.taps()) == [1]
    assert "_compute_loss" not in vars(trainer)


def taps_needs():
    from rlwatch.integrations.trl.taps import NEEDS

    return NEEDS


class Changed(trl.GRPOTrainer):
    """Of a TRL that calls a parameter otherwise."""

    def _compute_loss(self, model, batch):
        return super()._compute_loss(model, batch)


def test_a_changed_signature_is_an_obstacle(tmp_path, caplog):
    """A parameter we go by has gone."""
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        watch(make_trainer(tmp_path, cls=Changed), run=FakeRun())

    assert "Changed._compute_loss has no parameter 'inputs'" in caplog.text


def test_a_trainer_is_watched_once(tmp_path):
    """Twice would record every step twice; the message says what to leave out."""
    trainer = make_trainer(tmp_path)
    watch(trainer, run=FakeRun())
    with pytest.raises(ConfigError, match="watched already; leave RLWatchCallback and report_to"):
        watch(trainer, run=FakeRun())


def test_only_the_watched_instance_is_changed(tmp_path):
    """The class and other trainers are as they were."""
    one, other = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    watch(one, run=FakeRun())

    assert "_compute_loss" in vars(one)
    assert "_compute_loss" not in vars(other)
    assert type(one)._compute_loss is type(other)._compute_loss
