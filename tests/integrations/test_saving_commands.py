"""Commands that save a run in a live training: hold, skip-step, the settings, raise-lr, sync-weights, undo."""

import math
from dataclasses import replace

import pytest
import torch
from test_rollback import EVERY, answers, equal, moments, weights
from test_trl_control import After, results
from tiny_loop import CLIP, FakeRun, train
from tiny_trl import FakeRun as TrlRun
from tiny_trl import make_trainer

import rlwatch
from rlwatch.control.policy import NamedSetting, RunHealth
from rlwatch.control.rescue import RescuePolicy
from rlwatch.errors import ConfigError
from rlwatch.integrations.commands import UNDO_MINUTES, UndoLast
from rlwatch.integrations.trl import watch
from rlwatch.records import Alert, AlertState, Command, Finding, JudgedRow, Severity

pytestmark = pytest.mark.torch


def sent(at, *, steps=6, run=None, spoil=None, **kwargs):
    """Train a loop with commands before the step after ``at``; the state after each boundary, and the run."""
    run, states, made = run or FakeRun(), {}, []

    def make(policy, optimizer, reference):
        watcher = rlwatch.Watcher(policy, optimizer, ref_model=reference, clip=CLIP, run=run, **kwargs)
        made.extend((policy, optimizer, watcher))
        obey = watcher.obey

        def looked():
            obey()
            states[watcher.steps.last] = weights(policy), moments(optimizer)

        watcher.obey = looked
        if spoil is not None:
            spoil(policy, watcher)
        return watcher

    def before(step, _watcher):
        for number, (kind, args, *force) in enumerate(at.get(step, ())):
            run.queue.append(Command(f"{step}.{number}", "r", kind, args, bool(force), requested_by="ann@lab"))

    train(make, steps=steps, before_step=before)
    return run, states


# Hold and skip.


def test_a_held_batch_is_sampled_and_changes_neither_weights_nor_optimizer():
    """Two batches after step 2; the reward of each is in the answer's event, and the third updates again."""
    run, states = sent({2: [("hold", {"batches": 2})]})

    assert equal(states[2][0], states[3][0])
    assert equal(states[2][0], states[4][0])
    assert equal(states[2][1], states[4][1])
    assert not equal(states[4][0], states[5][0])
    begun, ended = [event for event in run.events if event.kind == "command"]
    assert (begun.step, ended.step, ended.body["by"]) == (2, 4, "rlwatch")
    assert ended.body["report"]["batches"] == 2
    assert ended.body["report"]["rewards"] == [run.steps[3]["reward/mean"], run.steps[4]["reward/mean"]]


def test_a_hold_ends_when_it_is_told_to_or_taken_back():
    """``hold --batches 0`` and ``undo`` are the same; with nothing held the first is refused."""
    for end in (("hold", {"batches": 0}), ("undo", {})):
        run, states = sent({2: [("hold", {"batches": 100})], 3: [end]})

        assert equal(states[2][0], states[3][0])
        assert not equal(states[3][0], states[4][0])
        assert [status for status, _ in answers(run)] == ["done", "done"]
    run, _ = sent({2: [("hold", {"batches": 0})]})

    assert answers(run) == [("rejected", "no batch is held")]


def test_an_update_is_skipped_and_the_next_is_not():
    """By default one; weight decay, which Adam applies without a gradient's help, is skipped with it."""
    run, states = sent({2: [("skip-step", {})]})

    assert equal(states[2][0], states[3][0])
    assert equal(states[2][1], states[3][1])
    assert not equal(states[3][0], states[4][0])
    assert run.events[-1].body["report"]["summary"] == "1 of 1 update were left out; updates go on"


def nan_in(step):
    """Spoil the gradient of that step."""

    def spoil(policy, watcher):
        gradients = watcher.gradients

        def spoiled():
            if watcher.steps.last == step - 1:
                policy.head.weight.grad[0, 0] = math.nan
            gradients()

        watcher.gradients = spoiled

    return spoil


def test_updates_that_are_not_finite_are_skipped_and_the_others_are_made():
    """A NaN in a gradient before step 4 would have broken every weight."""
    nan_at_4 = nan_in(4)
    run, states = sent({2: [("skip-step", {"when": "nonfinite", "steps": 3})]}, spoil=nan_at_4)
    assert not equal(states[2][0], states[3][0])
    assert equal(states[3][0], states[4][0])
    assert not equal(states[4][0], states[5][0])
    assert all(bool(tensor.isfinite().all()) for tensor in states[5][0].values())
    assert "1 of 3 updates were left out" in run.events[-1].body["report"]["summary"]


