"""Taps on a policy actor's trainer: what of an update is read, how it travels, and what must not change.

The trainer here works as ``ActorPPOTrainer`` does; ``tests/openrlhf`` runs the same against OpenRLHF's own.
"""

from types import SimpleNamespace as Names

import pytest
import torch
from torch import nn

from rlwatch.integrations.openrlhf.batch import loss_stats, token_batch
from rlwatch.integrations.openrlhf.compat import OpenRLHFSettings
from rlwatch.integrations.openrlhf.driver import taken_out
from rlwatch.integrations.openrlhf.taps import PARCEL, ActorTaps, first_of_its_data
from rlwatch.integrations.step_tally import StepTally, merge_workers

pytestmark = pytest.mark.torch
B, A, V = 3, 5, 11


class Loss(nn.Module):
    """Has the settings of OpenRLHF's ``PolicyLoss``."""

    def __init__(self, kind="ppo", level="off", mode="mask", threshold=(0.5, 5.0), dual_clip=None):
        super().__init__()
        self.policy_loss_type, self.dual_clip = kind, dual_clip
        self.clip_eps_low, self.clip_eps_high = 0.2, 0.28
        self.is_correction_level, self.is_correction_mode, self.is_correction_threshold = level, mode, threshold

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, **_):
        ratio = (log_probs - old_log_probs).exp()
        return (-(ratio * advantages * action_mask).sum() / action_mask.sum(), ratio.mean())


class Actor(nn.Module):
    """A table of logits."""

    def __init__(self):
        super().__init__()
        self.model = nn.Embedding(V, V)
        self.model.config = Names(vocab_size=V)

    def forward(self, sequences, action_mask, return_output=False, return_entropy=False):
        logits = self.model(sequences).log_softmax(-1)
        logp = logits.gather(-1, sequences.roll(-1, 1).unsqueeze(-1)).squeeze(-1)[:, :-1] * action_mask
        output = Names(entropy=-(logits.exp() * logits).sum(-1)[:, :-1] if return_entropy else None)
        return (logp, output) if return_output else logp


