"""What a plain loop can be told to do while it runs, and what of that survives a restart."""

import copy
import math
import subprocess
import textwrap

import pytest
import torch
from preloaded import Program
from tiny_loop import CLIP, FakeRun, fresh_policy, train

import rlwatch
from rlwatch.records import CommandStatus, Finding, Severity

pytestmark = pytest.mark.torch
KL = ("policy/kl_ref_k1", "policy/kl_ref_k2", "policy/kl_ref_k3")


def make(run, **kwargs):
    return lambda policy, optimizer, reference: rlwatch.Watcher(
        policy, optimizer, **{"ref_model": reference, "run": run, "clip": CLIP, **kwargs}
    )


def told(kind="reset-reference", *, at=2, run=None, force=False, steps=4, epochs=1, args=None, **kwargs):
    """Train a loop whose dropout is off (so that KL of equal models is 0), told something before step ``at + 1``."""
    run = run or FakeRun()

    def start(policy, optimizer, reference):
        policy.drop.p = 0.0
        return make(run, **kwargs)(policy, optimizer, reference)

    def before(step, watcher):
        if step == at:
            run.send(kind, force=force, **(args or {}))

    return train(start, steps=steps, epochs=epochs, before_step=before, lr=2e-2), run


def largest_kl(run, step):
    return max(abs(run.steps[step][name]) for name in KL)


def answer(run):
    (only,) = run.answers
    return only.status.value, only.step, only.result


def test_after_a_reset_every_estimate_of_kl_is_zero_at_the_next_step():
    """And grows again; without the reset it does not fall."""
    _, run = told()
    _, plain = told(at=99)

    assert largest_kl(run, 2) > 1e-4
    assert largest_kl(run, 3) < 1e-6
    assert largest_kl(run, 4) > 1e-5
    assert largest_kl(plain, 3) > 1e-4


def test_the_answer_and_the_event_say_what_was_done():
    """Step, KL before, who and why."""
    outcome, run = told(steps=3)
    status, step, words = answer(run)
    (event,) = [e for e in run.events if e.kind == "reference_reset"]

    assert (status, step) == ("done", 2)
    assert words.startswith("KL 0.")
    assert event.body["by"] == "ann@lab"
    assert event.body["exact"] is True
    assert event.body["kl_before"] == run.steps[2]["policy/kl_ref_k3"]
    assert not any(parameter.requires_grad for parameter in outcome.reference.parameters())


@pytest.mark.usefixtures("behind")
def test_kl_before_a_reset_is_that_of_the_last_step_where_the_device_is_behind():
    """Its copy is then waited for: the number of an older step would be told for it."""
    _, run = told()
    (event,) = [event for event in run.events if event.kind == "reference_reset"]

    assert event.body["kl_before"] == run.steps[2]["policy/kl_ref_k3"]


@pytest.mark.parametrize(("optimizer", "after"), [("clear", 1.0), ("keep", 3.0)])
def test_the_optimizer_is_cleared_or_kept(optimizer, after):
    """ProRL v1 starts Adam anew; v2 leaves it alone."""
    outcome, _ = told(args={"optimizer": optimizer}, steps=3)

    assert {float(entry["step"]) for entry in outcome.optimizer.state.values()} == {after}


def test_a_reset_of_the_reference_alone_leaves_everything_else_to_the_bit():
    """The next rollouts are those of an undisturbed run."""
    disturbed, _ = told(args={"optimizer": "keep"}, steps=3)
    plain, _ = told(at=99, steps=3)

    assert torch.equal(disturbed.batches[2].ids, plain.batches[2].ids)
    assert torch.equal(disturbed.batches[2].old_logp, plain.batches[2].old_logp)
    assert not torch.equal(disturbed.batches[2].ref_logp, plain.batches[2].ref_logp)