def test_an_update_left_out_by_hand_does_not_end_the_guard_against_those_that_are_not_finite():
    """One update is skipped while the guard is on; the NaN two steps later still changes nothing. 0 steps end each."""
    asked = {
        1: [("skip-step", {"when": "nonfinite", "steps": 100})],
        2: [("skip-step", {})],
        5: [("skip-step", {"steps": 0})],
    }
    run, states = sent(asked, spoil=nan_in(5), steps=7)

    assert equal(states[2][0], states[3][0])
    assert not equal(states[3][0], states[4][0])
    assert equal(states[4][0], states[5][0])
    assert not equal(states[5][0], states[6][0])
    assert "1 of 4 updates were left out" in run.events[-1].body["report"]["summary"]


class Guarded(FakeRun):
    """Its owner permits to leave out updates that are not finite."""

    rescue = RescuePolicy(dry_run=False, skip_nonfinite=True)


def test_a_permitted_guard_is_on_before_the_first_update_and_leaves_out_the_first_that_is_not_finite():
    """The first update would have broken every weight; the ledger holds what was left out, and when it began."""
    run, states = sent({}, run=Guarded(), spoil=nan_in(1), steps=5)
    begun = next(event for event in run.events if event.kind == "command")
    ledger = [(event.step, event.body["evidence"]) for event in run.events if event.kind == "rescue"]

    assert all(bool(tensor.isfinite().all()) for tensor in states[4][0].values())
    assert not equal(states[1][0], states[2][0])
    assert (begun.step, begun.body["command"], begun.body["by"]) == (0, "skip-step", "policy:rescue")
    assert ledger == [(1, {"skipped": 1})]


def test_a_guard_of_a_dry_run_only_says_so_and_a_permitted_one_changes_nothing_in_a_sound_run():
    """Weights and optimizer of a guarded run are those of an unguarded one, bit for bit."""
    dry = Guarded()
    dry.rescue = RescuePolicy(skip_nonfinite=True)
    run, plain = sent({}, run=dry, steps=5)
    _, guarded = sent({}, run=Guarded(), steps=5)

    assert [event.body["outcome"] for event in run.events if event.kind == "rescue"] == ["dry run"]
    assert not [event for event in run.events if event.kind == "command"]
    for step in range(1, 5):
        assert equal(plain[step][0], guarded[step][0])
        assert equal(plain[step][1], guarded[step][1])


def test_without_an_optimizer_nothing_can_be_held():
    """The reason is the answer."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run)
    for kind in ("hold", "skip-step", "raise-lr", "sync-weights"):
        run.queue.append(Command(kind, "r", kind, {"scale": 1.0} if kind == "raise-lr" else {}))
    watcher.obey()

    assert [status for status, _ in answers(run)] == ["rejected"] * 4
    assert "there is no optimizer" in answers(run)[0][1]
    assert "without sync_weights=" in answers(run)[3][1]


# Settings.


def test_a_loops_own_settings_are_changed_and_taken_back():
    """A number, and one of two arguments; sync calls the loop."""
    box, synced = {"entropy": 0.01, "low": 0.2, "high": 0.28}, []
    adjustable = {
        "set-entropy-coef": (lambda: box["entropy"], lambda value: box.update(entropy=value)),
        "set-clip": (
            lambda: {"low": box["low"], "high": box["high"]},
            lambda low, high: box.update(low=low, high=low if high is None else high),
        ),
    }
    at = {
        1: [("set-entropy-coef", {"value": 0.0}), ("set-clip", {"low": 0.1}), ("sync-weights", {})],
        2: [("undo", {})],
        3: [("undo", {})],
    }
    run, _ = sent(at, adjustable=adjustable, sync_weights=lambda: synced.append(1))

    assert box == {"entropy": 0.0, "low": 0.2, "high": 0.28}
    assert synced == [1]
    assert [status for status, _ in answers(run)] == ["done"] * 4 + ["rejected"]
    assert answers(run)[1][1] == "low 0.2 -> 0.1, high 0.28 -> 0.1"
    assert answers(run)[3][1] == "set-clip taken back: low 0.1 -> 0.2, high 0.1 -> 0.28"
    assert answers(run)[4][1] == "the last command, undo, cannot be taken back"


@pytest.mark.parametrize(
    ("adjustable", "why"),
    [({"set-speed": (float, float)}, "set-speed"), ({"set-clip": float}, "two functions")],
)
def test_settings_that_are_none_are_refused_at_set_up(adjustable, why):
    """Loud and early."""
    with pytest.raises(ConfigError, match=why):
        rlwatch.Watcher(run=FakeRun(), adjustable=adjustable)


def test_a_rate_is_raised_and_taken_back_but_not_in_a_collapse():
    """To twice the schedule's, and back to the tenth it had; the veto can be forced."""
    run = FakeRun()
    sent({1: [("lower-lr", {"scale": 0.1})], 2: [("raise-lr", {"scale": 2.0})], 3: [("undo", {})]}, run=run)
    collapsing = FakeRun()
    collapsing.findings = (Finding("d", "entropy_collapse", Severity.CRITICAL, 1, 1, ""),)
    sent({1: [("raise-lr", {"scale": 2.0})]}, run=collapsing)

    assert [status for status, _ in answers(run)] == ["done"] * 3
    assert "2 of the schedule" in answers(run)[1][1]
    assert "0.1 of the schedule" in answers(run)[2][1]
    assert answers(collapsing)[0][0] == "rejected"
    assert "would speed the collapse up" in answers(collapsing)[0][1]


