"""The policy that saves a run, as a state machine: what it does at each boundary, and what it never does."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.control.policy import NamedSetting, RunHealth
from rlwatch.control.rescue import HELD, RescueCourse, RescuePolicy, Stage
from rlwatch.errors import ConfigError
from rlwatch.records import Alert, AlertState, Command, JudgedRow, Severity

GOOD = 0.7


def alarm(kind="reward_drop"):
    return Alert("a", "run", "rule", kind, Severity.CRITICAL, AlertState.FIRING, 95, 99, "it broke")


def health(*, kind="reward_drop", fires=True, sound=False, entropy=1.0, step=100):
    rows = [JudgedRow(s, "", GOOD, 0.02, 1.0) for s in range(90, 95)]
    rows += [
        JudgedRow(s, "" if sound else "the reward fell", GOOD if sound else 0.1, 0.02, entropy) for s in (99, step)
    ]
    return RunHealth(alerts=(alarm(kind),) if fires else (), rows=tuple(rows))


class Trainer:
    """A trainer that does what it is told: its reward is good while its weights and its world are."""

    def __init__(
        self, course, *, broken=True, outside=False, recovers_at=None, refuses=(), kind="reward_drop", entropy=1.0
    ):
        self.course, self.broken, self.outside, self.recovers_at = course, broken, outside, recovers_at
        self.refuses, self.kind, self.entropy = refuses, kind, entropy
        self.done, self.held, self.stopped, self.step = [], False, False, 100

    def run(self, boundaries):
        for _ in range(boundaries):
            self.boundary()
        return self

    def boundary(self):
        if self.recovers_at is not None and self.step >= self.recovers_at:
            self.outside = False
        bad = self.broken or self.outside
        seen = health(kind=self.kind, fires=bad, sound=not bad, entropy=self.entropy, step=self.step)
        command = self.course.next(self.step, seen, 0.1 if bad else GOOD)
        if command is not None:
            refusal = "no" if command.kind in self.refuses else None
            self.done.append((self.step, command.kind, dict(command.args), refusal))
            if refusal is None:
                self.act(command)
            self.course.answered(command, refusal)
        self.step += 1

    def act(self, command):
        if command.kind == "hold":
            self.held = command.args["batches"] > 0
        if command.kind == "rollback":
            self.broken = False
        if command.kind == "stop":
            self.stopped = True

    @property
    def kinds(self):
        return [kind for _, kind, _, _ in self.done]


def course(good=90, **policy):
    return RescueCourse(RescuePolicy(**{"dry_run": False, **policy}), lambda: good)


def test_broken_weights_are_restored_and_the_cause_removed():
    """Probe, roll back, probe, lower the rate with its schedule frozen, let go: nothing is updated in between."""
    trainer = Trainer(course()).run(12)

    assert trainer.done == [
        (100, "hold", {"batches": HELD}, None),
        (102, "rollback", {"to": "last-good"}, None),
        (104, "lower-lr", {"scale": 0.1, "freeze": "yes"}, None),
        (105, "hold", {"batches": 0}, None),
    ]
    assert not trainer.held
    assert trainer.course.stage is Stage.WATCHING


def test_a_verifier_that_changed_holds_updates_whatever_reward_it_gives_and_nothing_is_restored():
    """Full marks for everything are no false alarm; once it is mended, rewards judge the weights."""
    made, kinds = course(), []
    broken = Alert("v", "run", "rule", "verifier_changed", Severity.CRITICAL, AlertState.FIRING, 95, 99, "it changed")
    for step in range(100, 130):
        mended = step >= 120
        alerts = () if mended else (alarm("no_signal"), broken)
        seen = RunHealth(alerts=alerts, rows=health(step=step, sound=mended).rows)
        command = made.next(step, seen, GOOD if mended else 1.0)
        if command is not None:
            kinds.append((step, command.kind, command.args["batches"]))
            made.answered(command, None)

    assert kinds == [(100, "hold", HELD), (122, "hold", 0)]
    assert made.stage is Stage.WATCHING
    assert "the verifier scores known answers differently" in " ".join(note.why for note in made.notes)


def test_weights_that_a_broken_verifier_has_harmed_are_restored_once_it_is_mended():
    """The rewards of the mended one are low with them."""
    made, kinds = course(), []
    broken = Alert("v", "run", "rule", "verifier_changed", Severity.CRITICAL, AlertState.FIRING, 95, 99, "it changed")
    for step in range(100, 130):
        alerts = (alarm("no_signal"), *((broken,) if step < 110 else ()))
        command = made.next(step, RunHealth(alerts=alerts, rows=health(step=step).rows), 1.0 if step < 110 else 0.1)
        if command is not None:
            kinds.append((step, command.kind))
            made.answered(command, None)

    assert kinds == [(100, "hold"), (112, "rollback")]


@pytest.mark.parametrize(
    ("reward", "done"),
    [
        (GOOD, ["hold", "lower-lr", "set-is-correction", "sync-weights", "hold"]),
        (0.1, ["hold", "rollback", "lower-lr", "set-is-correction", "sync-weights", "hold"]),
    ],
)
def test_rewards_of_an_engine_that_drifts_judge_no_weights(reward, done):
    """They come from other weights: a good one is no false alarm, and a bad one no fault outside the policy."""
    made, kinds = course(), []
    drift = Alert("m", "run", "rule", "mismatch_tail", Severity.WARNING, AlertState.FIRING, 95, 99, "it grew")
    for step in range(100, 112):
        seen = RunHealth(alerts=(alarm("joint_collapse"), drift), rows=health(step=step).rows)
        command = made.next(step, seen, reward)
        if command is not None:
            kinds.append(command.kind)
            made.answered(command, None)

    assert kinds == done


@pytest.mark.parametrize(("gained", "restored"), [(False, ["hold", "rollback"]), (True, ["hold", "lower-lr"])])
def test_the_weights_of_the_beginning_are_restored_only_where_the_run_has_gained_nothing_since(gained, restored):
    """Of a run that its first updates broke, the first row says what is to come back; else all it has learnt would go."""
    rows = [JudgedRow(1, "", GOOD, 0.0, 1.0)]
    rows += [
        JudgedRow(step, "" if gained else "the reward fell", 1.4 * GOOD if gained else 0.2, 0.02, 1.0)
        for step in range(2, 8)
    ]
    rows += [JudgedRow(8, "the reward fell", 0.2, 0.02, 1.0)]
    made, kinds = course(good=0), []
    for step in range(8, 12):
        command = made.next(step, RunHealth(alerts=(alarm("first_updates"),), rows=tuple(rows)), 0.2)
        if command is not None:
            kinds.append(command.kind)
            made.answered(command, None)

    assert kinds[:2] == restored
    assert made.level == (1.4 * GOOD if gained else GOOD)


@pytest.mark.parametrize(("kind", "highest"), [("first_updates", 0.1), ("reward_drop", 1.0)])
def test_a_rate_that_was_too_high_from_the_start_is_not_gone_back_to(kind, highest):
    """It stays lowered, as no higher one was ever good; after another failure it rises to the whole."""
    trainer = Trainer(course(), kind=kind).run(300)
    scales = [args["scale"] for _, command, args, _ in trainer.done if command == "lower-lr"]

    assert scales[0] == 0.1
    assert scales == sorted(scales)
    assert scales[-1] == pytest.approx(highest)


def test_a_false_alarm_costs_two_batches_and_changes_nothing():
    """The current weights earn what they earned before."""
    made = course()
    trainer = Trainer(made, broken=False)
    first = made.next(100, health(), None)
    trainer.done.append((100, first.kind, dict(first.args), None))
    trainer.step = 101
    trainer.run(10)

    assert trainer.kinds == ["hold", "hold"]
    assert any("false alarm" in note.why for note in made.notes)


def test_a_fault_outside_is_held_until_the_reward_is_back_and_then_goes_on_at_the_full_rate():
    """Good weights earn nothing: verifier, data or engine. No rate is lowered."""
    made = course()
    trainer = Trainer(made, outside=True, recovers_at=120).run(15)
    held = trainer.held
    trainer.run(15)

    assert held
    assert trainer.kinds == ["hold", "rollback", "hold"]
    assert not trainer.held
    assert trainer.done[-1][0] == 121
    assert any("a person is needed" in note.why for note in made.notes)


@pytest.mark.parametrize(
    ("kind", "entropy", "mended"),
    [
        ("reward_drop", 1.0, ["lower-lr"]),
        ("reward_drop", 1.4, ["lower-lr", "set-entropy-coef"]),
        ("entropy_explosion", 1.0, ["lower-lr", "set-entropy-coef"]),
        ("mismatch_growth", 1.0, ["lower-lr", "set-is-correction", "sync-weights"]),
    ],
)
def test_the_cause_is_removed_by_the_kind_of_the_alert(kind, entropy, mended):
    """An exploded entropy: the bonus; a mismatch: mask and sync; the rate in any case, milder for those two."""
    trainer = Trainer(course(), kind=kind, entropy=entropy).run(15)
    scale = next(args["scale"] for _, name, args, _ in trainer.done if name == "lower-lr")

    assert trainer.kinds == ["hold", "rollback", *mended, "hold"]
    assert scale == (0.1 if mended == ["lower-lr"] else 0.3)


def named(metric="policy/kl_coef", before=0.02, after=4.0):
    return NamedSetting("kl_coefficient", metric, 70, before, after, "strong")


class TurnedTrainer(Trainer):
    """A trainer whose log shows settings that were changed; ``values``: what they are now, by metric."""

    def __init__(self, course, *settings, values, **how):
        super().__init__(course, **how)
        self.settings, self.values = settings, values

    def boundary(self):
        bad = self.broken or self.outside
        seen = replace(health(kind=self.kind, fires=bad, sound=not bad, step=self.step), named=self.settings)
        command = self.course.next(self.step, seen, 0.1 if bad else GOOD, dict(self.values))
        if command is not None:
            refusal = "no" if command.kind in self.refuses else None
            self.done.append((self.step, command.kind, dict(command.args), refusal))
            if refusal is None:
                self.act(command)
            self.course.answered(command, refusal)
        self.step += 1


def test_settings_that_the_diagnosis_names_are_set_back_to_their_values_before():
    """The rate to what it was, measured after the rollback; the others by their own commands; no bonus is guessed."""
    settings = (
        named(),
        named("optim/lr", 3e-4, 9e-3),
        named("policy/entropy_coef", 0.001, 0.5),
        named("policy/clip_range", 0.28, 1000.0),
    )
    made = RescueCourse(RescuePolicy(dry_run=False), lambda: 90, values=lambda _kind: {"low": 0.2, "high": 1000.0})
    trainer = TurnedTrainer(made, *settings, values={"optim/lr": 1.2e-3}, entropy=1.4).run(300)

    assert trainer.done == [
        (100, "hold", {"batches": HELD}, None),
        (102, "rollback", {"to": "last-good"}, None),
        (104, "lower-lr", {"scale": pytest.approx(0.25), "freeze": "yes"}, None),
        (105, "set-kl-coef", {"value": 0.02}, None),
        (106, "set-entropy-coef", {"value": 0.001}, None),
        (107, "set-clip", {"low": 0.2, "high": 0.28}, None),
        (108, "hold", {"batches": 0}, None),
    ]
    assert not trainer.held


def test_without_the_rate_among_them_it_is_lowered_mildly_and_comes_back_after_quiet_steps():
    """The cause is known, so the rate is not cut to a tenth."""
    trainer = TurnedTrainer(course(), named(), values={"policy/kl_coef": 0.02}).run(200)
    scales = [args["scale"] for _, kind, args, _ in trainer.done if kind == "lower-lr"]

    assert scales == [0.3, pytest.approx(0.9), 1.0]
    assert trainer.kinds[:4] == ["hold", "rollback", "lower-lr", "set-kl-coef"]


def test_a_setting_that_no_command_sets_or_that_is_refused_keeps_updates_held_until_a_person_sets_it_back():
    """A temperature has no command; a coefficient was refused. Both are held, and go on at the whole rate."""
    for metric, refuses, first in (
        ("rollout/temperature", (), ["hold", "rollback"]),
        ("policy/kl_coef", ("set-kl-coef",), ["hold", "rollback", "lower-lr", "set-kl-coef"]),
    ):
        trainer = TurnedTrainer(course(), named(metric, 1.0, 2.0), values={metric: 2.0}, refuses=refuses).run(30)
        held, stage, did = trainer.held, trainer.course.stage, trainer.kinds
        trainer.values[metric] = 1.0
        trainer.run(3)

        assert (held, stage, did) == (True, Stage.FROZEN, first)
        assert not trainer.held
        assert trainer.course.stage is Stage.WATCHING
        assert "a person is needed" in " ".join(note.why for note in trainer.course.notes)


def test_a_setting_that_the_trainer_changes_again_is_set_back_again_but_not_for_ever_and_not_against_a_person():
    """Ten times, then the ledger says so; what a person has set since stays."""
    trainer = TurnedTrainer(course(), named(), values={"policy/kl_coef": 4.0}).run(100)
    helped = TurnedTrainer(course(), named(), values={"policy/kl_coef": 4.0}).run(8)
    before = helped.kinds.count("set-kl-coef")
    helped.course.answered(Command("p", "", "set-kl-coef", {"value": 4.0}, requested_by="ann@lab"), None)
    helped.run(30)

    assert trainer.kinds.count("set-kl-coef") == 11
    assert "does not stay what it was set to" in " ".join(note.why for note in trainer.course.notes)
    assert helped.kinds.count("set-kl-coef") == before


def test_an_engine_that_drifts_again_after_all_that_can_be_done_is_held_with_the_current_weights():
    """Its rewards judge no weights: nothing is restored a second time, and nothing stops."""
    made, kinds = course(cooldown_steps=5), []
    drift = Alert("m", "run", "rule", "mismatch_tail", Severity.WARNING, AlertState.FIRING, 95, 99, "it grew")
    for step in range(100, 140):
        seen = RunHealth(alerts=(alarm("joint_collapse"), drift), rows=health(step=step).rows)
        command = made.next(step, seen, 0.1)
        if command is not None:
            kinds.append(command.kind)
            made.answered(command, None)

    assert kinds == ["hold", "rollback", "lower-lr", "set-is-correction", "sync-weights", "hold", "hold"]
    assert made.stage is Stage.OUTSIDE


def test_a_mismatch_under_a_good_reward_is_mended_without_going_back():
    """Nothing is undone where nothing is lost."""
    made = course()
    trainer = Trainer(made, broken=False, kind="mismatch_growth")
    made.next(100, health(kind="mismatch_growth"), None)
    trainer.step = 101
    trainer.run(10)

    assert trainer.kinds == ["lower-lr", "set-is-correction", "sync-weights", "hold"]


def test_what_is_refused_does_not_end_the_rescue():
    """A trainer without an entropy bonus; one without snapshots; one that cannot hold."""
    bonus = Trainer(course(), entropy=1.4, refuses=("set-entropy-coef",)).run(15)
    nothing = Trainer(course(good=None)).run(15)
    unholdable = Trainer(course(), refuses=("hold",)).run(15)

    assert bonus.kinds == ["hold", "rollback", "lower-lr", "set-entropy-coef", "hold"]
    assert not bonus.held
    assert nothing.kinds == ["hold", "lower-lr", "hold"]
    assert "rollback" not in unholdable.kinds
    assert "lower-lr" not in unholdable.kinds


def test_after_quiet_steps_the_rate_is_raised_again():
    """A tenth, then three tenths, nine tenths, all of it, and its schedule again."""
    trainer = Trainer(course(quiet_steps=50)).run(300)
    rates = [(args["scale"], args["freeze"]) for _, kind, args, _ in trainer.done if kind == "lower-lr"]

    assert [round(scale, 3) for scale, _ in rates] == [0.1, 0.3, 0.9, 1.0]
    assert [freeze for _, freeze in rates] == ["yes", "yes", "yes", "no"]


def test_false_alarms_never_stop_a_run_and_are_not_probed_again():
    """A sound run whose alert goes on firing loses two batches, and no more."""
    made = course(cooldown_steps=5)
    held = []
    for step in range(100, 300):
        seen = RunHealth((), (alarm(),), None, (JudgedRow(90, "", GOOD, 0.02), JudgedRow(step, "odd", GOOD, 0.02)))
        command = made.next(step, seen, GOOD)
        if command is not None:
            held.append((step, command.kind))
            made.answered(command, None)

    assert held == [(100, "hold"), (102, "hold")]


def test_a_failure_after_two_rescues_restores_and_stops():
    """It cannot be saved; nothing follows."""
    made = course(cooldown_steps=5)
    trainer = Trainer(made)
    for _ in range(3):
        trainer.broken = True
        trainer.run(20)

    assert trainer.kinds.count("rollback") == 3
    assert trainer.kinds[-2:] == ["rollback", "stop"]
    assert trainer.stopped
    assert made.stage is Stage.ENDED
    assert trainer.run(20).kinds[-1] == "stop"


def test_a_dry_run_only_writes_down_what_it_would_do():
    """Once in each cool-down."""
    made = course(dry_run=True, cooldown_steps=30)
    trainer = Trainer(made).run(70)

    assert trainer.done == []
    assert [note.step for note in made.notes] == [100, 130, 160]


def test_where_no_reward_is_measured_nothing_waits_for_ever():
    """The restored weights cannot be judged: the cause is removed and updates go on."""
    made = course()
    done = []
    for step in range(100, 125):
        command = made.next(step, health(step=step), None)
        if command is not None:
            done.append(command.kind)
            made.answered(command, None)

    assert done == ["hold", "rollback", "lower-lr", "hold"]


def test_a_rollback_without_a_reward_says_so():
    """And names no number."""
    made = course()
    commands = [made.next(step, health(step=step), None) for step in range(100, 106)]

    assert commands[4].why == "no reward was measured with the current weights, 0.7 before"


def test_where_a_reward_comes_every_eighth_step_two_are_waited_for():
    """As in a loop that trains eight steps on one batch; its weights are judged by what was measured."""
    made, commands = course(), []
    rows = [row._replace(step=93 + at, reward=None if at else GOOD) for at, row in enumerate(health().rows)]
    sparse = RunHealth(alerts=(alarm(),), rows=(rows[0]._replace(step=77), rows[0]._replace(step=85), *rows))
    for step in range(100, 130):
        command = made.next(step, sparse, 0.1 if step % 8 == 0 else None)
        if command is not None:
            commands.append((step, command.why))
            made.answered(command, None)

    assert commands[:2] == [
        (100, "reward_drop: are the current weights really worse?"),
        (112, "reward 0.1, 0.1 with the current weights, 0.7 before"),
    ]


@pytest.mark.parametrize(
    ("good", "ends"), [(90, ["hold", "rollback"]), (None, ["hold"])], ids=["restored first", "no good snapshot"]
)
def test_a_reward_that_jumps_far_above_all_before_while_the_run_collapses_is_not_a_good_one(good, ends):
    """The function that gives it is another now: updates stay held, with good weights where there are some."""
    made, done, whys = course(good), [], []
    for step in range(100, 140):
        command = made.next(step, health(kind="joint_collapse", step=step), 19.6)
        if command is not None:
            done.append(command.kind)
            whys.append(command.why)
            made.answered(command, None)

    assert done == ends
    assert made.stage is Stage.OUTSIDE
    assert any("the reward is far above every earlier one" in why for why in [*whys, made.notes[-1].why])
    assert "a person is needed" in made.notes[-1].why


def test_restored_weights_that_earn_far_more_than_they_did_show_that_the_function_has_changed():
    """They are the same weights: so the fault lies outside, though the reward is above its level."""
    made, done, seen = course(), [], health()
    risen = JudgedRow(96, "", 4.0, 0.02, 1.0)  # the reward rose before anything was alarmed
    seen = replace(seen, rows=(*seen.rows[:5], risen, *seen.rows[5:]))
    for step in range(100, 130):
        command = made.next(step, seen, 0.1 if done.count("rollback") == 0 else 5.7)
        if command is not None:
            done.append(command.kind)
            made.answered(command, None)

    assert done == ["hold", "rollback"]
    assert made.stage is Stage.OUTSIDE
    assert "good weights now earn far more than they did" in made.notes[-1].why


@pytest.mark.parametrize("reward", [0.85, 1.0])
def test_a_reward_that_has_risen_as_learning_does_is_a_good_one(reward):
    """Of two batches; then training goes on."""
    made, done = course(), []
    for step in range(100, 106):
        command = made.next(step, health(step=step), reward)
        if command is not None:
            done.append((command.kind, command.args["batches"]))
            made.answered(command, None)

    assert done == [("hold", HELD), ("hold", 0)]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([None, 0.0, 0.1, 0.69, 0.9])), max_size=120),
    st.sets(st.sampled_from(["hold", "rollback", "lower-lr", "set-entropy-coef"])),
    st.sampled_from(["reward_drop", "mismatch_growth", "entropy_explosion"]),
)
def test_whatever_comes_a_rollback_happens_only_while_updates_are_held(rows, refuses, kind):
    """And no more rescues begin than are permitted, and each command is one that exists."""
    made, held, begun = course(cooldown_steps=3), False, 0
    for step, (fires, sound, reward) in enumerate(rows, 100):
        command = made.next(step, health(kind=kind, fires=fires, sound=sound, step=step), reward)
        if command is None:
            continue
        refusal = "no" if command.kind in refuses else None
        if command.kind == "rollback" and made.stage is not Stage.ENDED:
            assert held
        if command.kind == "hold" and command.args["batches"]:
            begun += 1
        if command.kind == "hold" and refusal is None:
            held = bool(command.args["batches"])
        made.answered(command, refusal)

    assert begun <= 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"probe": 0}, "probe"),
        ({"scale": 0.0}, "scale"),
        ({"kinds": ("kl_drift",)}, "no collapse"),
        ({"most": True}, "most"),
    ],
)
def test_a_policy_out_of_range_is_refused(wrong, why):
    """By its name."""
    with pytest.raises(ConfigError, match=why):
        RescuePolicy(**wrong)