def test_a_command_waits_for_the_boundary_the_loop_names():
    """Rollouts used twice keep one reference: asked within them, done before the next ones."""
    _, run = told(at=2, steps=6, epochs=2)

    assert answer(run)[:2] == ("done", 2)
    assert largest_kl(run, 2) > 1e-5
    assert largest_kl(run, 3) < 1e-6


def test_during_a_collapse_a_reset_is_refused_unless_forced():
    """By the name of what was found."""
    sick, forced = FakeRun(), FakeRun()
    collapse = Finding("entropy", "entropy_collapse", Severity.CRITICAL, step=2, onset_step=1, message="entropy fell")
    sick.findings = forced.findings = (collapse,)
    told(run=sick)
    told(run=forced, force=True)

    assert answer(sick)[0] == "rejected"
    assert "entropy_collapse since step 1" in answer(sick)[2]
    assert answer(forced)[0] == "done"


@pytest.mark.parametrize(
    ("kind", "args", "kwargs", "reason"),
    [
        ("reset-reference", {}, {"ref_model": None}, "there is no reference model"),
        ("save-checkpoint", {}, {}, "Watcher was made without save=, so it does not know how to save a checkpoint"),
        ("set-kl-coef", {"value": 0.1}, {}, "Watcher was made without kl_coef= and set_kl_coef="),
        ("set-kl-coef", {"value": 0.1}, {"kl_coef": 0.5}, "Watcher was made without kl_coef= and set_kl_coef="),
        ("dance", {}, {}, "this trainer cannot do 'dance'"),
    ],
)
def test_what_the_loop_gave_no_means_for_is_refused_by_name(kind, args, kwargs, reason):
    """Nobody waits for an answer."""
    _, run = told(kind, args=args, **kwargs)

    assert answer(run)[0] == "rejected"
    assert reason in answer(run)[2]


def adapted(*names):
    """A policy with LoRA adapters; the last one is trained."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    policy = peft.get_peft_model(fresh_policy(), config, adapter_name=names[-1])
    for name in names[:-1]:
        policy.add_adapter(name, config)
    policy.set_adapter(names[-1])
    return policy


def test_an_adapter_named_ref_takes_the_weights_of_the_trained_one():
    """Its loop takes it as the reference."""
    run, policy = FakeRun(), adapted("ref", "default")
    watcher = rlwatch.Watcher(policy, run=run)
    run.send(optimizer="keep")
    watcher.obey()
    weights = dict(policy.named_parameters())
    ours = {name: weight for name, weight in weights.items() if ".default." in name}

    assert answer(run)[0] == "done"
    assert len(ours) == 2
    assert all(torch.equal(weight, weights[name.replace(".default.", ".ref.")]) for name, weight in ours.items())


def test_a_base_model_that_is_the_reference_cannot_be_reset():
    """An adapter nobody looks at would change nothing: the person is told."""
    run, policy = FakeRun(), adapted("default")
    watcher = rlwatch.Watcher(policy, run=run)
    run.send(optimizer="keep")
    watcher.obey()

    assert answer(run)[0] == "rejected"
    assert answer(run)[2].startswith("the reference is the base model without its adapter")
    assert set(policy.peft_config) == {"default"}


def test_a_loop_without_model_or_optimizer_cannot_be_reset_or_slowed():
    """Each by its reason."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run)
    run.send("reset-reference")
    watcher.obey()
    run.send("lower-lr", scale=0.5)
    watcher.obey()

    assert [a.result for a in run.answers] == [
        "Watcher was made without model=, so there is nothing to reset the reference to",
        "there is no optimizer whose learning rate could be lowered",
    ]


def test_a_checkpoint_is_saved_by_the_loops_own_function():
    """And the answer says where."""
    _, run = told("save-checkpoint", save=lambda: "checkpoints/2")

    assert answer(run) == ("done", 2, "saved to checkpoints/2")