def test_undo_asks_the_vetoes_of_what_it_does():
    """A KL coefficient that was raised is not lowered again in a collapse, unless forced."""
    run = FakeRun()
    run.findings = (Finding("d", "entropy_collapse", Severity.CRITICAL, 1, 1, ""),)
    box, raised = {"beta": 0.1}, ("set-kl-coef", {"value": 0.5})
    of_the_loop = {"kl_coef": lambda: box["beta"], "set_kl_coef": lambda value: box.update(beta=value)}
    sent({1: [raised], 2: [("undo", {})], 3: [("undo", {}, True)]}, run=run, **of_the_loop)

    assert [status for status, _ in answers(run)] == ["done", "rejected", "done"]
    assert "collapse" in answers(run)[1][1]


def test_a_rollback_is_taken_back_by_undo():
    """The state of before, to the bit."""
    run, states = sent({3: [("rollback", {"to": 1})], 4: [("undo", {})]}, snapshots=EVERY)
    _, plain = sent({})

    assert [status for status, _ in answers(run)] == ["done", "done"]
    assert equal(states[3][0], plain[1][0])
    assert equal(states[4][0], plain[3][0])
    assert run.events[-1].body["report"]["undid"] == "rollback"


def test_undo_has_its_time_and_what_leaves_nothing_behind_hides_nothing():
    """An hour; a reset cannot be taken back, a checkpoint in between does not matter."""

    class Now:
        seconds = 0.0

        def monotonic(self):
            return self.seconds

    class Echo:
        kind = "set-kl-coef"

        def check(self, command):
            pass

        def __call__(self, command):
            return {"summary": str(command.args["value"])}

    clock = Now()
    undo, wish = UndoLast(lambda kind: Echo() if kind == "set-kl-coef" else None, clock), Command("u", "r", "undo")
    changed = Command("a", "r", "set-kl-coef", {"value": 2})

    with pytest.raises(rlwatch.RLWatchError, match="nothing to undo"):
        undo.check(wish)
    undo.done(changed, {"undo": {"kind": "set-kl-coef", "args": {"value": 1}}})
    undo.done(Command("b", "r", "save-checkpoint"), {})
    assert undo(wish)["summary"] == "set-kl-coef taken back: 1"
    clock.seconds = 60 * UNDO_MINUTES + 1
    with pytest.raises(rlwatch.RLWatchError, match="more than 60 minutes old"):
        undo.check(wish)
    undo.done(Command("c", "r", "reset-reference"), {})
    with pytest.raises(rlwatch.RLWatchError, match="reset-reference, cannot be taken back"):
        undo.check(wish)


# TRL.


class Sound(TrlRun):
    """A run whose rows are all judged sound."""

    def health(self):
        return RunHealth(rows=tuple(JudgedRow(step, "") for step in range(60)))


