"""The small handlers: KL coefficient, checkpoint, stop, and Hugging Face's loop."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from rlwatch.control.policy import RunHealth
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import SaveCheckpoint, SetKLCoef, Stop
from rlwatch.integrations.reference import clear_state, clearable
from rlwatch.integrations.transformers.commands import TrainerLoop
from rlwatch.records import Command, Finding, Severity

pytestmark = pytest.mark.torch
COLLAPSE = Finding("entropy", "entropy_collapse", Severity.CRITICAL, step=9, onset_step=7, message="entropy fell")


def error_boundary(*findings):
    return ErrorBoundary(SimpleNamespace(health=lambda: RunHealth(findings)))


def command(kind, force=False, **args):
    return Command("c", "r", kind, args, force)


def kl_handler(*findings):
    box = {"beta": 0.1}
    return SetKLCoef(lambda: box["beta"], lambda value: box.update(beta=value), error_boundary(*findings)), box


def test_the_kl_coefficient_becomes_the_value():
    """The answer names both."""
    handler, box = kl_handler()
    asked = command("set-kl-coef", value=0)
    handler.check(asked)
    assert box == {"beta": 0.1}

    assert handler(asked) == {
        "before": 0.1,
        "after": 0.0,
        "summary": "KL coefficient 0.1 -> 0",
        "undo": {"kind": "set-kl-coef", "args": {"value": 0.1}},
    }
    assert box == {"beta": 0.0}


def test_in_a_collapse_it_may_be_raised_but_not_lowered():
    """Unless forced."""
    handler, box = kl_handler(COLLAPSE)
    handler.check(command("set-kl-coef", value=1.0))
    handler.check(command("set-kl-coef", force=True, value=0.01))
    with pytest.raises(RLWatchError, match="entropy_collapse since step 7"):
        handler.check(command("set-kl-coef", value=0.01))
    assert box == {"beta": 0.1}


def test_the_reason_why_there_is_no_coefficient_is_the_refusal():
    """The trainer knows it."""

    def read():
        raise RLWatchError("beta was 0")

    with pytest.raises(RLWatchError, match="beta was 0"):
        SetKLCoef(read, lambda value: None, error_boundary()).check(command("set-kl-coef", value=1))


@pytest.mark.parametrize(
    ("kept", "findings", "refused"), [(None, [COLLAPSE], False), (3, [], False), (3, [COLLAPSE], True)]
)
def test_a_checkpoint_is_saved_unless_it_would_delete_a_good_one(kept, findings, refused):
    """Only in a collapse, and only where checkpoints are rotated."""
    handler = SaveCheckpoint(lambda: "saved in /tmp/x", lambda: kept, error_boundary(*findings))
    if refused:
        with pytest.raises(RLWatchError, match="only 3 checkpoints are kept"):
            handler.check(command("save-checkpoint"))
    else:
        handler.check(command("save-checkpoint"))
    handler.check(command("save-checkpoint", force=True))
    assert handler(command("save-checkpoint")) == {"summary": "saved in /tmp/x"}


@pytest.mark.parametrize(("args", "save"), [({}, True), ({"save": "yes"}, True), ({"save": "no"}, False)])
def test_stop_says_whether_to_save(args, save):
    """Yes by default: what was learnt is kept."""
    asked = []
    handler = Stop(lambda flag: asked.append(flag) or "bye")
    handler.check(command("stop", **args))
    report = handler(command("stop", **args))

    assert asked == [save]
    assert report["summary"] == "bye"


def test_stop_in_a_collapse_is_never_vetoed():
    """It reads no health."""
    Stop(lambda flag: "").check(command("stop"))
    with pytest.raises(RLWatchError, match="save='maybe'"):
        Stop(lambda flag: "").check(command("stop", save="maybe"))


def looked(**args):
    loop, control = TrainerLoop(), TrainerControl()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    settings = SimpleNamespace(output_dir="out", save_total_limit=None, **args)
    loop.look(settings, TrainerState(global_step=12), control, {"optimizer": optimizer, "lr_scheduler": None})
    return loop, control


def test_a_trainers_loop_raises_the_trainers_own_flags():
    """Save and stop, at this step."""
    loop, control = looked()
    assert loop.save() == "out/checkpoint-12 is saved as soon as this step has ended"
    assert (control.should_save, control.should_training_stop) == (True, False)
    loop, control = looked()
    assert loop.stop(False) == "training ends with step 12, without saving a checkpoint"
    assert (control.should_save, control.should_training_stop) == (False, True)
    loop, control = looked()
    assert loop.stop(True) == "training ends with step 12, after saving out/checkpoint-12"
    assert (control.should_save, control.should_training_stop) == (True, True)


def test_a_trainers_loop_offers_what_the_callback_interface_allows():
    """Three commands; a scheduler that is not there is not one."""
    loop, _ = looked()
    kinds = [handler.kind for handler in loop.handlers(error_boundary(), dict)]
    assert kinds == ["save-checkpoint", "lower-lr", "raise-lr", "hold", "skip-step", "stop"]
    assert not loop.paced().scheduled
    assert loop.kept() is None
    with pytest.raises(RLWatchError, match="not begun"):
        TrainerLoop().kept()
    assert TrainerLoop().paced().optimizers == []


class Wrapper(torch.optim.Optimizer):
    """As accelerate wraps."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return {}


def stepped():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def test_a_cleared_optimizer_steps_as_a_new_one_would():
    """Moments and step counts are gone, rates and settings stay."""
    optimizer, new = stepped(), stepped()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert clear_state([Wrapper(Wrapper(optimizer))]) == 3
    assert len(optimizer.state) == 0
    assert [group["lr"] for group in optimizer.param_groups] == rates

    fresh = torch.optim.AdamW(new.param_groups[0]["params"], lr=0.1)
    for one in (optimizer, fresh):
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.full((2,), 0.5)
        one.step()
    pairs = zip(optimizer.param_groups[0]["params"], fresh.param_groups[0]["params"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [float(s["step"]) for s in optimizer.state.values()] == [1.0] * 3


def test_an_optimizer_that_is_not_torchs_is_refused():
    """Its state lies elsewhere."""
    with pytest.raises(RLWatchError, match=r"SimpleNamespace cannot be cleared; send optimizer=keep"):
        clearable([SimpleNamespace()])
    with pytest.raises(RLWatchError, match="there is no optimizer"):
        clearable([])