def test_the_weight_of_kl_is_set_by_the_loops_own_function():
    """And recorded as it is from then on."""
    weight = [0.5]
    _, run = told(
        "set-kl-coef",
        args={"value": 0.25},
        kl_coef=lambda: weight[0],
        set_kl_coef=lambda value: weight.__setitem__(0, value),
    )

    assert weight == [0.25]
    assert [metrics["policy/kl_coef"] for metrics in run.steps.values()] == [0.5, 0.5, 0.25, 0.25]


def test_a_weight_given_as_a_number_follows_what_was_set():
    """What is recorded is what holds."""
    heard = []
    _, run = told("set-kl-coef", args={"value": 0.25}, kl_coef=0.5, set_kl_coef=heard.append)

    assert heard == [0.25]
    assert [metrics["policy/kl_coef"] for metrics in run.steps.values()] == [0.5, 0.5, 0.25, 0.25]


def test_the_learning_rate_is_lowered_without_a_schedule():
    """The recorded rate is the one the steps were taken with."""
    _, run = told("lower-lr", args={"scale": 0.5})

    assert answer(run)[0] == "done"
    assert [metrics["optim/lr"] for metrics in run.steps.values()] == [2e-2, 2e-2, 1e-2, 1e-2]


def test_the_learning_rate_is_lowered_with_a_schedule():
    """Every later rate of it."""
    run, policy = FakeRun(), fresh_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    watcher = rlwatch.Watcher(policy, optimizer, scheduler=scheduler, run=run)
    for step in (1, 2, 3):
        if step == 2:
            run.send("lower-lr", scale=0.1)
        watcher.obey()
        watcher.gradients()
        optimizer.step()
        scheduler.step()
        watcher.step(step)

    assert [metrics["optim/lr"] for metrics in run.steps.values()] == pytest.approx([0.4, 0.02, 0.01])


def test_a_loop_that_asks_is_stopped_after_a_save():
    """At the boundary where it was told."""
    saves = []
    outcome, run = told("stop", steps=9, save=lambda: saves.append("x"))

    assert list(run.steps) == [1, 2]
    assert saves == ["x"]
    assert answer(run) == ("done", 2, "saved; the loop ends here")
    assert outcome.watcher.should_stop


def test_a_loop_that_never_asks_is_not_said_to_be_stopped():
    """The person is told that it goes on; once it asks, it can be stopped."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run)
    run.send("stop", save="no")
    watcher.obey()
    asked = watcher.should_stop
    run.send("stop", save="no")
    watcher.obey()

    refused, done = run.answers
    assert refused.result == "this loop has not asked watcher.should_stop so far, so it would go on"
    assert not asked
    assert done.status is CommandStatus.DONE
    assert watcher.should_stop


def test_a_handler_that_fails_answers_and_the_loop_goes_on():
    """The loop's own save function raises."""

    def save():
        raise OSError("disk full")

    _, run = told("save-checkpoint", save=save)

    assert answer(run)[:2] == ("failed", 2)
    assert list(run.steps) == [1, 2, 3, 4]
    assert run.counters["errors"] == 1


def test_a_policy_of_nans_never_becomes_the_reference():
    """Not even by force."""
    run, policy = FakeRun(), fresh_policy()
    reference = copy.deepcopy(policy)
    watcher = rlwatch.Watcher(policy, ref_model=reference, run=run)
    with torch.no_grad():
        policy.head.bias[0] = math.nan
    run.send(force=True, optimizer="keep")
    watcher.obey()

    assert "roll back to a checkpoint" in answer(run)[2]
    assert all(parameter.isfinite().all() for parameter in reference.parameters())


# --- what outlives the process -------------------------------------------------------------------------


def test_a_reset_survives_a_restart_neither_lost_nor_repeated(tmp_path):
    """The new process builds its reference anew; the checkpoint brings the one of the reset."""
    outcome, _ = told(steps=3)
    anchor = copy.deepcopy(outcome.reference.state_dict())
    checkpoint = tmp_path / "step-3"
    checkpoint.mkdir()
    outcome.watcher.saved(checkpoint)
    state = outcome.watcher.state_dict()

    run, policy = FakeRun(), fresh_policy()
    reference = copy.deepcopy(policy)
    watcher = make(run)(policy, torch.optim.AdamW(policy.parameters()), reference)
    watcher.load_state_dict(state)
    watcher.resumed(checkpoint)

    assert all(torch.equal(value, anchor[name]) for name, value in reference.state_dict().items())
    (event,) = [e for e in run.events if e.kind == "reference_restored"]
    assert (event.step, event.body["reset_step"]) == (3, 2)


