"""A model that FSDP1 has flattened, as verl trains by default: its gradients by layer, and a reference reset."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from rlwatch.integrations.step_tally import StepTally, encoded_tally
from rlwatch.integrations.verl.taps import gradient_stats
from rlwatch.integrations.weights import copy_all, flat_pairs, gradients_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(3, 5), nn.ModuleList([Block(), Block()]), nn.Linear(5, 2)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def flattened(seed, **settings):
    torch.manual_seed(seed)
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **settings)


def train(model, broken=False):
    """Gradients of a loss on inputs all ranks have, so that a whole model has the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, generator=generator)
    loss = model(x).pow(2).sum()
    (loss * float("nan") if broken else loss).backward()


def group(rank, ranks):
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def share(model, rank):
    tally, norms = StepTally(), gradients_of(model, rank)
    if norms is not None:
        tally.add_stats(gradient_stats(norms, torch.tensor(1.0), scaled=False))
    return encoded_tally(tally, 1).hex()


def gradients(rank, ranks, folder):
    """What each rank ships, for each way to shard, and the norms of a model that is whole."""
    group(rank, ranks)
    ways = {
        "full": {},
        "named": {"use_orig_params": True},
        "unsharded": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    }
    shares = {}
    for name, settings in ways.items():
        model = flattened(0, **settings)
        train(model)
        shares[name] = share(model, rank)
    broken = flattened(0)
    train(broken, broken=True)
    return {"shares": shares, "broken": share(broken, rank), "nothing": share(flattened(0), rank)}


def whole_norms():
    torch.manual_seed(0)
    model = Net()
    train(model)
    norms = {}
    for name, parameter in model.named_parameters():
        layer = ".".join(name.split(".")[:2]) if name.startswith("layers") else "outside"
        norms[layer] = norms.get(layer, 0.0) + parameter.grad.square().sum().item()
    return {layer: square**0.5 for layer, square in norms.items()}


def reset(rank, ranks, folder):
    """Each rank copies its flattened shards from the policy to a reference of another type."""
    group(rank, ranks)
    policy, reference = flattened(0), flattened(1)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    before = (policy(x) - reference(x)).abs().max().item()
    copy_all(flat_pairs(policy, reference))
    return {"before": before, "after": (policy(x) - reference(x)).abs().max().item()}
