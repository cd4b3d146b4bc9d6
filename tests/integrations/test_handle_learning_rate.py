"""Lowering the learning rate: every schedule keeps its shape, scaled, and gets its rate back."""

import copy
import io
import math

import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler
from transformers import optimization as hf

from rlwatch.errors import RLWatchError
from rlwatch.integrations.learning_rate import SCALE, LowerLR, Paced, proportional
from rlwatch.records import Command

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:Detected call of")]
STEPS = 24


def optimizer(kind=AdamW, rates=(1e-2,), **kwargs):
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": rate} for rate in rates]
    return kind(groups, **kwargs)


def sequential(o):
    parts = [lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(o, 14, eta_min=1e-4)]
    return lr_scheduler.SequentialLR(o, parts, milestones=[6])


def chained(o):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 5), lr_scheduler.ExponentialLR(o, 0.9)])


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "step": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [5, 9, 15], 0.3),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, 8),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 15),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.93),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=3e-4),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6, 2, eta_min=3e-4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 5e-2, total_steps=STEPS + 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 5, cycle_momentum=False),
    "sequential": sequential,
    "chained": chained,
    "hf constant": hf.get_constant_schedule,
    "hf warmup": lambda o: hf.get_constant_schedule_with_warmup(o, 8),
    "hf linear": lambda o: hf.get_linear_schedule_with_warmup(o, 4, STEPS),
    "hf cosine": lambda o: hf.get_cosine_schedule_with_warmup(o, 4, STEPS),
    "hf polynomial": lambda o: hf.get_polynomial_decay_schedule_with_warmup(o, 4, STEPS, lr_end=1e-5),
    "hf inverse sqrt": lambda o: hf.get_inverse_sqrt_schedule(o, 4),
    "hf wsd": lambda o: hf.get_wsd_schedule(o, 4, 8, num_training_steps=STEPS),
    "hf cosine min": lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, 4, STEPS, min_lr=1e-4),
}


def command(**args):
    return Command("c", "r", "lower-lr", args)


def train_step(o):
    for group in o.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    o.step()


def rates(make, at=(), kind=AdamW, **kwargs):
    """The rates of all groups at every step; ``at`` maps a step to the scale asked for after it."""
    o = optimizer(kind, (1e-2, 3e-3) if kwargs.get("two") else (1e-2,))
    scheduler, seen = make(o), []
    handler = LowerLR(lambda: Paced([o], [scheduler]))
    for step in range(STEPS):
        train_step(o)
        seen.append([group["lr"] for group in o.param_groups])
        scheduler.step()
        if step in at:
            handler.check(command(scale=at[step]))
            handler(command(scale=at[step]))
        assert scheduler.get_last_lr() == [group["lr"] for group in o.param_groups]
    return torch.tensor(seen, dtype=torch.float64)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lowered_schedule_keeps_its_shape_and_gets_its_rate_back(name):
    """Exactly scaled from the command on; after scale 1 exactly as without."""
    make = SCHEDULES[name]
    plain, lowered = rates(make), rates(make, at={5: 0.25, 16: 1.0})
    expected = plain.clone()
    expected[6:17] *= 0.25

    torch.testing.assert_close(lowered, expected, rtol=1e-9, atol=0)
    assert plain[6:17].max() > 0


@pytest.mark.parametrize("name", ["lambda", "cosine", "one cycle", "sequential"])
def test_every_parameter_group_is_lowered(name):
    """Groups of different rates, each from its own."""
    make = SCHEDULES[name]
    plain, lowered = rates(make, two=True), rates(make, two=True, at={5: 0.1})

    torch.testing.assert_close(lowered[6:], plain[6:] * 0.1, rtol=1e-9, atol=0)


def test_a_second_command_replaces_the_first():
    """Scales are of the schedule, not of one another."""
    plain, lowered = rates(SCHEDULES["lambda"]), rates(SCHEDULES["lambda"], at={5: 0.5, 9: 0.5, 12: 0.1})

    torch.testing.assert_close(lowered[6:13], plain[6:13] * 0.5, rtol=1e-9, atol=0)
    torch.testing.assert_close(lowered[13:], plain[13:] * 0.1, rtol=1e-9, atol=0)


