"""What each of two processes does in ``test_handle_sharded``: real FSDP2 and DDP over gloo, on the CPU."""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from rlwatch.control.policy import RunHealth
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.gradloc.distributed import whole_tensors
from rlwatch.integrations.checkpoints import KeptReference
from rlwatch.integrations.commands import Controller
from rlwatch.integrations.reference import Anchored, ResetReference
from rlwatch.integrations.weights import copy_all, fingerprint, local, model_pairs, named_tensors, whole
from rlwatch.records import Command


class Net(nn.Module):
    """Two layers of odd sizes (they do not divide by two), a buffer that is saved and one that is not."""

    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(seed + 1), persistent=False)
        self.to(dtype)

    def forward(self, x):
        return self.second(torch.relu(self.first(x.to(self.second.bias.dtype)))) * self.scale


def sharded(net):
    for layer in (net.first, net.second):
        fully_shard(layer)
    return fully_shard(net)


class LockStep:
    """The ranks of these two processes, in the plainest way: every call is a collective."""

    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def meets(self, step, *, wanted, staying=False):
        box = [wanted]
        dist.broadcast_object_list(box)
        return box[0]

    def share(self, commands):
        box = [list(commands)]
        dist.broadcast_object_list(box)
        return box[0]

    order = share

    def leave(self):
        pass

    def agree(self, refusal):
        said = [None] * self.world_size
        dist.all_gather_object(said, refusal)
        return next((one for one in said if one is not None), None)

    def over(self):
        pass


class Run:
    """Collects events."""

    active = True

    def __init__(self):
        self.events, self.queue = [], []

    def has_commands(self, *, for_all_ranks=False):
        return False

    def commands(self, *, for_all_ranks=False):
        assert for_all_ranks
        return []

    def event(self, kind, step=None, **body):
        self.events.append((kind, step, body))

    def health(self):
        return RunHealth()


def full(model):
    return {name: whole(tensor.detach()).clone() for name, tensor in named_tensors(model)}


def same(model, other):
    """Whether two models hold the same values, however they are sharded."""
    ours, theirs = full(model), full(other)
    return all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in theirs)


