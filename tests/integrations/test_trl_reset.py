"""Resetting the reference of a live trainer: what changes, what does not, and when it is refused."""

import math

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from tiny_trl import FakeRun, digits, fresh_model, make_trainer, model_on_disk
from transformers import TrainerCallback

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.reference import ResetReference
from rlwatch.integrations.trl import watch
from rlwatch.integrations.trl.commands import anchored
from rlwatch.integrations.weights import adapter_pairs, fingerprint, model_pairs
from rlwatch.records import Command, CommandStatus, Finding, Severity

pytestmark = pytest.mark.torch
KL = ("policy/kl_ref_k1", "policy/kl_ref_k2", "policy/kl_ref_k3")
ADAPTER = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False
)


ON = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
VARIANTS = {
    "rsLoRA": lambda: LoraConfig(r=4, use_rslora=True, **ON),
    "DoRA": lambda: LoraConfig(r=4, use_dora=True, **ON),
    "PiSSA": lambda: LoraConfig(r=4, init_lora_weights="pissa", **ON),
    "modules to save": lambda: LoraConfig(r=4, modules_to_save=["lm_head"], **ON),
    "AdaLoRA": lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=20, **ON),
    "IA3": lambda: IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "LoHa": lambda: LoHaConfig(r=4, **ON),
    "LoKr": lambda: LoKrConfig(r=4, **ON),
    "OFT": lambda: OFTConfig(oft_block_size=8, r=0, **ON),
    "BOFT": lambda: BOFTConfig(boft_block_size=4, **ON),
    "layer norms": lambda: LNTuningConfig(task_type="CAUSAL_LM"),
    "prompt tuning": lambda: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}
"""Kinds of adapters of PEFT beside plain LoRA."""
OFTEN = ("DoRA", "IA3")
"""Those that are not left to the thorough tests."""


class After(TrainerCallback):
    """Acts when a step has ended, before the callbacks added later."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def train(
    tmp_path, *, at=2, force=False, findings=(), before=None, kind_of_command="reset-reference", args=None, **config
):
    """Train with a command sent at the end of step ``at``; returns trainer, run and optimizer entries seen after it."""
    config = {"beta": 0.1, "max_steps": 5, "learning_rate": 3e-3, **config}
    trainer, run, states = make_trainer(tmp_path, **config), FakeRun(), {}
    run.findings = findings
    trainer.add_callback(After(at, lambda: run.send(kind_of_command, force=force, **(args or {}))))
    watch(trainer, run=run)
    for step in range(1, config["max_steps"] + 1):
        trainer.add_callback(After(step, lambda step=step: states.update({step: optimizer_state(trainer)})))
    if before is not None:
        before(trainer)
    trainer.train()
    return trainer, run, states


def optimizer_state(trainer):
    """Step counts of the optimizer's entries."""
    return [float(entry["step"]) for entry in trainer.optimizer.optimizer.state.values()]


def largest_kl(run, step):
    return max(abs(run.taps()[step][name]) for name in KL)


def refusal(run, status=CommandStatus.REJECTED):
    (answer,) = run.answers
    assert answer.status is status
    assert [e for e in run.events if e.kind == "reference_reset"] == []
    return answer.result


def test_after_a_reset_every_kl_estimate_is_zero_at_the_next_step(tmp_path):
    """k1 = k2 = k3 = 0 on the next batch; without the reset they are not."""
    _, run, _ = train(tmp_path / "a")
    _, plain, _ = train(tmp_path / "b", at=99)

    assert largest_kl(run, 2) > 1e-4
    assert largest_kl(run, 3) < 1e-6
    assert largest_kl(plain, 3) > 1e-4
    assert run.taps()[4]["policy/kl_ref_k3"] > 1e-6


def test_rloo_is_reset_too(tmp_path):
    """Its KL sits in the reward, measured when the rollouts are generated: 0 in the next row."""
    _, run, _ = train(tmp_path, kind="rloo")
    rows = run.rows()

    assert run.answers[0].status is CommandStatus.DONE
    assert abs(rows[2]["kl"]) > 1e-5
    assert abs(rows[3]["kl"]) < 1e-6
    assert abs(rows[4]["kl"]) > 1e-5


