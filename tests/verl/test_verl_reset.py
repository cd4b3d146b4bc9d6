"""Resetting the reference of a worker: FSDP2 shards, dtypes, offloading, the optimizer, LoRA, and the refusals."""

import pytest
import tiny_verl as tiny
import torch

from rlwatch.errors import RLWatchError
from rlwatch.integrations import megatron
from rlwatch.integrations.weights import copy_all

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=all-linear"]


@pytest.fixture(autouse=True)
def untouched():
    yield
    tiny.untap()


def moved(policy, *overrides, **kwargs):
    """A watched worker whose policy has left its reference."""
    worker = tiny.make_worker(policy, *overrides, **kwargs)
    tiny.attach(worker)
    tiny.update(worker)
    return worker


def reset(worker, **args):
    reply = worker.rlwatch_reset_reference(**args)
    assert "refused" not in reply, reply
    return reply["report"]


def ref_weights(worker):
    return {n: p.detach().full_tensor().clone() for n, p in worker.ref.engine.module.named_parameters()}


def test_the_policy_becomes_its_reference(policy):
    """Equal to the last bit, and so are their log-probs; the policy itself does not change; moments are gone."""
    worker = moved(policy)
    before = tiny.weights_of(worker)
    apart = (tiny.log_probs(worker) - tiny.log_probs(worker, ref=True)).abs().max()

    report = reset(worker)

    assert apart > 1e-3
    assert torch.equal(tiny.log_probs(worker), tiny.log_probs(worker, ref=True))
    assert all(torch.equal(before[n], w) for n, w in tiny.weights_of(worker).items())
    assert all(torch.equal(before[n], w) for n, w in ref_weights(worker).items())
    assert report["exact"]
    assert report["tensors"] == report["cleared"] == len(before)
    assert not worker.actor.engine.optimizer.state


def test_the_optimizer_may_be_kept(policy):
    """ProRL v2: the moments go on as they were."""
    worker = moved(policy)
    moments = len(worker.actor.engine.optimizer.state)

    report = reset(worker, optimizer="keep")

    assert report["cleared"] == 0
    assert len(worker.actor.engine.optimizer.state) == moments > 0


def test_training_goes_on_from_the_reset(policy):
    """The next update moves the policy, not its reference; KL to it begins at 0."""
    worker = moved(policy)
    reset(worker)
    anchored = ref_weights(worker)

    metrics = tiny.update(worker, tiny.batch_of(1))

    assert torch.isfinite(torch.tensor(metrics["grad_norm"])).all()
    assert all(torch.equal(anchored[n], w) for n, w in ref_weights(worker).items())
    assert any(not torch.equal(anchored[n], w) for n, w in tiny.weights_of(worker).items())


def test_a_reference_of_a_coarser_type_gets_rounded_weights(policy):
    """A bf16 reference: equal to the policy once rounded, and said to be."""
    worker = moved(policy, f"{REF}.fsdp_config.model_dtype=bf16")

    report = reset(worker)

    weights = tiny.weights_of(worker)
    assert report["exact"]
    assert all(w.dtype == torch.bfloat16 for w in ref_weights(worker).values())
    assert all(torch.equal(weights[n].bfloat16(), w) for n, w in ref_weights(worker).items())


def test_offloaded_parameters_and_moments(policy):
    """With parameters and optimizer offloaded between steps, as on a crowded GPU."""
    offload = [f"{ACTOR}.fsdp_config.{what}_offload=True" for what in ("param", "optimizer")]
    worker = moved(policy, *offload)

    report = reset(worker)

    assert report["exact"]
    assert torch.equal(tiny.log_probs(worker), tiny.log_probs(worker, ref=True))
    tiny.update(worker, tiny.batch_of(1))


def test_parameters_kept_whole_between_passes(policy):
    """Without resharding after a forward pass, whole copies of old weights must not survive the reset."""
    whole = [f"{part}.fsdp_config.reshard_after_forward=False" for part in (ACTOR, REF)]
    worker = moved(policy, *whole)
    tiny.log_probs(worker), tiny.log_probs(worker, ref=True)

    reset(worker)

    assert torch.equal(tiny.log_probs(worker), tiny.log_probs(worker, ref=True))


def test_lora_is_anchored_to_its_own_adapter(policy):
    """The reference pass (adapter disabled) becomes the adapter as it was; later it stays, and the policy moves on."""
    worker = moved(policy, *LORA, role="actor_rollout")
    names = list(worker.actor.engine.module.state_dict())
    base = tiny.log_probs(worker, no_adapter=True)

    report = reset(worker)
    anchored = tiny.log_probs(worker)

    assert not torch.equal(base, anchored)
    assert torch.equal(tiny.log_probs(worker, no_adapter=True), anchored)
    assert report["exact"]
    assert report["adapter"]

    weights = tiny.weights_of(worker)
    tiny.update(worker, tiny.batch_of(1))
    assert any(not torch.equal(weights[n], w) for n, w in tiny.weights_of(worker).items())
    live = tiny.weights_of(worker)
    assert torch.equal(tiny.log_probs(worker, no_adapter=True), anchored)
    assert all(torch.equal(live[n], w) for n, w in tiny.weights_of(worker).items()), "the trained adapter came back"
    assert not torch.equal(tiny.log_probs(worker), anchored)
    assert list(worker.actor.engine.module.state_dict()) == names, "checkpoints load into a fresh process"


