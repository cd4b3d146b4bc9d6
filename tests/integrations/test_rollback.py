"""The command ``rollback``: the state of a snapshot, bit for bit, in a live training, or nothing at all."""

import copy

import pytest
import torch
from test_snapshots import Judged, lora
from test_trl_control import After
from tiny_loop import CLIP, train
from tiny_trl import FakeRun as TrlRun
from tiny_trl import make_trainer

import rlwatch
from rlwatch.control.policy import RunHealth
from rlwatch.integrations.rollback import UNDONE
from rlwatch.integrations.snapshots import Snapshots
from rlwatch.integrations.transformers import watch as watch_trainer
from rlwatch.integrations.trl import watch
from rlwatch.records import Command, JudgedRow

pytestmark = pytest.mark.torch
EVERY = Snapshots(every=1, keep=30, share=1.0)


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def moments(optimizer):
    state = optimizer.state_dict()
    found = {f"{i}.{key}": torch.as_tensor(v).clone() for i, kept in state["state"].items() for key, v in kept.items()}
    return found | {f"lr{i}": torch.tensor(group["lr"]) for i, group in enumerate(state["param_groups"])}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# A loop of one's own.


def looped(at, *, run=None, steps=5, **kwargs):
    """Train with commands sent before the step after ``at``: state of each step when its boundary is over."""
    run = run or Judged()
    made, states = [], {}

    def make(policy, optimizer, reference):
        watcher = rlwatch.Watcher(
            policy, optimizer, ref_model=reference, clip=CLIP, run=run, **{"snapshots": EVERY, **kwargs}
        )
        made.append((policy, optimizer))
        obey = watcher.obey

        def looked():
            obey()
            states.setdefault(watcher.steps.last, []).append((weights(policy), moments(optimizer)))

        watcher.obey = looked
        return watcher

    def before(step, _watcher):
        if step in at:
            run.send("rollback", **at[step])

    outcome = train(make, steps=steps, before_step=before)
    return outcome, run, states


def answers(run):
    return [(answer.status.value, answer.result) for answer in run.answers]


@pytest.mark.parametrize("to", [0, 2])
def test_weights_and_optimizer_are_those_of_the_step_bit_for_bit(to):
    """In a plain loop, at the boundary after step 3; also before the first step, where Adam knew no parameter."""
    outcome, run, states = looped({3: {"to": to}})
    (then, moments_then), (now, moments_now) = states[to][0], states[3][0]

    assert equal(then, now)
    assert equal(moments_then, moments_now)
    assert not equal(states[4][0][0], now)  # training goes on from there
    assert answers(run)[0][0] == "done"
    (event,) = [event for event in run.events if event.kind == "command"]
    assert (event.step, event.body["report"]["to_step"], event.body["report"]["from_step"]) == (3, to, 3)
    assert equal(weights(outcome.reference), states[0][0][0])  # the reference stays


def test_the_last_good_one_is_taken_and_none_where_none_is_known():
    """Rows up to 10 are judged and sound: with eight rows after it the snapshot of step 2 is the newest good one.

    Before that it is that of the beginning, which no update has broken.
    """
    _, run, states = looped({3: {}}, run=Judged(up_to=10))
    _, early, begun = looped({3: {}}, run=Judged(up_to=3))
    _, unknown, _ = looped({3: {}}, run=Judged(up_to=0))

    assert equal(states[2][0][0], states[3][0][0])
    assert answers(run)[0][0] == "done"
    assert "after step 2 (good)" in answers(run)[0][1]
    assert equal(begun[0][0][0], begun[3][0][0])
    assert "after step 0 (good)" in answers(early)[0][1]
    assert answers(unknown)[0][0] == "rejected"
    assert "no snapshot is known to be good; kept: 0 (not judged), 1 (not judged)" in answers(unknown)[0][1]


def test_what_was_undone_is_kept_so_that_it_can_be_taken_back():
    """``rollback --to`` the step at which it was done; the broken state is never called good."""
    outcome, run, states = looped({3: {"to": 1}, 4: {"to": 3}})
    undone = outcome.watcher.snapshots.taken
    _, plain, before = looped({})

    assert [status for status, _ in answers(run)] == ["done", "done"]
    assert equal(states[4][0][0], before[3][0][0])
    assert plain.answers == []
    assert [(one.step, one.good) for one in undone if one.why_not == UNDONE] == [(3, False), (4, False)]


