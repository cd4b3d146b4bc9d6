"""A model in training is bit for bit as before an attribution, also after one that failed; its refusals are one line."""

import hashlib
import random
import threading

import pytest
import torch
from tiny_step import outputs, policy, rollouts, take_step
from torch import nn

from rlwatch.gradloc.attribution import METHODS, attribute
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.report import Method, NotLocalised
from rlwatch.gradloc.rerun import SHOWN, Precision, rerunning, routed, tried, without_autocast

METHODS_ALONE = [[method] for method in METHODS]


def digest(tensors):
    """Of the bits of named tensors."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def state(model):
    """All that training depends on, by value, and by identity where objects matter."""
    modules = list(model.modules())
    return {
        "parameters": digest(model.named_parameters()),
        "objects": [id(p) for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
        "gradients": digest((n, p.grad) for n, p in model.named_parameters()),
        "gradient objects": [(id(p.grad), p.grad._version) for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "buffers": digest(model.named_buffers()),
        "buffer objects": [(id(b), b._version) for b in model.buffers()],
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "modes": [module.training for module in modules],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules],
        "dictionaries": [(id(m._parameters), id(m._buffers)) for m in modules],
        "config": model.config.to_dict() | {"attention": model.config._attn_implementation},
        "torch": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.autocast.__enter__.__qualname__),
        "functions": (torch.overrides._get_current_function_mode_stack(), torch.autograd.forward_ad._current_level),
    }


@pytest.mark.parametrize("methods", METHODS_ALONE)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast", "dropout"])
def test_nothing_is_changed(kind, methods):
    """Every method, on every precision, with dropout and several passes."""
    model = policy(dropout=0.2 if kind == "dropout" else 0.0, attention="sdpa")
    batch = rollouts(model)
    model = model.bfloat16() if kind == "bfloat16" else model
    passes = take_step(model, batch, micro_batches=2, autocast=True if kind == "autocast" else None)
    direction = Direction.of(model)
    before = state(model)
    attribute(model, passes, direction, methods=methods)

    assert state(model) == before


@pytest.mark.parametrize("methods", METHODS_ALONE)
def test_nothing_is_changed_by_a_pass_that_fails_half_way(methods):
    """In the second pass, in the last layer, having left evaluation mode behind and drawn numbers."""
    model = policy(dropout=0.2)
    passes = take_step(model, rollouts(model), micro_batches=2)

    def failing(rows=None):
        model.eval()
        model.train()
        model.model.layers[0].eval()
        torch.rand(3)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs(model, rollouts(model).ids, 4)
            raise MemoryError("half-way")

    passes.all[1].forward = failing
    direction = Direction.of(model)
    before = state(model)
    with pytest.raises(NotLocalised, match="MemoryError: half-way"):
        attribute(model, passes, direction, methods=methods)

    assert state(model) == before


def test_an_interrupt_passes_and_leaves_nothing_behind():
    """It is for the user, not for us."""
    model = policy()
    passes = take_step(model, rollouts(model))

    def interrupted(rows=None):
        raise KeyboardInterrupt

    passes.all[0].forward = interrupted
    direction = Direction.of(model)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        attribute(model, passes, direction)

    assert state(model) == before


def test_training_goes_on_as_if_nobody_had_looked():
    """Three steps of Adam with dropout, attributed at every step by all methods, against none."""

    def train(look):
        model = policy(dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(7)
        for step in range(3):
            passes = take_step(model, rollouts(policy(), seed=step), micro_batches=2)
            for method in METHODS if look else ():
                attribute(model, passes, Direction.of(model), methods=[method])
            optimizer.step()
        moments = [v for s in optimizer.state.values() for v in s.values()]
        return digest([*model.named_parameters(), *((str(i), m) for i, m in enumerate(moments))]), float(torch.rand(()))

    assert train(look=True) == train(look=False)


def test_autocast_is_off_wherever_it_is_switched_on():
    """By the caller, by a context in the pass, by a decorator made before; and on again afterwards."""
    seen, x = Precision(), torch.ones(2, 2)
    decorated = torch.autocast("cpu", torch.bfloat16)(lambda: x @ x)
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(seen):
            outer = (x @ x).dtype
            with torch.autocast("cpu", torch.bfloat16):
                inner = (x @ x).dtype
            wrapped = decorated().dtype
        after = (x @ x).dtype

    assert (outer, inner, wrapped, after) == (torch.float32, torch.float32, torch.float32, torch.bfloat16)
    assert decorated().dtype == torch.bfloat16
    assert seen.low


def test_an_autocast_that_is_not_enabled_is_not_low():
    """Trainers write ``torch.autocast(..., enabled=False)`` too."""
    seen = Precision()
    with without_autocast(seen), torch.autocast("cpu", torch.bfloat16, enabled=False):
        pass

    assert not seen.low


def test_other_threads_keep_their_autocast():
    """A colocated engine may run beside."""
    found = []

    def work():
        with torch.autocast("cpu", torch.bfloat16):
            found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    with without_autocast(Precision()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert found == [torch.bfloat16]


class Counter(nn.Module):
    """Writes into one buffer, replaces another and makes a third."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x):
        self.count.add_(1)
        self.last = x
        self.register_buffer("new", x)
        return x + self.count + self.narrow