def test_on_a_plateau_the_floor_is_lowered_too():
    """``ReduceLROnPlateau`` never goes below its floor: both are scaled."""

    def run(at=None):
        o = optimizer()
        scheduler = lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, min_lr=1e-3)
        handler, seen = LowerLR(lambda: Paced([o], [scheduler])), []
        for step in range(STEPS):
            seen.append(o.param_groups[0]["lr"])
            scheduler.step(1.0)
            if step == at:
                handler(command(scale=0.1))
        return seen

    plain, lowered = run(), run(at=3)
    assert lowered[:4] == plain[:4]
    assert lowered[4:] == pytest.approx([0.1 * rate for rate in plain[4:]])
    assert plain[-1] == 1e-3


def test_accelerates_wrappers_are_seen_through():
    """The scheduler inside is the one that computes."""

    class Wrapper:
        def __init__(self, scheduler):
            self.scheduler = scheduler

    class Wrapped:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    o = optimizer()
    scheduler = SCHEDULES["lambda"](o)
    LowerLR(lambda: Paced([Wrapped(o)], [Wrapper(scheduler)]))(command(scale=0.5))
    scheduler.step()

    assert o.param_groups[0]["lr"] == pytest.approx(0.5 * 1e-2 / 2)


def test_a_tensor_rate_stays_the_same_tensor():
    """A captured or compiled step reads this very tensor."""
    o = optimizer(rates=(torch.tensor(1e-2),), foreach=False)
    rate, scheduler = o.param_groups[0]["lr"], SCHEDULES["lambda"](o)
    LowerLR(lambda: Paced([o], [scheduler]))(command(scale=0.5))
    scheduler.step()

    assert o.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.5 * 1e-2 / 2)


def test_the_answer_names_both_rates():
    """What the person reads."""
    o = optimizer()
    handler = LowerLR(lambda: Paced([o], [SCHEDULES["hf constant"](o)]))
    report = handler(command(scale=0.3, until=400))

    assert report["summary"] == "learning rate 0.01 -> 0.003, 0.3 of the schedule until step 400"
    assert report == {**report, "before": 1e-2, "after": pytest.approx(3e-3), "scale": 0.3, "until": 400}


def test_until_its_step_and_no_longer():
    """The command that gives the rate back is due at the first boundary at or after the step."""
    o = optimizer()
    handler = LowerLR(lambda: Paced([o], [SCHEDULES["hf constant"](o)]))
    assert handler.due(1) is None
    handler(command(scale=0.5, until=10))
    assert handler.due(9) is None

    back = handler.due(11)
    assert (back.kind, back.args, back.requested_by, back.why) == (
        "lower-lr",
        {"scale": 1.0},
        "rlwatch",
        "lowered until step 10",
    )
    handler(back)
    assert o.param_groups[0]["lr"] == pytest.approx(1e-2)
    assert handler.due(12) is None


