"""Which tensors a reset copies: models wrapped, cast and lying elsewhere; and what cannot be copied."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from rlwatch.control.policy import RunHealth
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.reference import Anchored, ResetReference
from rlwatch.integrations.weights import model_pairs, plain_name, unwrapped
from rlwatch.records import Command

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 2)])
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("cache", torch.rand(seed + 1), persistent=False)
        self.to(dtype)

    def forward(self, x):
        return self.layers[1](torch.relu(self.layers[0](x))) * self.scale


def optimizer(net):
    made = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(3, 4)).sum().backward()
    made.step()
    return made


def handler(policy, reference, optimizers=(), done=None, findings=()):
    run = SimpleNamespace(health=lambda: RunHealth(findings))
    return ResetReference(lambda: Anchored(policy, reference, optimizers), ErrorBoundary(run), done)


def command(optimizer="keep", force=False):
    return Command("c1", "r", "reset-reference", {"optimizer": optimizer}, force)


def test_parameters_and_saved_buffers_are_copied_and_the_policy_is_untouched():
    """Buffers that are not saved, like a cache of another length, are nobody's business."""
    policy, reference = Net(0), Net(1)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    made = optimizer(policy)
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    report = handler(policy, reference, [made])(command())

    assert before.keys() == state.keys() == reference.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in reference.state_dict().items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items())
    assert len(made.state) == 4
    assert (report["tensors"], report["exact"], report["cleared"], report["forced"]) == (5, True, 0, False)
    assert torch.equal(reference(torch.ones(1, 4)), policy(torch.ones(1, 4)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_reference_of_another_dtype_keeps_it(dtype):
    """Equal once rounded: that is what ``exact`` says."""
    policy, reference = Net(0), Net(1, dtype)
    report = handler(policy, reference)(command())

    assert report["exact"]
    assert reference.layers[0].weight.dtype is dtype
    assert torch.equal(reference.layers[0].weight, policy.layers[0].weight.to(dtype))


def test_a_compiled_or_parallel_policy_has_the_same_names():
    """What wrappers add is taken off."""
    policy, reference = nn.DataParallel(Net(0)), torch.compile(Net(1))
    handler(policy, reference)(command())

    assert torch.equal(unwrapped(reference).layers[1].bias, policy.module.layers[1].bias)
    assert plain_name("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.weight") == "layers.0.weight"


def test_non_contiguous_weights_are_copied_by_value():
    """Whatever their strides."""
    policy, reference = nn.Linear(4, 4), nn.Linear(4, 4)
    policy.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4).t())
    handler(policy, reference)(command())

    assert torch.equal(reference.weight, policy.weight)


def test_gradients_and_graphs_stay_out_of_it():
    """The copy is no part of any graph, and the reference asks for no gradient it did not ask for before."""
    policy, reference = Net(0), Net(1).requires_grad_(False)
    handler(policy, reference)(command())

    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in reference.parameters())


def test_what_was_done_is_passed_on():
    """For instance to keep it in checkpoints."""
    told = []
    handler(Net(0), Net(1), done=lambda command, report: told.append((command.command_id, report["tensors"])))(
        command()
    )
    assert told == [("c1", 5)]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p, r: p.layers[0].weight.data.fill_(float("nan")), "'layers.0.weight' is not finite"),
        (lambda p, r: p.scale.fill_(float("inf")), "'scale' is not finite"),
        (lambda p, r: setattr(r, "scale", torch.ones(3)), r"shape \(2,\) in the policy and \(3,\) in the reference"),
        (lambda p, r: r.add_module("head", nn.Linear(1, 1)), "'head.bias' is in one only"),
        (lambda p, r: r.to("meta"), "held elsewhere"),
        (lambda p, r: setattr(r.layers[0].weight, "ds_id", 3), "partitioned by DeepSpeed"),
    ],
)
def test_what_cannot_be_copied_whole_is_not_copied_at_all(spoil, reason):
    """Refused before anything changes."""
    policy, reference = Net(0), Net(1)
    bias = reference.layers[1].bias.clone()
    with torch.no_grad():
        spoil(policy, reference)
    with pytest.raises(RLWatchError, match=reason):
        handler(policy, reference).check(command())
    assert reference.layers[1].bias.is_meta or torch.equal(reference.layers[1].bias, bias)


def test_fsdp1_is_refused_by_name():
    """Its flat parameters hide whether they are shards."""
    policy = Net(0)
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    policy.add_module("wrapped", wrapped)
    with pytest.raises(RLWatchError, match="FSDP1"):
        model_pairs(policy, Net(1))


def test_without_a_reference_or_an_adapter_there_is_nothing_to_reset():
    """In plain words."""
    with pytest.raises(RLWatchError, match="there is no reference model"):
        handler(Net(0), None).check(command())


def test_to_clear_there_must_be_an_optimizer():
    """Keeping needs none."""
    with pytest.raises(RLWatchError, match="optimizer=keep"):
        handler(Net(0), Net(1)).check(command("clear"))
    handler(Net(0), Net(1)).check(command("keep"))
