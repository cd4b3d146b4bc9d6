"""Scenarios that train: a plain loop under DDP or FSDP2, watched or not, and told to reset its reference."""

import copy
import hashlib
import os
import time

import torch
import torch._dynamo  # optimizers import it when they first step: here it is once, before the ranks are forked
import torch.distributed as dist
from tallying import ask_all, join_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rlwatch.control import mailbox
from rlwatch.integrations.torch import Watcher
from rlwatch.tensors.gradnorm import layer_of

ROWS, TOKENS, VOCABULARY, STEPS, RESET_AT = 8, 6, 7, 4, 2
CLIP = 0.5


class Policy(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)


def models():
    torch.manual_seed(5)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return policy, reference


def batch(step):
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, TOKENS + 1, (ROWS, 1), generator=g)
    return {
        "ids": torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=g),
        "mask": torch.arange(TOKENS) < lengths,
        "advantages": torch.randn(ROWS, generator=g),
    }


def logp_of(model, ids):
    logits = model(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1), logits


def one_step(policy, reference, optimizer, watcher, step, rank, ranks):
    share = ROWS // ranks
    whole = batch(step)
    rows = {name: x[rank * share : (rank + 1) * share] for name, x in whole.items()}
    logp, logits = logp_of(policy, rows["ids"])
    with torch.no_grad():
        ref_logp, _ = logp_of(reference, rows["ids"])
    k3 = (ref_logp - logp).exp() - 1 - (ref_logp - logp)
    each = (-logp * rows["advantages"][:, None] + 0.1 * k3) * rows["mask"]
    loss = each.sum() * ranks / whole["mask"].sum()  # data parallelism averages over ranks
    optimizer.zero_grad()
    loss.backward()
    if watcher is not None:
        watcher.observe(
            logp=logp, mask=rows["mask"], advantages=rows["advantages"], ref_logp=ref_logp, old_logp=logp.detach() - 0.1,
            logits=logits, ids=rows["ids"][:, 1:],
        )  # fmt: skip
        watcher.gradients()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
    optimizer.step()
    if watcher is not None:
        watcher.step(step, loss=loss, norm_of_torch=norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def called_together(run):
    """Wait until rank 0 has heard of the command and this rank knows that all meet at its next boundary."""
    for _ in range(6000):
        link = run.ranks
        if run.has_commands() if link is None else link.spoke.member.meet if run.rank else link.chair.called:
            return
        time.sleep(0.01)
    raise AssertionError("no command came")


def resharded(model):
    """FSDP2 leaves a root that ran forward only in one piece: give back all but this rank's shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def marks(model):
    """The bytes of this rank's part of the parameters."""
    resharded(model)
    digest = hashlib.sha256()
    for p in model.parameters():
        local = p.to_local() if hasattr(p, "to_local") else p
        digest.update(local.detach().numpy().tobytes())
    return digest.hexdigest()


def gathered(model):
    """Copies of the whole weights in float64, by layer."""
    layers = {}
    for name, p in resharded(model).named_parameters():
        weight = p.full_tensor() if hasattr(p, "full_tensor") else p
        layers.setdefault(layer_of(name), []).append(weight.detach().double().flatten())
    return {layer: torch.cat(parts) for layer, parts in layers.items()}


def change_of(before, after):
    """What one step changed, in float64: by layer and altogether."""
    moved = {layer: (after[layer] - before[layer]).norm() for layer in before}
    ratios = {layer: (moved[layer] / before[layer].norm()).item() for layer in before}
    all_moved, size = torch.stack([*moved.values()]).norm(), torch.cat([*before.values()]).norm()
    others = sorted(ratio for layer, ratio in ratios.items() if layer != "head")
    return {f"update_layer/{layer}": ratio for layer, ratio in ratios.items()} | {
        "optim/update_norm": all_moved.item(), "optim/update_ratio": (all_moved / size).item(),
        "optim/update_head": ratios["head"] / others[1],
    }  # fmt: skip


def train(rank, ranks, folder, wrap, *, watched):
    """Train; returns marks of the parameters and of the random state, when the reference was seen to be reset, and how
    far each step moved the weights where nothing watches.
    """
    policy, reference = models()
    policy, reference = wrap(policy), wrap(reference) if wrap is sharded else reference
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    watcher = None
    if watched:
        watcher = Watcher(
            policy,
            optimizer,
            ref_model=reference,
            clip=0.2,
            store=folder / "store",
            run_id=wrap.__name__,
            sigterm=False,
        )
    torch.manual_seed(rank)
    reset, lefts, changes = [], [], []
    for step in range(1, STEPS + 1):
        before = gathered(policy) if watcher is None else None
        one_step(policy, reference, optimizer, watcher, step, rank, ranks)
        if watcher is None:
            changes.append(change_of(before, gathered(policy)))
            if step == RESET_AT:  # by hand what the command does
                pairs = zip(resharded(reference).parameters(), policy.parameters(), strict=True)
                for theirs, ours in pairs:
                    theirs.data.copy_(ours.data)
                optimizer.state.clear()
            continue
        if step == RESET_AT:
            if rank == 0:
                ask_all(watcher.run, folder / "store", "reset-reference", by="ann", why="KL")
            called_together(watcher.run)
        watcher.obey()
        if marks(reference) == marks(policy):
            reset.append(step)
            lefts.append(len(optimizer.state))
    if watcher is not None:
        watcher.finish()
    return {
        "parameters": marks(policy), "reference": marks(reference), "random": torch.get_rng_state().sum().item(),
        "reset": reset, "lefts": lefts, "changes": changes,
    }  # fmt: skip


def whole(model):
    return model


def replicated(model):
    return DistributedDataParallel(model)


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def training(rank, ranks, folder):
    """DDP and FSDP2, each with and without a watcher; only the process group knows which rank this is."""
    mailbox.POLL_S = 0.0
    join_group(rank, ranks, folder)
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return {
        wrap.__name__: [train(rank, ranks, folder, wrap, watched=watched) for watched in (False, True)]
        for wrap in (replicated, sharded)
    }
