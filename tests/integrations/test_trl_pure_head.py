"""TRL's fused head in plain operations: the same numbers, and a forward derivative."""

import pytest
import torch
import torch.autograd.forward_ad as fwad
from tiny_trl import FakeRun, make_trainer
from transformers import TrainerCallback
from trl.trainer import utils

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.gradloc.attribution import METHODS, attribute
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.passes import RecordedPasses
from rlwatch.integrations.trl.localise import LossPassTap, PureHead, pure_head
from rlwatch.tensors.tokens import TokenBatch


def arguments(n=7, bias=True, softcap=None, scale=1.0, outputs=("entropy",)):
    """Of a head over 33 tokens."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(n, 8), torch.randn(33, 8)
    targets = torch.randint(33, (n,))
    return hidden, weight, torch.randn(33) if bias else None, targets, 0.7, 16, softcap, scale, outputs


@pytest.mark.parametrize("more", [{}, {"bias": False}, {"softcap": 3.0, "scale": 0.5}, {"outputs": ()}])
def test_it_gives_what_the_fused_one_gives(more):
    """Over several chunks, with and without a bias, a soft cap and a scale."""
    found = PureHead.apply(*arguments(**more), at_once=3)
    expected = utils._ChunkedLogProbFunction.apply(*arguments(**more))

    torch.testing.assert_close(found[0], expected[0])
    if more.get("outputs", True):
        torch.testing.assert_close(found[1], expected[1])
    else:
        assert found[1] is expected[1] is None


def test_it_has_a_forward_derivative():
    """The fused one has none: that is what it is for."""
    hidden, *others = arguments()
    with fwad.dual_level():
        dual = fwad.make_dual(hidden, torch.ones_like(hidden))
        slope = fwad.unpack_dual(PureHead.apply(dual, *others)[0]).tangent
        with pytest.raises((RuntimeError, NotImplementedError)):
            utils._ChunkedLogProbFunction.apply(dual, *others)
    h = 1e-3
    there, back = (PureHead.apply(hidden + sign * h, *others)[0] for sign in (1, -1))

    torch.testing.assert_close(slope, (there - back) / (2 * h), rtol=1e-2, atol=1e-2)


def test_trl_has_its_own_again_afterwards():
    """Also after a failure; and nothing happens where there is none."""
    fused = utils._ChunkedLogProbFunction
    with pure_head():
        assert utils._ChunkedLogProbFunction is PureHead
    with pytest.raises(ZeroDivisionError), pure_head():
        1 / 0  # noqa: B018

    assert utils._ChunkedLogProbFunction is fused


def test_a_trl_without_fused_head_is_left_alone(monkeypatch):
    """Older ones compute logits."""
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pure_head():
        assert not hasattr(utils, "_ChunkedLogProbFunction")


class Looking(TrainerCallback):
    """Attributes the gradient of every step by every method."""

    def __init__(self, passes):
        self.passes, self.gaps = passes, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
        direction = Direction.of(model)
        self.gaps.append([attribute(model, self.passes, direction, methods=[method]).gap for method in METHODS])
        self.passes.clear()


@pytest.mark.parametrize("config", [{}, {"bf16": True}], ids=["float32", "bf16 autocast"])
def test_a_real_trainer_is_attributed_by_every_method(config, tmp_path):
    """Two micro-batches of a step of GRPO, through TRL's own forward."""
    passes = RecordedPasses()
    trainer = make_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=2, max_grad_norm=0.0, **config)
    tap, looking = LossPassTap(trainer, ErrorBoundary(FakeRun()), passes), Looking(passes)
    tap.attach(lambda: True)
    compute = trainer._compute_loss

    def compute_loss(model, inputs):
        loss = compute(model, inputs)
        mask = inputs["completion_mask"]
        tap.keep(TokenBatch(torch.zeros(mask.shape), mask))
        return loss

    trainer._compute_loss = compute_loss
    trainer.add_callback(looking)
    trainer.train()
    fd, richardson, jvp = (abs(gap) for gap in looking.gaps[0])

    assert jvp <= (1e-2 if config else 1e-6)
    assert max(fd, richardson) <= (1e-2 if config else 1e-3)
