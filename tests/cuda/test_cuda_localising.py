"""On a GPU: the tokens that made the gradient spike are those that the CPU names, in a loop of one's own and in TRL.

Without a CUDA device these are skipped, and pytest's summary says so.
"""

import pytest
import torch
from planted import Planted, broken, off_policy
from planted_loop import PLANTS, SPIKE_AT, assert_same_runs, culprits, ratio, train
from tiny_trl import FakeRun, fresh_model, make_trainer

from rlwatch.clipping import SkipOnSpike
from rlwatch.gradloc.recording import load_recording, replay
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.trl import watch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: localising on a GPU is not tested here"),
]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("entropy_bonus", [0.0, 0.01])
def test_the_same_tokens_are_named_with_the_same_words(plant, entropy_bonus):
    """Of every step: culprits, causes, shares and what the event says; NaN is traced to where it came from."""
    expected, found = (train(device, plant, entropy_bonus=entropy_bonus) for device in ("cpu", "cuda"))

    assert culprits(expected) or plant is None
    assert_same_runs(found, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_default_device_of_the_loop_is_not_ours(device):
    """Many loops call ``torch.set_default_device("cuda")`` once and for all."""
    assert_same_runs(train(device, ratio, around=lambda: torch.device("cuda")), train(device, ratio))


def test_a_batch_with_a_culprit_can_be_left_out():
    """The optimizer's step of it is none."""
    run = train("cuda", ratio, skip=SkipOnSpike(share=0.5))

    assert [event.step for event in run.events if event.kind == "step_skipped"] == [SPIKE_AT]


def spiked(tmp_path, change, localise, **config):
    """The run of a trainer on the GPU, with a culprit planted at step 4, and where it was planted."""
    settings = {"num_iterations": 2, "max_steps": 4, "max_completion_length": 12, "use_cpu": False, **config}
    trainer, run = make_trainer(tmp_path, **settings), FakeRun()
    watch(trainer, run=run, localise=localise)
    planted = Planted(trainer, change)
    trainer.train()
    assert run.counters.snapshot() == {}
    return run, planted.places


@pytest.mark.parametrize("change", [off_policy(), broken("advantages")], ids=["ratio", "NaN"])
@pytest.mark.parametrize("config", [{}, {"beta": 0.1}, {"bf16": True}], ids=["float32", "with KL", "bfloat16"])
def test_trl_names_the_planted_token(tmp_path, change, config):
    """In the real trainer: the first culprit is in the planted response, and is the planted token if one was."""
    run, places = spiked(tmp_path, change, Localise(threshold=1e-12, share=0.99), **config)
    named = next(batch.columns for batch in culprits(run) if batch.step == 4)

    assert named["sequence"][0] in [row for row, _ in places]
    if named["cause"][0] == "token ratio":
        assert (named["sequence"][0], named["position"][0]) in places


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_recorded_on_a_gpu_is_replayed(tmp_path, device):
    """With the checkpoint before it, on the GPU and on the CPU."""
    localise = Localise(threshold=1e-12, share=0.99, keep_inputs=tmp_path / "kept")
    spiked(tmp_path, off_policy(), localise, max_steps=4, save_strategy="steps", save_steps=3)
    model = type(fresh_model()).from_pretrained(tmp_path / "out" / "checkpoint-3").to(device)
    replayed = replay([load_recording(tmp_path / "kept" / "step00000004-rank0.npz")], model)

    assert replayed.same_parameters
    assert any(figure.agrees for figure in replayed.figures)
    if device == "cuda":
        assert replayed.agrees, [figure for figure in replayed.figures if figure.agrees is False]