def test_what_cannot_be_rolled_back_is_refused_with_the_reason():
    """A step that is not kept, the state that is there already, no snapshots at all, a word that is no step."""
    _, run, states = looped({2: {"to": 7}, 3: {"to": 3}})
    _, none, _ = looped({2: {}}, snapshots=False)
    _, again, _ = looped({3: {"to": 1}}, run=TwiceAtOnce())

    assert [status for status, _ in answers(run)] == ["rejected", "rejected"]
    assert "no snapshot of step 7 is kept; kept: 0 (good)" in answers(run)[0][1]
    assert "no snapshot of step 3 is kept" in answers(run)[1][1]
    assert "snapshots=True" in answers(none)[0][1]
    assert [status for status, _ in answers(again)] == ["done", "rejected"]
    assert "was put back at this very step" in answers(again)[1][1]
    assert len(states[4]) == 1


class WithOthers(Judged):
    """Sends each command among others: of a pause, or after a reset of the reference."""

    def __init__(self, before=(), after=()):
        super().__init__()
        self.before, self.after = before, after

    def send(self, kind, **args):
        self.queue += [Command(f"b-{one}", "r", one, {}, force=True) for one in self.before]
        self.queue.append(Command("a", "r", kind, args))
        self.queue += [Command(f"a-{one}", "r", one, {}) for one in self.after]


def test_a_rollback_during_a_pause_is_done_there_and_one_after_a_reset_keeps_the_new_reference():
    """In the order in which they were sent, each before the next begins."""
    _, run, states = looped({3: {"to": 1}}, run=WithOthers(["pause"], ["resume"]))
    _, other, back = looped({3: {"to": 1}}, run=WithOthers(["reset-reference"]))

    assert [status for status, _ in answers(run)] == ["done"] * 3
    assert equal(states[3][0][0], states[1][0][0])
    assert [status for status, _ in answers(other)] == ["done"] * 2
    assert equal(back[3][0][0], back[1][0][0])
    kinds = [event.kind for event in other.events if event.kind in ("reference_reset", "command")]
    assert kinds == ["reference_reset", "command"]


class TwiceAtOnce(Judged):
    """Sends each command twice."""

    def send(self, kind, **args):
        self.queue += [Command(name, "r", kind, args) for name in ("a", "b")]


def test_a_loop_is_notified_and_if_it_fails_nothing_was_restored():
    """What it buffered was sampled with other weights. A failure leaves the state that was there, to the bit."""
    heard = []
    _, run, _ = looped({3: {"to": 1}}, on_rollback=heard.append)

    def fails(step):
        raise OSError("the engine is gone")

    _, broken, states = looped({3: {"to": 1}}, on_rollback=fails)
    _, _, plain = looped({})

    assert heard == [1]
    assert "the loop was notified" in answers(run)[0][1]
    assert answers(broken)[0][0] == "failed"
    assert equal(states[3][0][0], plain[3][0][0])
    assert equal(states[3][0][1], plain[3][0][1])


def test_weights_that_are_not_finite_are_never_put_back():
    """A snapshot of NaNs is refused by its step, too."""
    run = Judged()

    def make(policy, optimizer, reference):
        return rlwatch.Watcher(policy, optimizer, ref_model=reference, clip=CLIP, run=run, snapshots=EVERY)

    def before(step, watcher):
        if step == 3:
            watcher.snapshots.find("1").kept.tensors["model/head.weight"][0, 0] = float("nan")
            run.send("rollback", to=1)

    train(make, steps=4, before_step=before)

    assert answers(run)[0][0] == "rejected"
    assert "not finite" in answers(run)[0][1]