def stepped(model):
    """An optimizer with state: the policy has moved."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def reset(policy, reference, optimizers, **args):
    handler = ResetReference(lambda: Anchored(policy, reference, optimizers), ErrorBoundary(Run()))
    command = Command("c1", "r", "reset-reference", args)
    handler.check(command)
    return handler(command)


def fsdp2(found):
    """Shard by shard, into another dtype; the optimizer is cleared."""
    policy, reference = sharded(Net(0)), sharded(Net(1, torch.bfloat16))
    optimizer = stepped(policy)
    report = reset(policy, reference, [optimizer], optimizer="clear")
    found["fsdp2"] = same(policy, reference)
    found["fsdp2 report"] = {k: report[k] for k in ("tensors", "fingerprint", "exact", "cleared")}
    found["fsdp2 state"] = len(optimizer.state)
    stepped(policy)
    found["fsdp2 steps on"] = not same(policy, reference)


def whole_copies(found):
    """After a forward without backward the root shows its whole parameters, which the next forward throws away."""
    policy, reference = sharded(Net(0)), fully_shard(Net(1))
    x = torch.ones(2, 5)
    with torch.no_grad():
        reference(x)
    found["root was whole"] = type(next(reference.parameters())) is nn.Parameter
    reset(policy, reference, [], optimizer="keep")
    with torch.no_grad():
        found["forward after a forward"] = torch.equal(reference(x), policy(x))
    found["whole copies"] = same(policy, reference)


def mixed(found):
    """One sharded and the other not, in both directions, and sharded differently."""
    plain = Net(2)
    reset(sharded(Net(0)), plain, [], optimizer="keep")
    target = sharded(Net(1))
    reset(plain, target, [], optimizer="keep")
    found["mixed"] = same(plain, target) and same(plain, sharded(Net(0)))


def ddp(found):
    """The names DDP adds are no difference."""
    policy, reference = DistributedDataParallel(Net(0)), Net(1)
    optimizer = stepped(policy)
    report = reset(policy, reference, [optimizer])
    found["ddp"] = same(policy.module, reference)
    found["ddp cleared"] = report["cleared"]


def not_finite(found):
    """The NaN lies in the shard of one rank: that rank alone can see it."""
    policy = sharded(Net(0))
    if dist.get_rank() == 1:
        with torch.no_grad():
            local(policy.first.weight)[0] = float("nan")
    run, reference = Run(), sharded(Net(1))
    before = full(reference)
    find = lambda: Anchored(policy, reference)  # noqa: E731
    controller = Controller(ErrorBoundary(run), [ResetReference(find, ErrorBoundary(run))], LockStep())
    result = controller.order(
        ResetReference(find, ErrorBoundary(run)), Command("c1", "r", "reset-reference", {"optimizer": "keep"}), 3
    )
    found["not finite"] = result.refusal
    found["nothing copied"] = all(torch.equal(t, before[n]) for n, t in full(reference).items())


def kept(found, directory):
    """Written whole by one rank, taken up shard by shard, through two ranks that agree."""
    run = Run()
    policy, reference = sharded(Net(0)), sharded(Net(1))
    writes = lambda: dist.get_rank() == 0  # noqa: E731
    keeper = KeptReference(lambda: Anchored(policy, reference), ErrorBoundary(run), writes)
    controller = Controller(ErrorBoundary(run), [], LockStep())
    report = reset(policy, reference, [], optimizer="keep")
    keeper.reset_done(Command("c9", "r", "reset-reference"), report, 5)
    for step in (6, 8):
        checkpoint = directory / f"checkpoint-{step}"
        checkpoint.mkdir(exist_ok=True)
        dist.barrier()
        keeper.save(checkpoint, controller, step)
    dist.barrier()
    rebuilt = sharded(Net(1))
    again = KeptReference(lambda: Anchored(policy, rebuilt), ErrorBoundary(run), writes)
    again.restore(directory / "checkpoint-8", controller, 8)
    found["kept"] = same(reference, rebuilt) and same(policy, rebuilt)
    found["kept events"] = run.events
    found["kept facts"] = again.facts.step
    missing = KeptReference(lambda: Anchored(policy, sharded(Net(1))), ErrorBoundary(run), writes)
    here = directory / ("checkpoint-8" if dist.get_rank() == 0 else "nowhere")
    found["order of rank 0 counts"] = missing.restore(here, controller, 8) is None and missing.facts is not None


def fingerprints(found):
    """The same on both ranks, and told apart by one element of one shard."""
    net = sharded(Net(0))
    before = fingerprint(net.parameters())
    copied = copy.deepcopy(Net(0))
    copy_all(model_pairs(net, copied))
    found["fingerprint"] = before
    if dist.get_rank() == 1:
        with torch.no_grad():
            local(net.second.weight).view(-1)[0] += 1e-6
    found["fingerprint changed"] = fingerprint(net.parameters()) != before


def gathered_at_once(found):
    """Rows, columns, fewer rows than ranks, copies and types side by side: the bits of ``full_tensor``, in order."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    cut = [((5, 7), Shard(0)), ((5, 7), Shard(1)), ((1, 3), Shard(0)), ((4,), Replicate()), ((3, 2, 5), Shard(2))]
    tensors = [
        distribute_tensor(torch.randn(shape).to(dtype), mesh, [placement])
        for dtype in (torch.float32, torch.bfloat16)
        for shape, placement in cut
    ]
    pairs = zip(whole_tensors(tensors), [tensor.full_tensor() for tensor in tensors], strict=True)
    found["gathered at once"] = all(
        (one.dtype, one.stride()) == (other.dtype, other.stride()) and torch.equal(one, other) for one, other in pairs
    )


def main(directory):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {}
    for check in (fsdp2, whole_copies, mixed, ddp, not_finite, fingerprints, gathered_at_once):
        check(found)
    kept(found, directory)
    torch.save(found, directory / f"found-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may abort a process that ends in order