def test_the_answer_and_the_event_say_what_was_done(tmp_path):
    """Step, KL before, who and why; the fingerprint of both models."""
    trainer, run, _ = train(tmp_path, at=5)
    (answer,), (event,) = run.answers, run.events
    policy = dict(trainer.model.named_parameters())

    assert (answer.status, answer.step) == (CommandStatus.DONE, 5)
    assert answer.result.startswith("KL 0.")
    assert "-> 0" in answer.result
    assert (event.kind, event.step) == ("reference_reset", 5)
    assert event.body["by"] == "ann@lab"
    assert event.body["why"] == "KL saturated"
    assert event.body["optimizer"] == "clear"
    assert event.body["exact"] is True
    assert event.body["kl_before"] == run.taps()[5]["policy/kl_ref_k3"]
    assert all(torch.equal(p, policy[n]) for n, p in trainer.ref_model.named_parameters())
    assert not any(p.requires_grad and p.grad is not None for p in trainer.ref_model.parameters())


@pytest.mark.usefixtures("behind")
def test_kl_before_a_reset_is_that_of_the_last_step_where_the_device_is_behind(tmp_path):
    """Its copy is then waited for: the number of an older step would be told for it."""
    _, run, _ = train(tmp_path, at=5)
    (event,) = run.events

    assert event.body["kl_before"] == run.taps()[5]["policy/kl_ref_k3"]


@pytest.mark.parametrize(("args", "steps"), [({}, {2: 0, 3: 1.0}), ({"optimizer": "keep"}, {2: 2.0, 3: 3.0})])
def test_the_optimizer_is_cleared_or_kept_as_asked(tmp_path, args, steps):
    """ProRL v1 (the default) starts Adam anew; v2 leaves it alone."""
    _, run, states = train(tmp_path, args=args)

    assert {step: max(states[step], default=0) for step in steps} == steps
    assert run.events[0].body["cleared"] == (len(states[3]) if not args else 0)


def test_keeping_the_optimizer_changes_no_rollout_and_no_weight_before_the_next_loss(tmp_path):
    """A reset touches the reference only: the next rollouts are those of an undisturbed run."""
    asked = {}

    def run_once(name, at):
        asked[name] = []

        def reward(completions, **kwargs):
            asked[name].extend(completions)
            return digits(completions)

        train(tmp_path / name, at=at, args={"optimizer": "keep"}, reward=reward, max_steps=3)

    run_once("reset", 2)
    run_once("plain", 99)

    assert asked["reset"] == asked["plain"]


def test_a_command_waits_for_the_generation_boundary_and_no_rollout_is_thrown_away(tmp_path):
    """Three iterations a batch: asked at step 1, done at step 3; as many generations as without it."""
    calls = {"reset": 0, "plain": 0}

    def counting(name):
        def reward(completions, **kwargs):
            calls[name] += 1
            return digits(completions)

        return reward

    _, run, _ = train(tmp_path / "a", at=1, num_iterations=3, max_steps=6, reward=counting("reset"))
    train(tmp_path / "b", at=99, num_iterations=3, max_steps=6, reward=counting("plain"))

    assert run.answers[0].step == 3
    assert largest_kl(run, 4) < 1e-6
    assert largest_kl(run, 3) > 1e-6
    assert calls == {"reset": 2, "plain": 2}


def test_with_gradient_accumulation_the_boundary_is_met_too(tmp_path):
    """Generation every two optimizer steps of two micro-batches each."""
    _, run, _ = train(tmp_path, at=3, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=5)

    assert run.answers[0].step == 4
    assert largest_kl(run, 5) < 1e-6


def test_without_a_reference_it_is_refused(tmp_path):
    """beta = 0 is TRL's default: nothing to reset."""
    _, run, _ = train(tmp_path, beta=0.0)

    assert refusal(run) == "there is no reference: beta is 0, so the loss has no KL term"


def finding(severity=Severity.CRITICAL, kind="entropy_collapse"):
    return Finding("entropy", kind, severity, step=2, onset_step=1, message="entropy fell")