def saved(thing):
    """Its state, through a file, as a checkpoint carries it."""
    file = io.BytesIO()
    torch.save(thing.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_lowered_rate_survives_a_checkpoint():
    """Scale and limit travel with the optimizer's state, what the schedule computes from with the scheduler's."""
    o = optimizer()
    scheduler = SCHEDULES["hf linear"](o)
    for _ in range(6):
        train_step(o)
        scheduler.step()
    LowerLR(lambda: Paced([o], [scheduler]))(command(scale=0.5, until=12))

    fresh = optimizer()
    again = SCHEDULES["hf linear"](fresh)
    fresh.load_state_dict(saved(o))
    again.load_state_dict(saved(scheduler))
    handler = LowerLR(lambda: Paced([fresh], [again]))
    for s in (scheduler, again):
        s.step()

    assert fresh.param_groups[0]["lr"] == o.param_groups[0]["lr"] < 1e-2 * 0.5
    assert handler.due(11) is None
    handler(handler.due(12))
    plain = SCHEDULES["hf linear"](optimizer())
    for _ in range(7):
        plain.optimizer.step()
        plain.step()
    assert fresh.param_groups[0]["lr"] == pytest.approx(plain.get_last_lr()[0])


def moved(o):
    """How far one step moves the parameters of plain SGD with gradient 1: the rate it used."""
    before = o.param_groups[0]["params"][0].detach().clone()
    train_step(o)
    return float((before - o.param_groups[0]["params"][0]).detach()[0])


def test_without_a_scheduler_the_rate_is_scaled_around_every_step():
    """A loop that sets it by hand, every step, is heeded too; what it reads is what it set."""
    o = optimizer(SGD)
    handler = LowerLR(lambda: Paced([o]))
    handler.check(command(scale=0.1))
    report = handler(command(scale=0.1))

    for by_hand in (1e-2, 5e-3):
        o.param_groups[0]["lr"] = by_hand
        assert moved(o) == pytest.approx(0.1 * by_hand, rel=1e-4)
        assert o.param_groups[0]["lr"] == by_hand
    assert (report["before"], report["after"]) == (1e-2, pytest.approx(1e-3))
    handler(command(scale=1))
    assert moved(o) == pytest.approx(5e-3, rel=1e-4)


def test_without_a_scheduler_too_it_survives_a_checkpoint():
    """The new process takes it up at its first boundary."""
    o, fresh = optimizer(SGD), optimizer(SGD)
    LowerLR(lambda: Paced([o]))(command(scale=0.1))
    fresh.load_state_dict(saved(o))
    handler = LowerLR(lambda: Paced([fresh]))

    assert handler.due(3) is None
    assert moved(fresh) == pytest.approx(1e-3, rel=1e-4)


def test_a_step_that_raised_does_not_leave_its_rate_behind():
    """The next step starts from the loop's own rate."""
    o = optimizer(SGD)
    LowerLR(lambda: Paced([o]))(command(scale=0.1))

    def explode():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        o.step(explode)
    assert moved(o) == pytest.approx(1e-3, rel=1e-4)
    assert o.param_groups[0]["lr"] == 1e-2


def test_without_a_command_nothing_is_touched():
    """No hook, no key, no change."""
    o = optimizer()
    before = copy.deepcopy(o.state_dict())
    handler = LowerLR(lambda: Paced([o]))
    assert handler.due(5) is None

    assert o.state_dict() == before
    assert not o._optimizer_step_pre_hooks
    assert all(SCALE not in group for group in o.param_groups)


class Inverse(lr_scheduler.LRScheduler):
    """Somebody's own, in closed form."""

    def get_lr(self):
        return [base / (1 + self.last_epoch) for base in self.base_lrs]


class Absolute(lr_scheduler.LRScheduler):
    """Somebody's own, which knows its rates by heart."""

    def get_lr(self):
        return [1e-3 / (1 + self.last_epoch) for _ in self.base_lrs]


def test_a_schedule_nobody_has_read_is_rehearsed_first():
    """Proportional ones are scaled, others refused by name; neither is changed by the rehearsal."""
    o, other = optimizer(), optimizer()
    follows, stubborn = Inverse(o), Absolute(other)
    rate, state = o.param_groups[0]["lr"], dict(follows.state_dict())

    assert proportional(follows)
    assert (o.param_groups[0]["lr"], follows.state_dict()) == (rate, state)
    assert not proportional(stubborn)
    with pytest.raises(RLWatchError, match="the schedule Absolute would not follow"):
        LowerLR(lambda: Paced([other], [stubborn])).check(command(scale=0.5))
    assert not proportional(object())


def test_without_an_optimizer_it_is_refused():
    """Nothing to lower."""
    with pytest.raises(RLWatchError, match="no optimizer"):
        LowerLR(lambda: Paced([])).check(command(scale=0.5))
    assert LowerLR(lambda: Paced([])).due(3) is None


@pytest.mark.parametrize("scale", [0, -1, 1.5, math.nan, None])
def test_a_wrong_scale_that_reached_the_trainer_is_refused(scale):
    """The row may have been written by anyone."""
    o = optimizer()
    with pytest.raises(RLWatchError, match="scale"):
        LowerLR(lambda: Paced([o])).check(command(scale=scale))