def told(tmp_path, at, **config):
    """Train with commands at the end of steps; the trainer, the run, the weights after each step."""
    trainer, run, states = make_trainer(tmp_path, **{"max_steps": 5, **config}), Sound(), {}

    def send(step):
        run.queue += [Command(f"{step}.{n}", "r1", kind, args) for n, (kind, args) in enumerate(at[step])]

    trainer.add_callback(After({step: lambda step=step: send(step) for step in at}))
    watch(trainer, run=run)
    trainer.add_callback(After({n: lambda n=n: states.update({n: weights(trainer.model)}) for n in range(1, 6)}))
    trainer.train()
    return trainer, run, states


def test_trl_holds_and_goes_on(tmp_path):
    """Two batches are sampled and nothing is updated; the trainer counts its steps as ever."""
    trainer, run, states = told(tmp_path, {2: [("hold", {"batches": 2})]})

    assert equal(states[2], states[4])
    assert not equal(states[4], states[5])
    assert trainer.state.global_step == 5
    assert len(run.events[-1].body["report"]["rewards"]) == 2


def test_trls_settings_change_while_it_runs(tmp_path):
    """Clip range, entropy bonus, gradient clipping: TRL reads them for each batch."""
    at = {
        2: [
            ("set-clip", {"low": 0.05, "high": 0.1}),
            ("set-entropy-coef", {"value": 0.5}),
            ("set-grad-clip", {"value": 0.001}),
        ]
    }
    trainer, run, states = told(tmp_path / "a", at, entropy_coef=0.01, max_grad_norm=1.0)
    _, _, plain = told(tmp_path / "b", {}, entropy_coef=0.01, max_grad_norm=1.0)

    assert [result[1] for result in results(run)] == ["done"] * 3
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.entropy_coef) == (0.05, 0.1, 0.5)
    assert trainer.args.max_grad_norm == 0.001
    assert equal(states[2], plain[2])
    assert not equal(states[3], plain[3])


def test_what_trl_does_not_read_or_have_is_refused(tmp_path):
    """No bonus was made at the start, there is no engine, there are no snapshots."""
    at = {
        2: [
            ("set-entropy-coef", {"value": 0.5}),
            ("set-is-correction", {"mode": "off"}),
            ("sync-weights", {}),
            ("rollback", {}),
        ]
    }
    _, run, _ = told(tmp_path, at)

    assert [result[1] for result in results(run)] == ["rejected"] * 4
    reasons = [result[3] for result in results(run)]
    assert "no entropy bonus" in reasons[0]
    assert "no rollout engine" in reasons[1]
    assert "no rollout engine" in reasons[2]
    assert "snapshots=True" in reasons[3]


def test_settings_survive_a_resume(tmp_path):
    """They are in the checkpoint, and set again before the first step that follows."""
    config = {"save_steps": 3, "save_strategy": "steps", "max_steps": 4}
    told(tmp_path, {2: [("set-clip", {"low": 0.05, "high": 0.1}), ("set-grad-clip", {"value": 0.5})]}, **config)
    trainer, run = make_trainer(tmp_path, **config), Sound()
    watch(trainer, run=run)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))

    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.05, 0.1)
    assert trainer.args.max_grad_norm == 0.5
    restored = [event.body["command"] for event in run.events if event.kind == "command"]
    assert sorted(restored) == ["set-clip", "set-grad-clip"]