def test_during_a_collapse_it_is_refused_by_the_name_of_the_finding(tmp_path):
    """A reset would make the collapsing policy the anchor."""
    _, run, _ = train(tmp_path, findings=[finding()])

    assert "entropy_collapse" in refusal(run)
    assert largest_kl(run, 3) > 1e-6


def test_a_warning_does_not_veto_and_force_overrules(tmp_path):
    """Only critical collapses refuse, and a person may insist."""
    _, warned, _ = train(tmp_path / "a", findings=[finding(Severity.WARNING)])
    _, forced, _ = train(tmp_path / "b", findings=[finding()], force=True)

    assert warned.answers[0].status is forced.answers[0].status is CommandStatus.DONE
    assert forced.events[0].body["forced"] is True


def test_a_policy_of_nans_never_becomes_the_reference(tmp_path):
    """Not even by force."""
    trainer = make_trainer(tmp_path, beta=0.1)
    before = fingerprint(trainer.ref_model.parameters())
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = math.nan

    with pytest.raises(RLWatchError, match="roll back to a checkpoint"):
        ResetReference(lambda: anchored(trainer), ErrorBoundary(FakeRun()))(
            Command("c", "r", "reset-reference", force=True)
        )
    assert fingerprint(trainer.ref_model.parameters()) == before


def test_nan_weights_are_refused_before_anything_is_copied(tmp_path):
    """The check names the tensor."""

    policy, reference = fresh_model(), fresh_model(1)
    before = fingerprint(reference.parameters())
    with torch.no_grad():
        policy.model.norm.weight[0] = math.nan

    with pytest.raises(RLWatchError, match=r"'model.norm.weight' is not finite"):
        model_pairs(policy, reference)
    assert fingerprint(reference.parameters()) == before


def test_different_models_are_refused():
    """Shapes and names must match one to one."""

    policy = fresh_model()
    reference = fresh_model()
    reference.model.norm.weight = torch.nn.Parameter(torch.ones(5))
    with pytest.raises(RLWatchError, match=r"shape \(32,\) in the policy and \(5,\) in the reference"):
        model_pairs(policy, reference)
    del reference.model.norm
    with pytest.raises(RLWatchError, match="different models"):
        model_pairs(policy, reference)


def test_fingerprints_tell_weights_apart():
    """Equal weights agree, one changed element does not."""
    one, same, other = fresh_model(), fresh_model(), fresh_model()
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6

    assert fingerprint(one.parameters()) == fingerprint(same.parameters()) != fingerprint(other.parameters())
    assert fingerprint([]) == fingerprint([])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("distributed_type", "DEEPSPEED"), "sharded by DEEPSPEED"),
        (("distributed_type", "FSDP"), "sharded by FSDP"),
    ],
)
def test_sharded_weights_are_refused_with_the_reason(tmp_path, change, reason):
    """What is not supported yet says so."""

    trainer = make_trainer(tmp_path, beta=0.1)

    class Accelerator:
        num_processes = 1
        distributed_type = "NO"

    setattr(Accelerator, *change)
    trainer.accelerator = Accelerator()
    with pytest.raises(RLWatchError, match=reason):
        ResetReference(lambda: anchored(trainer), ErrorBoundary(FakeRun())).check(Command("c", "r", "reset-reference"))


def test_fsdp2_is_not_refused(tmp_path):
    """Its shards can be copied one by one."""
    trainer = make_trainer(tmp_path, beta=0.1)

    class Accelerator:
        distributed_type = "FSDP"
        state = type("State", (), {"fsdp_plugin": type("Plugin", (), {"fsdp_version": 2})})

    trainer.accelerator = Accelerator()
    assert anchored(trainer).reference is trainer.ref_model


def test_unknown_commands_and_arguments_are_refused(tmp_path):
    """By name."""
    _, unknown, _ = train(tmp_path / "a", kind_of_command="explode")
    _, odd, _ = train(tmp_path / "b", args={"optimizer": "half"})

    assert refusal(unknown).startswith("this trainer cannot do 'explode'")
    assert refusal(odd) == "reset-reference optimizer='half' is not one of clear, keep"