class Trainer:
    """Two micro-batches a round."""

    def __init__(self, **loss):
        torch.manual_seed(0)
        self.strategy, self.actor, self.actor_loss_fn = Names(), Actor(), Loss(**loss)
        self.optimizer = torch.optim.SGD(self.actor.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        self.batches = [self.experience(generator) for _ in range(2)]

    def experience(self, generator):
        sequences = torch.randint(0, V, (B, A + 1), generator=generator)
        mask = torch.rand(B, A, generator=generator) > 0.3
        logp = self.actor(sequences, mask).detach()
        noise = 0.1 * torch.randn(B, A, generator=generator)
        return Names(
            sequences=sequences,
            action_mask=mask,
            action_log_probs=logp + noise * mask,
            rollout_log_probs=logp - noise * mask,
            base_action_log_probs=None,
            advantages=torch.randn(B, A, generator=generator),
        )

    def training_step(self, experience, kl_ctl, step):
        logp, _ = self.actor(experience.sequences, experience.action_mask, return_output=True, return_entropy=True)
        loss, _ = self.actor_loss_fn(
            logp,
            experience.action_log_probs,
            experience.advantages,
            action_mask=experience.action_mask,
            rollout_log_probs=experience.rollout_log_probs,
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def ppo_train(self, kl_ctl):
        losses = [self.training_step(e, kl_ctl, i) for i, e in enumerate(self.batches)]
        return {"policy_loss": sum(losses) / 2}


def watched(level="full", **loss):
    trainer = Trainer(**loss)
    taps = ActorTaps(trainer, OpenRLHFSettings(level))
    taps.attach()
    return trainer, taps


def measured(status):
    """What a round's status holds of ours, read as the driver reads it."""
    sent = taken_out(status)
    return merge_workers(1, StepTally(), {rank: what["parcel"] for rank, what in sent.items()}).metrics, sent


def test_what_is_measured_of_a_round_is_that_of_its_micro_batches_together():
    """Token means over both, from the tensors the loss was given; entropy from the same forward pass."""
    trainer, _ = watched()
    exact = Trainer()
    entropies, logps, masks = [], [], []
    for experience in exact.batches:
        logp, output = exact.actor(
            experience.sequences, experience.action_mask, return_output=True, return_entropy=True
        )
        entropies.append(output.entropy.detach())
        logps.append(logp.detach())
        masks.append(experience.action_mask)
        exact.training_step(experience, 0.0, 0)
    mask = torch.cat(masks)
    metrics, sent = measured(trainer.ppo_train(0.1))

    assert metrics["policy/entropy"] == pytest.approx(float(torch.cat(entropies)[mask].mean()), rel=1e-5)
    assert metrics["policy/logp_mean"] == pytest.approx(float(torch.cat(logps)[mask].mean()), rel=1e-5)
    assert metrics["nonfinite/loss"] == 0
    assert (sent[0]["numbers"], sent[0]["errors"]) == ({"policy/vocab_size": float(V)}, 0)


def test_watching_changes_no_bit():
    """Parameters and losses, over two rounds."""
    plain, seen = Trainer(), watched()[0]
    losses = [[t.ppo_train(0.1)["policy_loss"] for _ in range(2)] for t in (plain, seen)]

    assert losses[0] == losses[1]
    assert torch.equal(plain.actor.model.weight, seen.actor.model.weight)


def test_passes_for_old_log_probs_are_not_read():
    """The same model serves them; only an update asks for its output."""
    trainer, taps = watched()
    trainer.actor(trainer.batches[0].sequences, trainer.batches[0].action_mask)

    assert taps.tally.empty


def test_each_round_begins_anew():
    """A parcel is of one round."""
    trainer, _ = watched()
    first, _ = measured(trainer.ppo_train(0.1))
    trainer.batches = trainer.batches[:1]
    second, _ = measured(trainer.ppo_train(0.1))

    assert first["policy/logp_mean"] != second["policy/logp_mean"]


def test_a_round_without_data_sends_nothing():
    """Its status is as the trainer made it."""
    trainer, _ = watched()
    trainer.batches = []

    assert trainer.ppo_train(0.1) == {"policy_loss": 0.0}


def test_scalars_need_no_taps():
    """Nothing is hooked, nothing sent."""
    trainer, _ = watched("scalars")
    status = trainer.ppo_train(0.1)

    assert not any(key.startswith(PARCEL) for key in status)
    assert not trainer.actor_loss_fn._forward_hooks


def test_levels_say_how_much_is_measured():
    """Sorting and comparing is for the full level."""
    names = {level: set(measured(watched(level)[0].ppo_train(0.1))[0]) for level in ("tokens", "full")}

    assert "policy/logp_mean" in names["tokens"] < names["full"]


def test_a_failing_tap_is_counted_and_training_goes_on(monkeypatch, caplog):
    """The count travels; the driver has the run."""
    plain = Trainer().ppo_train(0.1)
    monkeypatch.setattr("rlwatch.integrations.openrlhf.taps.loss_stats", lambda *a: 1 / 0)
    trainer, taps = watched()
    status = trainer.ppo_train(0.1)

    assert status["policy_loss"] == plain["policy_loss"]
    assert taps.error_boundary.errors == 2


class Mesh:
    """A device mesh, and where this rank is in it."""

    mesh_dim_names = ("dp", "sp", "tp")

    def __init__(self, sp=0, tp=0):
        self.at = {"sp": sp, "tp": tp}

    def __getitem__(self, name):
        return Names(get_local_rank=lambda: self.at[name])


@pytest.mark.parametrize(("mesh", "measures"), [(None, True), (Mesh(), True), (Mesh(sp=1), False), (Mesh(tp=1), False)])
def test_of_ranks_that_share_a_batch_the_first_measures(mesh, measures):
    """Ring attention and tensor parallelism: the others would count every token again."""
    assert first_of_its_data(Names(ds_device_mesh=mesh)) is measures


GIVEN = {
    "log_probs": torch.tensor([[-1.0, -2.0, 0.0]]),
    "old_log_probs": torch.tensor([[-1.5, -2.0, 0.0]]),
    "advantages": torch.tensor([[1.0, 1.0, 1.0]]),
    "action_mask": torch.tensor([[1, 1, 0]]),
}


@pytest.mark.parametrize(
    ("loss", "clip", "dual", "truncation"),
    [
        ({}, (0.2, 0.28), None, None),
        ({"dual_clip": 3.0}, (0.2, 0.28), 3.0, None),
        ({"kind": "gspo", "dual_clip": 3.0}, None, None, None),
        ({"level": "token", "mode": "clip", "threshold": (0.0, 2.0)}, (0.2, 0.28), None, 2.0),
        ({"level": "token", "mode": "clip", "threshold": (0.5, 2.0)}, (0.2, 0.28), None, None),
        ({"level": "token", "mode": "mask", "threshold": (0.0, 2.0)}, (0.2, 0.28), None, None),
        ({"level": "seq", "threshold": (0.0, 2.0)}, (0.2, 0.28), None, None),
    ],
)
def test_clips_are_those_of_the_loss(loss, clip, dual, truncation):
    """A correction that is more than a cap on token weights is not called one."""
    batch = token_batch(Loss(**loss), GIVEN, Names(sequences=torch.tensor([[4, 5, 6, 7, 8]])), None)

    assert (batch.clip, batch.dual_clip, batch.truncation) == (clip, dual, truncation)
    assert batch.ids.tolist() == [[6, 7, 8]]
    assert (batch.entropy, batch.ref_logp, batch.rollout_logp) == (None, None, None)


def test_gspo_has_ratios_of_whole_responses():
    """The geometric mean over a response's tokens; PPO's loss has none."""
    batch = token_batch(Loss("gspo"), GIVEN, Names(sequences=None), None)
    stats = loss_stats(Loss("gspo"), batch)

    assert float(stats["ratio/seq_mean"].value()) == pytest.approx(float(torch.tensor(0.25).exp()))
    assert loss_stats(Loss(), batch) == {}


def test_entropy_wider_than_the_response_is_cut_to_it():
    """It is computed over the whole sequence."""
    entropy = torch.arange(5.0).unsqueeze(0)

    assert token_batch(Loss(), GIVEN, Names(sequences=None), entropy).entropy.tolist() == [[2.0, 3.0, 4.0]]
