"""Spikes of the gradient in the real TRL trainer: the tokens that did it are named, and training does not notice."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig
from planted import Planted, broken, off_policy
from tiny_trl import FakeRun, fresh_model, make_trainer

from rlwatch.clipping import SkipOnSpike
from rlwatch.errors import ConfigError
from rlwatch.gradloc.recording import load_recording, replay
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.trl import clip_layers, watch
from rlwatch.records import CULPRITS, RESPONSES

pytestmark = pytest.mark.torch

REUSING = {"num_iterations": 2, "max_steps": 6, "max_completion_length": 12, "per_device_train_batch_size": 8}
EVERY_STEP = Localise(threshold=1e-12, share=0.99)
"""So low a threshold that every step is localised."""


def localised(run):
    return [event for event in run.events if event.kind == "gradient_localised"]


def culprits(run):
    return [batch for batch in run.spikes if batch.reason == CULPRITS]


def spiked(tmp_path, change=None, *, localise=EVERY_STEP, watching=None, planting=None, **config):
    """A watched trainer that has trained, with a culprit planted at step 4."""
    trainer, run = make_trainer(tmp_path, **{**REUSING, **config}), FakeRun()
    watch(trainer, run=run, localise=localise, **(watching or {}))
    planted = None if change is None else Planted(trainer, change, **(planting or {}))
    trainer.train()
    assert run.counters.snapshot() == {}
    return run, planted


LOSSES = {
    "dapo": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "gspo": {"importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "with KL": {"beta": 0.1},
    "with an entropy bonus": {"entropy_coef": 0.05},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "unclipped": {"max_grad_norm": 0},
    "rloo": {"kind": "rloo"},
}


def one_of_a_kind(kinds, kept):
    """All of ``kinds``; what is not ``kept`` for ``make thorough``."""
    return [pytest.param(kind, marks=[] if kind in kept else pytest.mark.thorough) for kind in kinds]


@pytest.mark.parametrize("kind", one_of_a_kind(LOSSES, ("accumulated", "gspo", "with KL", "rloo")))
def test_every_loss_is_attributed_completely(tmp_path, kind):
    """Contributions sum up to the norm that the trainer itself reports, within 1e-3, at every step."""
    run, _ = spiked(tmp_path, max_steps=4, **LOSSES[kind])
    events, taps = localised(run), run.taps()

    assert [event.step for event in events] == [1, 2, 3, 4]
    for event in events:
        norm = taps[event.step]["optim/grad_norm"]
        if norm == 0:
            assert event.body["why_not"]
            continue
        assert event.body["complete"], event.body
        assert abs(event.body["gap"]) <= 1e-3
        assert event.body["norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_planted_token_is_named(tmp_path, micro_batches):
    """Its place, id and numbers, in whichever micro-batch it was."""
    run, planted = spiked(
        tmp_path, off_policy(), gradient_accumulation_steps=micro_batches, planting={"micro_batch": micro_batches - 1}
    )
    batch = next(batch for batch in culprits(run) if batch.step == 4)
    (row, position), microbatch = planted.places[0], micro_batches - 1

    worst = {name: column[0] for name, column in batch.columns.items()}
    assert (worst["microbatch"], worst["position"]) == (microbatch, position)
    assert worst["sequence"] == 8 * microbatch + row
    assert worst["token_id"] == planted.ids[0]
    assert math.log(worst["ratio"]) == pytest.approx(5.0, abs=0.5)
    assert worst["cause"] == "token ratio"
    assert worst["verified"] == 1
    assert worst["own_norm"] >= abs(worst["contribution"]) * 0.999
    assert "text" not in batch.columns
    assert not math.isnan(worst["reward"])


def test_several_culprits_are_named_at_once(tmp_path):
    """Five of them, with shares that add up to the most of the norm."""
    run, planted = spiked(tmp_path, off_policy(5))
    batch = next(batch for batch in culprits(run) if batch.step == 4)
    found = set(zip(batch.columns["sequence"].tolist(), batch.columns["position"].tolist(), strict=True))

    assert set(planted.places) <= found


def test_the_responses_of_culprits_come_whole(tmp_path):
    """Every token of them, with contribution and log-probs, for a view of the response."""
    run, planted = spiked(tmp_path, off_policy(), watching={"text": True})
    batch = next(b for b in run.spikes if b.reason == RESPONSES and b.step == 4)
    own = batch.columns["sequence"] == planted.places[0][0]

    assert own.sum() >= 6
    assert {"contribution", "share", "ratio", "entropy", "logp", "old_logp", "text"} <= set(batch.columns)
    assert all(isinstance(text, str) for text in batch.columns["text"])


@pytest.mark.parametrize("name", ["advantages", "old_per_token_logps"])
def test_a_number_that_is_none_is_traced_to_its_token(tmp_path, name):
    """There is no direction then: the inputs name it, and the event says in which."""
    run, planted = spiked(tmp_path, broken(name, math.nan), max_steps=4)
    event = next(event for event in localised(run) if event.step == 4)
    batch = next((batch for batch in culprits(run) if batch.step == 4), None)
    (row, position), token = planted.places[0], planted.ids[0]

    assert event.body["cause"] == "non-finite"
    assert event.body["method"] == "trace"
    assert not math.isfinite(event.body["norm"])
    assert batch is not None
    at = list(zip(batch.columns["sequence"], batch.columns["position"], batch.columns["token_id"], strict=True))
    if name == "advantages":
        assert {sequence for sequence, _, _ in at} == {row}
    else:
        assert at == [(row, position, token)]


DISTURBABLE = {
    "dropout": {"attention_dropout": 0.1, "gradient_accumulation_steps": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "half precision": {"bf16": True},
    "adapter": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.1), "beta": 0.1},
    "rloo": {"kind": "rloo"},
}


@pytest.mark.parametrize("kind", one_of_a_kind(DISTURBABLE, ("dropout", "adapter")))
def test_training_localised_at_every_step_is_bit_identical(tmp_path, kind):
    """Parameters, optimizer, rollouts and random states."""
    config = dict(DISTURBABLE[kind])
    dropout = config.pop("attention_dropout", 0.0)
    left = []
    for name, localise in (("a", False), ("b", EVERY_STEP)):
        asked = []
        trainer = make_trainer(tmp_path / name, reward=_recording(asked), **{**REUSING, "max_steps": 4, **config})
        for module in trainer.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        run = FakeRun()
        watch(trainer, run=run, localise=localise)
        trainer.train()
        moments = [torch.as_tensor(v) for e in trainer.optimizer.state_dict()["state"].values() for v in e.values()]
        left.append(([*trainer.model.parameters(), *moments, torch.get_rng_state()], asked))
        assert len(localised(run)) == (4 if localise else 0)

    assert left[0][1] == left[1][1]
    assert all(torch.equal(x, y) for x, y in zip(left[0][0], left[1][0], strict=True))


def _recording(asked):
    def reward(completions, **kwargs):
        asked.extend(completions)
        return [sum(c in "13579" for c in text) / 8 for text in completions]

    return reward


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "beta": 0.1, "gradient_accumulation_steps": 2}], ids=str)
def test_a_kept_step_replays_to_the_same_figures(tmp_path, setting):
    """From its file and the checkpoint before it: norm, layers, contributions, own norms."""
    localise = Localise(threshold=1e-12, share=0.99, keep_inputs=tmp_path / "kept")
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    spiked(tmp_path, off_policy(), localise=localise, **saving, **setting)
    model = type(fresh_model()).from_pretrained(tmp_path / "out" / "checkpoint-3")
    replayed = replay([load_recording(tmp_path / "kept" / "step00000004-rank0.npz")], model)

    assert replayed.same_parameters
    assert replayed.agrees, [figure for figure in replayed.figures if figure.agrees is False]
    assert any(figure.agrees for figure in replayed.figures)


@pytest.mark.parametrize("clips_layers", [False, True])
def test_the_step_of_a_culprit_can_be_left_out(tmp_path, clips_layers):
    """The optimizer takes one step less, also where layers are clipped after the look; the norm is logged as ever."""
    trainer, run = make_trainer(tmp_path, **REUSING), FakeRun()
    watch(trainer, run=run, localise=Localise(threshold=1e-12, share=0.99, skip=SkipOnSpike(share=0.8)))
    if clips_layers:
        clip_layers(trainer)
    Planted(trainer, off_policy(size=math.e**9))
    trainer.train()
    counts = {int(state["step"]) for state in trainer.optimizer.state_dict()["state"].values()}

    assert [event.step for event in run.events if event.kind == "step_skipped"] == [4]
    assert counts == {5}
    assert run.taps()[4]["optim/grad_norm"] > 0


def test_an_ordinary_run_is_left_alone(tmp_path):
    """No step is localised unless it spikes."""
    run, _ = spiked(tmp_path, localise=True, max_steps=8)

    assert localised(run) == []


@pytest.mark.parametrize(
    ("config", "fp16", "localise", "says"),
    [
        ({"zero_optimization": {"stage": 3}}, False, True, "not under stage 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, False, True, "offloads"),
        ({"zero_optimization": {"stage": 1}}, True, True, "float16"),
        ({"zero_optimization": {"stage": 1}}, False, Localise(skip=SkipOnSpike()), "cannot be left out"),
        ({"zero_optimization": {"stage": 1}}, False, True, ""),
        ({"zero_optimization": {"stage": 2}}, False, True, ""),
    ],
)
def test_under_deepspeed_what_was_never_tried_is_refused_at_set_up(tmp_path, monkeypatch, config, fp16, localise, says):
    """With the reason; ZeRO-1 and -2 are taken."""
    trainer, run = make_trainer(tmp_path), FakeRun()
    plugin = SimpleNamespace(zero_stage=config["zero_optimization"]["stage"], deepspeed_config=config)
    monkeypatch.setattr(AcceleratorState, "deepspeed_plugin", plugin)
    monkeypatch.setitem(trainer.accelerator.state.__dict__, "distributed_type", DistributedType.DEEPSPEED)
    monkeypatch.setattr(trainer.args, "fp16", fp16)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        watch(trainer, run=run, localise=localise)


def test_what_cannot_be_had_is_refused_at_set_up(tmp_path):
    """Before anything is changed."""
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match="culprits"):
        Localise(culprits=0)
    with pytest.raises(ConfigError, match="level"):
        watch(trainer, run=FakeRun(), level="scalars", localise=True)
    with pytest.raises(ConfigError, match="True, False or Localise"):
        watch(trainer, run=FakeRun(), localise="yes")