def test_a_handler_that_fails_answers_and_training_goes_on(tmp_path, monkeypatch):
    """No command is left without an answer."""

    def explode(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr("rlwatch.integrations.reference.copy_all", explode)
    trainer, run, _ = train(tmp_path)

    assert refusal(run, CommandStatus.FAILED) == "it failed inside the trainer; see the training log"
    assert trainer.state.global_step == 5
    assert run.counters["errors"] == 1


@pytest.mark.parametrize("started_as_peft", [False, True], ids=["new adapter", "existing adapter"])
def test_adapters_are_reset_to_adapters(tmp_path, started_as_peft):
    """LoRA: the frozen adapter ``ref`` takes the policy's weights; the trained one stays active and trainable."""
    model = model_on_disk(tmp_path / "base")
    config = {"model": get_peft_model(model, ADAPTER)} if started_as_peft else {"model": model, "peft_config": ADAPTER}
    trainer, run, _ = train(tmp_path, max_steps=4, learning_rate=1e-2, **config)
    named = dict(trainer.model.named_parameters())
    trained = [n for n, p in named.items() if p.requires_grad]

    assert run.answers[0].status is CommandStatus.DONE
    assert largest_kl(run, 2) > 1e-6
    assert largest_kl(run, 3) < 1e-6
    assert largest_kl(run, 4) > 1e-6
    assert trainer.model.active_adapter == "default"
    assert trained
    assert all(".default." in n for n in trained)


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.thorough) for kind in VARIANTS]
)
@pytest.mark.filterwarnings("ignore")  # of PEFT, about kernels that this machine has not
def test_adapters_of_every_kind_are_reset(tmp_path, kind):
    """The step after it begins at a KL of 0, and training goes on from there."""
    _, run, _ = train(
        tmp_path, max_steps=4, learning_rate=1e-2, model=model_on_disk(tmp_path / "base"), peft_config=VARIANTS[kind]()
    )

    assert run.answers[0].status is CommandStatus.DONE, run.answers[0].result
    assert largest_kl(run, 3) < 1e-6 < largest_kl(run, 2)
    assert largest_kl(run, 4) > 1e-6


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_share_their_projections_are_refused_and_left_as_they_were(tmp_path):
    """VeRA: a second adapter has none of its own that could be compared."""
    config = VeraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    model = model_on_disk(tmp_path / "base")
    trainer, run, _ = train(tmp_path, max_steps=4, learning_rate=1e-2, model=model, peft_config=config)

    assert run.answers[0].status is CommandStatus.REJECTED
    assert "cannot be mirrored" in run.answers[0].result
    assert (set(trainer.model.peft_config), trainer.state.global_step) == ({"default"}, 4)


def test_making_the_adapter_draws_nothing_from_trainings_random_stream(tmp_path):
    """Its initial values come from a fork of the generator."""
    model = get_peft_model(fresh_model(), ADAPTER)
    state = torch.get_rng_state()

    pairs = adapter_pairs(model)

    assert torch.equal(state, torch.get_rng_state())
    assert len(pairs) == 12
    assert all(ours.requires_grad and not theirs.requires_grad for _, ours, theirs in pairs)
    assert len(adapter_pairs(model)) == 12


def test_an_adapter_without_counterpart_leaves_no_random_reference_behind():
    """A half-made ``ref`` would become TRL's reference: it is taken away again."""

    model = get_peft_model(fresh_model(), ADAPTER)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_A" in n).view(-1)[0] = math.inf

    with pytest.raises(RLWatchError, match="not finite"):
        adapter_pairs(model)
    assert set(model.peft_config) == {"default"}


def test_trls_own_reference_sync_is_an_event_too(tmp_path):
    """Detectors must know that KL starts anew, whoever moved the reference."""
    trainer, run = make_trainer(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, max_steps=5), FakeRun()
    watch(trainer, run=run)
    trainer.train()

    assert [(e.kind, e.step, e.body["by"]) for e in run.events] == [
        ("reference_reset", 2, "SyncRefModelCallback"),
        ("reference_reset", 4, "SyncRefModelCallback"),
    ]
    assert run.events[0].body["mixup"] == 0.6