def test_without_a_reset_nothing_is_kept_and_nothing_changes(tmp_path):
    """The reference of the loop stays."""
    checkpoint = tmp_path / "step-2"
    checkpoint.mkdir()
    outcome, _ = told(at=99, steps=2)
    outcome.watcher.saved(checkpoint)
    run, policy = FakeRun(), fresh_policy(5)
    reference = copy.deepcopy(policy)
    make(run)(policy, None, reference).resumed(checkpoint)

    assert list(checkpoint.iterdir()) == []
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), policy.parameters(), strict=True))
    assert run.events == []


def test_a_weight_that_was_set_survives_a_restart(tmp_path):
    """Set again on the new process's loop."""
    outcome, _ = told("set-kl-coef", args={"value": 0.25}, kl_coef=0.5, set_kl_coef=lambda value: None)
    outcome.watcher.saved(tmp_path)
    heard = []
    make(FakeRun(), kl_coef=0.5, set_kl_coef=heard.append)(fresh_policy(), None, None).resumed(tmp_path)

    assert heard == [0.25]


def test_a_checkpoint_that_is_not_there_is_no_exception(tmp_path):
    """Neither to write nor to read."""
    outcome, run = told(steps=3)
    outcome.watcher.saved(tmp_path / "a" / "b")
    outcome.watcher.resumed(tmp_path / "nowhere")
    outcome.watcher.saved(None)

    assert len(run.steps) == 3


# --- through a real run ------------------------------------------------------------------------------------

LOOP = """
    import copy, sys, torch, rlwatch
    sys.path.insert(0, {here!r})
    from tiny_loop import fresh_policy, train

    def start(policy, optimizer, reference):
        policy.drop.p = 0.0
        watcher = rlwatch.Watcher(policy, optimizer, ref_model=reference, store={store!r}, run_id="loop")
        print("ready", flush=True)
        return watcher

    train(start, steps=100_000, lr=2e-2)
"""


def test_another_process_resets_the_reference_and_then_stops_the_loop(tmp_path):
    """By the store alone, as the command line and the dashboard do it."""
    from pathlib import Path

    from rlwatch.control.commands import request
    from rlwatch.store.url import open_store

    script = textwrap.dedent(LOOP).format(here=str(Path(__file__).parent), store=str(tmp_path))
    with Program(script, stdout=subprocess.PIPE) as loop:
        assert loop.stdout.readline().strip() == "ready"
        store = open_store(str(tmp_path))
        reset = request(store, "loop", "reset-reference", why="KL saturated", by="ann@lab")
        wait_for(store, reset, loop)
        stop = request(store, "loop", "stop", args={"save": "no"})
        loop.wait(timeout=600)

    commands = {command.command_id: command for command in store.commands("loop")}
    done = commands[reset.command_id]
    assert done.status is commands[stop.command_id].status is CommandStatus.DONE
    kl = store.series("loop", ["policy/kl_ref_k3"])["policy/kl_ref_k3"]
    after = dict(zip(kl.steps.tolist(), kl.values.tolist(), strict=True))
    assert abs(after[done.finished_step + 1]) < 1e-6
    assert [e.step for e in store.events("loop") if e.kind == "reference_reset"] == [done.finished_step]


def wait_for(store, command, process):
    """Until the command is settled, or the process has ended."""
    while process.poll() is None:
        (found,) = [c for c in store.commands("loop") if c.command_id == command.command_id]
        if found.status not in (CommandStatus.QUEUED, CommandStatus.CLAIMED):
            return