def test_a_rate_that_was_lowered_stays_lowered():
    """Roll back and lower the rate, in either order: the cause is not put back with the weights."""
    for order in (("rollback", "lower-lr"), ("lower-lr", "rollback")):
        run = Judged()

        def make(policy, optimizer, reference, run=run):
            return rlwatch.Watcher(policy, optimizer, ref_model=reference, clip=CLIP, run=run, snapshots=EVERY)

        def before(step, _watcher, run=run, order=order):
            if step == 3:
                wishes = {"rollback": {"to": 1}, "lower-lr": {"scale": 0.25}}
                run.queue += [Command(kind, "r", kind, wishes[kind]) for kind in order]

        outcome = train(make, steps=4, before_step=before)

        assert [status for status, _ in answers(run)] == ["done", "done"]
        assert outcome.optimizer.param_groups[0]["rlwatch_lr_scale"] == 0.25


# Trainers.


class Sound(TrlRun):
    """A TRL run whose rows are all judged sound."""

    def health(self):
        return RunHealth(rows=tuple(JudgedRow(step, "") for step in range(60)))


def trained(tmp_path, attach, at, *, run=None, states, **config):
    """Train with ``rollback`` sent at the end of steps; the state after each step's boundary."""
    trainer, run = make_trainer(tmp_path, **{"max_steps": 5, **config}), run or Sound()

    def send(step):
        run.queue.append(Command(f"c{step}", "r1", "rollback", at[step], requested_by="ann@lab"))

    trainer.add_callback(After({step: lambda step=step: send(step) for step in at}))
    attach(trainer, run=run, snapshots=EVERY)
    trainer.add_callback(Seen(trainer, states))
    trainer.train()
    return trainer, run


class Seen(After):
    """Keeps the state after each step, once the callbacks before it have run."""

    def __init__(self, trainer, states):
        super().__init__({})
        self.trainer, self.states = trainer, states

    def on_step_end(self, args, state, control, **kwargs):
        optimizer = self.trainer.optimizer
        scheduler = copy.deepcopy(self.trainer.lr_scheduler.state_dict())
        self.states[state.global_step] = weights(self.trainer.model), moments(optimizer), scheduler["last_epoch"]


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_a_trl_trainer_goes_back_bit_for_bit(tmp_path, kind, peft):
    """Weights, moments, the rate and the schedule's place; step 5 differs from what it was without."""
    states = {}
    config = {"kind": kind, "lr_scheduler_type": "linear", "peft_config": lora() if peft else None}
    trainer, run = trained(tmp_path, watch, {4: {"to": 2}}, states=states, **config)

    assert answers(run) == [("done", run.answers[0].result)]
    for part in (0, 1):
        assert equal(states[2][part], states[4][part])
    assert states[4][2] == states[2][2]
    assert not equal(states[5][0], states[4][0])
    assert trainer.state.global_step == 5


def test_between_generations_it_waits_for_the_boundary(tmp_path):
    """Rollouts that are trained on twice are used up first."""
    states = {}
    config = {"steps_per_generation": 2, "max_steps": 6}
    _, run = trained(tmp_path, watch, {3: {"to": 2}}, states=states, **config)

    assert [(answer.status.value, answer.step) for answer in run.answers] == [("done", 4)]
    assert equal(states[2][0], states[4][0])


def test_a_trainer_watched_by_its_scalars_goes_back_too(tmp_path):
    """Any ``Trainer`` of the family, through callbacks alone."""
    states = {}
    _, run = trained(tmp_path, watch_trainer, {4: {"to": 1}}, states=states)

    assert run.answers[0].status.value == "done"
    assert equal(states[1][0], states[4][0])
    assert equal(states[1][1], states[4][1])


def test_a_trainer_that_trains_again_begins_with_snapshots_of_its_own(tmp_path):
    """The second training starts at step 0: what the first took later is of another training."""
    trainer, run = make_trainer(tmp_path, max_steps=3), Sound()
    watch(trainer, run=run, snapshots=EVERY)
    trainer.train()
    begins = weights(trainer.model)
    run.active = True
    states = {}
    ask = After({2: lambda: run.queue.append(Command("c", "r1", "rollback", {"to": 0}))})
    trainer.callback_handler.callbacks.insert(0, ask)
    trainer.add_callback(Seen(trainer, states))
    trainer.train()

    assert [status for status, _ in answers(run)] == ["done"]
    assert equal(states[2][0], begins)
    assert not equal(states[1][0], begins)