def test_buffers_are_copies_while_looking():
    """The forward pass sees what it wrote; the model does not."""
    model = Counter()
    with rerunning(model):
        once, twice = model(torch.ones(2)), model(torch.ones(2))
        assert model.narrow.dtype == torch.float32
        assert torch.equal(model.last, torch.ones(2))

    assert (once.tolist(), twice.tolist()) == ([3.0, 3.0], [4.0, 4.0])
    assert model.count.tolist() == model.last.tolist() == [0.0, 0.0]
    assert model.narrow.dtype == torch.bfloat16
    assert not hasattr(model, "new")


def test_casts_to_half_precision_are_casts_to_float32_while_looking():
    """However they are written."""
    x = torch.ones(2)
    with rerunning(nn.Linear(1, 1)) as precision:
        seen = [x.to(torch.bfloat16), x.bfloat16(), x.half(), x.to(dtype=torch.float16), x.to("cpu", torch.bfloat16)]
        double = x.to(torch.float64).dtype

    assert {each.dtype for each in seen} == {torch.float32}
    assert double == torch.float64
    assert precision.low
    assert x.bfloat16().dtype == torch.bfloat16


def test_flash_attention_and_grouped_experts_stand_aside():
    """They take no float32; the configuration is as before afterwards."""
    model = policy()
    object.__setattr__(model.config, "_attn_implementation_internal", "flash_attention_2")
    with rerunning(model):
        assert model.config._attn_implementation == "sdpa"

    assert model.config._attn_implementation == "flash_attention_2"
    assert Method.FD in METHODS


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize(("count", "chosen"), [(1, False), (2, True), (8, True), (None, False)])
def test_tokens_are_routed_from_two_experts_on(name, count, chosen):
    """Whatever the configuration calls them; one expert is an ordinary layer."""
    model = policy()
    setattr(model.config, name, count)

    assert routed(model) is chosen


def raising(error):
    raise error


def test_what_the_work_gives_is_passed_on():
    """Also where that is nothing: then the empty reason tells it from a refusal."""
    tensor = torch.ones(2)

    assert tried(lambda: tensor) == (tensor, "")
    assert tried(lambda: None) == (None, "")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (NotImplementedError("no forward AD for aten::foo"), "NotImplementedError: no forward AD for aten::foo"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), "OutOfMemoryError: CUDA out of memory."),
        (RuntimeError("x" * 1000), "RuntimeError: " + "x" * SHOWN),
        (ValueError(), "ValueError: "),
        (KeyError("weight"), "KeyError: 'weight'"),
    ],
)
def test_a_refusal_is_its_type_and_first_line(error, why):
    """Never more than one short line, never nothing: the other ranks go by it."""
    assert tried(lambda: raising(error)) == (None, why)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_is_no_refusal(error):
    """Ctrl-C during a probe ends training as it would have."""
    with pytest.raises(error):
        tried(lambda: raising(error()))