def test_float_tensors_of_a_float16_scaler_do_not_matter():
    """A gradient that is dropped inside the optimizer's step was already looked at by the scaler."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = FakeRun()
    watcher = rlwatch.Watcher(model, optimizer, run=run)
    run.queue.append(Command("a", "r", "skip-step", {}))
    watcher.obey()
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    before = weights(model)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    assert equal(before, weights(model))
    assert optimizer.state_dict()["state"] == {}


def test_a_frozen_rate_stays_though_the_schedule_rises(tmp_path):
    """A tenth of the rate of step 2, at every later step; the weights are those of a constant rate."""
    config = {"lr_scheduler_type": "linear", "warmup_steps": 100, "learning_rate": 1e-2}
    trainer, run, _ = told(tmp_path / "a", {2: [("lower-lr", {"scale": 0.1, "freeze": "yes"})]}, **config)
    plain, _, _ = told(tmp_path / "b", {2: [("lower-lr", {"scale": 0.1})]}, **config)
    taps = {step: row["optim/lr"] for step, row in run.logged if "optim/lr" in row and "learning_rate" not in row}

    assert results(run)[0][1] == "done"
    assert taps[4] == taps[5] == pytest.approx(0.1 * 1e-2 * 2 / 100)
    assert trainer.optimizer.param_groups[0]["lr"] > taps[5]  # the schedule has gone on
    assert not equal(weights(trainer.model), weights(plain.model))


def test_a_frozen_rate_outlives_a_rollback_and_ends_with_the_next_command():
    """The cause is not put back with the weights."""
    at = {
        1: [("lower-lr", {"scale": 0.5, "freeze": "yes"})],
        2: [("rollback", {"to": 0})],
        3: [("lower-lr", {"scale": 1.0})],
    }
    run, _ = sent(at, snapshots=EVERY)
    rates = {step: row["optim/lr"] for step, row in run.steps.items() if "optim/lr" in row}

    assert [status for status, _ in answers(run)] == ["done"] * 3
    assert rates[3] == pytest.approx(rates[1] / 2)
    assert rates[4] == pytest.approx(rates[1])


# A rescue, through the controller of a live loop.


class Collapsing(FakeRun):
    """Its reward falls after step 4, and every snapshot up to step 2 is good; ``outside``: whatever the weights."""

    rescue = RescuePolicy(dry_run=False, probe=1)

    def health(self):
        step = max(self.steps, default=0)
        rows = [
            JudgedRow(s, "" if s <= 4 else "the reward fell", 0.9 if s <= 4 else 0.0, 0.01) for s in range(step + 1)
        ]
        known = [JudgedRow(s, "", 0.9) for s in range(11)] if step < 4 else rows
        alert = Alert("a", "r", "rule", "reward_drop", Severity.CRITICAL, AlertState.FIRING, 5, 5, "it fell")
        return RunHealth(alerts=(alert,) if step >= 5 else (), rows=tuple(known))


@pytest.mark.parametrize("dry", [False, True])
def test_a_permitted_policy_holds_restores_and_stays_where_the_reward_does_not_come_back(dry):
    """The rewards of this loop are far from the .9 of before: the fault is outside. Each act is an event, with its why."""
    run = Collapsing()
    run.rescue = RescuePolicy(dry_run=dry, probe=1)
    _, states = sent({}, run=run, steps=9, snapshots=EVERY)
    acts = [(e.step, e.body["command"], e.body["by"]) for e in run.events if e.kind == "command"]
    ledger = [e.body for e in run.events if e.kind == "rescue"]

    if dry:
        assert acts == []
        assert [entry["outcome"] for entry in ledger] == ["dry run"]
        assert not equal(states[7][0], states[8][0])
        return
    assert acts == [(5, "hold", "policy:rescue"), (6, "rollback", "policy:rescue")]
    assert equal(states[7][0], states[8][0])
    assert ledger[-1]["stage"].startswith("held")
    assert "a person is needed" in ledger[-1]["why"]


class Reweighted(Collapsing):
    """No reward judges weights; the log shows that an entropy bonus was switched on before all went wrong."""

    rescue = RescuePolicy(dry_run=False, probe=1)

    def health(self):
        named = NamedSetting("entropy_bonus", "policy/entropy_coef", 4, 0.01, 0.5, "strong")
        seen = super().health()
        rows = tuple(row._replace(level=None) for row in seen.rows)
        return replace(seen, rows=rows, named=(named,) if seen.alerts else ())


@pytest.mark.parametrize("adjustable", [True, False])
def test_a_setting_that_the_diagnosis_names_is_set_back_or_else_updates_stay_held(adjustable):
    """By its own command, with the reason; the loop that cannot is held, and says for what."""
    box = {"value": 0.5}
    means = {"set-entropy-coef": (lambda: box["value"], lambda value: box.update(value=value))} if adjustable else {}
    run, states = sent({}, run=Reweighted(), steps=13, snapshots=EVERY, adjustable=means)
    acts = [event.body["command"] for event in run.events if event.kind == "command"]
    ledger = [event.body for event in run.events if event.kind == "rescue"]

    if adjustable:
        assert acts[-4:] == ["rollback", "lower-lr", "set-entropy-coef", "hold"]
        assert box == {"value": 0.01}
        why = next(e.body["why"] for e in run.events if e.body.get("command") == "set-entropy-coef")
        assert "policy/entropy_coef changed at step 4 (0.01 to 0.5)" in why
        return
    assert acts[-2:] == ["rollback", "lower-lr"]
    assert equal(states[11][0], states[12][0])
    assert "updates stay held until it is 0.01 again" in ledger[-1]["why"]
    assert "this trainer cannot do 'set-entropy-coef'" in ledger[-1]["why"]