def test_a_failing_reference_pass_gives_the_adapter_back(policy):
    """An exception while the frozen adapter is in place leaves the trained one as it was."""
    worker = moved(policy, *LORA, role="actor_rollout")
    reset(worker)
    tiny.update(worker, tiny.batch_of(1))
    live = tiny.weights_of(worker)

    with pytest.raises(RuntimeError, match="out of memory"), worker.actor.engine.disable_adapter():
        raise RuntimeError("out of memory")

    assert all(torch.equal(live[n], w) for n, w in tiny.weights_of(worker).items())


def test_without_a_reference_there_is_nothing_to_reset(policy):
    """Neither KL term is on: verl builds no reference."""
    worker = moved(policy, role="actor_rollout")

    assert "there is no reference" in worker.rlwatch_reset_reference()["refused"]
    assert worker.actor.engine.optimizer.state, "a refusal changes nothing"


def test_a_broken_policy_must_not_become_the_anchor(policy):
    """One NaN anywhere, and everything stays as it was."""
    worker = moved(policy)
    old = ref_weights(worker)
    with torch.no_grad():
        next(worker.actor.engine.module.parameters()).to_local().view(-1)[7] = torch.nan

    refused = worker.rlwatch_reset_reference()["refused"]

    assert "is not finite: roll back to a checkpoint" in refused
    assert all(torch.equal(old[n], w) for n, w in ref_weights(worker).items())


def test_a_broken_adapter_neither(policy):
    """The same of LoRA."""
    worker = moved(policy, *LORA, role="actor_rollout")
    trained = next(p for p in worker.actor.engine.module.parameters() if p.requires_grad)
    with torch.no_grad():
        trained.to_local().view(-1)[0] = torch.inf

    assert "is not finite" in worker.rlwatch_reset_reference()["refused"]


def test_other_engines_are_refused_by_name(policy):
    """Those that hold weights in ways of their own."""
    worker = moved(policy)
    worker.config.actor.strategy = "veomni"

    assert "trained with 'veomni'" in worker.rlwatch_reset_reference()["refused"]


def test_another_model_is_refused(policy):
    """A reference that is no copy of the policy's kind cannot take its weights."""
    worker = moved(policy)
    worker.ref.engine.module.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)

    assert "different models" in worker.rlwatch_reset_reference()["refused"]


def test_arguments_are_checked(policy):
    """A wish that cannot be understood changes nothing."""
    worker = moved(policy)

    assert "optimizer" in worker.rlwatch_reset_reference(optimizer="perhaps")["refused"]
    assert worker.actor.engine.optimizer.state


def test_the_learning_rate_follows_its_schedule_from_below(policy):
    """Scaled with its schedule, given back, and never twice."""
    worker = moved(policy)
    rate = worker.actor.engine.optimizer.param_groups[0]["lr"]

    for args in ({"scale": 0.5, "until": 9}, {"scale": 0.5, "until": 9}):
        report = worker.rlwatch_do("lower-lr", args)["report"]
    tiny.update(worker, tiny.batch_of(1))

    assert report["after"] == pytest.approx(rate / 2)
    assert worker.actor.engine.optimizer.param_groups[0]["lr"] == pytest.approx(rate / 2)
    assert worker.rlwatch_lowered()["until"] == 9
    worker.rlwatch_do("lower-lr", {"scale": 1.0})
    assert worker.actor.engine.optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_the_kl_coefficient_weighs_the_next_loss(policy):
    """verl's configuration is frozen after set-up; the loss reads what was set all the same, and logs it."""
    worker = moved(policy)

    assert worker.rlwatch_kl_coef()["value"] == 0.001
    assert worker.rlwatch_kl_coef(0.5)["value"] == 0.5
    assert set(tiny.update(worker)["kl_coef"]) == {0.5}


def test_without_a_kl_term_there_is_no_coefficient(policy):
    """Said, not pretended."""
    worker = moved(policy, f"{ACTOR}.use_kl_loss=False")

    assert "no KL term" in worker.rlwatch_kl_coef()["refused"]


def test_megatrons_adapter_is_refused(policy):
    """Its reference is the model without the adapter; nothing was built that could stand there."""
    worker = moved(policy, *LORA, role="actor_rollout")
    worker.config.actor.strategy = "megatron"
    worker.actor.engine._is_lora = False
    worker.actor.engine.peft_cls = object()

    assert "without its adapter" in worker.rlwatch_reset_reference(optimizer="keep")["refused"]


def test_weights_of_megatrons_wrappers_are_found_by_their_own_names(policy):
    """A list of one chunk, wrapped for the policy and bare for the reference."""

    def model():
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model()

    policy, reference = Wrapped(), model()
    copied = megatron.pairs([policy], [reference])
    copy_all(copied)

    assert [pair.name for pair in copied] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(policy.module[0].weight, reference[0].weight)
    with pytest.raises(RLWatchError, match="in one only"):
        megatron.pairs([policy], [reference[0]])
    with pytest.raises(RLWatchError, match="sharded differently"):
        megatron.pairs([policy.module[0]], [torch.nn.Linear(2, 1)])
    with pytest.raises(RLWatchError, match="cannot be cleared"):
        megatron.clearable(object())
