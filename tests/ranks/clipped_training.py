"""Scenarios that clip layers: a plain loop under DDP, FSDP2 and HSDP, one layer of it spiking; and a Trainer."""

import tiny_trainer
import torch
import torch.distributed as dist
from tallying import join_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import ROWS, batch, logp_of, models, replicated, resharded, sharded, whole

from rlwatch.clipping import AGGC, By, LayerClip, LayerMedian, ZClip
from rlwatch.integrations.transformers import clip_layers

STEPS, SPIKES = 9, (5, 8)
RULES = {
    "median": lambda: LayerMedian(k=0.5, window=4, warmup=2),
    "tensors": lambda: ZClip(threshold=0.5, warmup=3, by=By.TENSOR),
}


def hybrid(model):
    """Sharded over two ranks, replicated over two pairs."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(policy, step, rank, ranks):
    """The gradient of the step, that of layer 1 times 50 in some; its mean over ranks is that of one process."""
    policy.zero_grad()  # before the forward: after it FSDP2 shows the root's weights in one piece, without .grad
    share, all_rows = ROWS // ranks, batch(step)
    rows = {name: x[rank * share : (rank + 1) * share] for name, x in all_rows.items()}
    logp, _ = logp_of(policy, rows["ids"])
    loss = (-logp * rows["advantages"][:, None] * rows["mask"]).sum() * ranks / all_rows["mask"].sum()
    loss.backward()
    if step in SPIKES:
        for name, p in policy.named_parameters():
            if "layers.1." in name:
                p.grad.mul_(50.0)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(rank, ranks, wrap, rule, nonfinite=None):
    """Norms and factors of each step, and the weights after the last, in one list."""
    policy = wrap(models()[0])
    clip = LayerClip(policy, RULES[rule](), max_norm=2.0, nonfinite="zero" if nonfinite else "keep")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    steps = []
    for step in range(1, STEPS + 1):
        backward(policy, step, rank, ranks)
        if step == nonfinite:  # in one element of one shard
            local = policy.layers[0].weight.grad.to_local()
            local[:1, :1] = float("nan") if rank == 0 else local[:1, :1]
        clipped = clip()
        left = torch.stack([full(p.grad).square().sum() for p in policy.parameters()]).sum().sqrt()
        steps.append([clipped.total.item(), left.item(), *clipped.before.tolist(), *clipped.scales.tolist()])
        optimizer.step()
    weights = torch.cat([full(p.detach()).flatten() for p in resharded(policy).parameters()])
    return {"steps": steps, "weights": weights.tolist(), "groups": list(clip.groups), "state": str(clip.state_dict())}


def loops(rank, ranks, folder):
    """Every way to lie on two ranks, and HSDP on four."""
    join_group(rank, ranks, folder)
    wraps = (replicated, sharded) if ranks == 2 else (hybrid,)
    played = {f"{wrap.__name__} {rule}": train(rank, ranks, wrap, rule) for wrap in wraps for rule in RULES}
    if ranks == 2:
        played["broken"] = train(rank, ranks, sharded, "median", nonfinite=6)
    return played


def alone(rule):
    return train(0, 1, whole, rule)


def fitted(folder, rule, resume=None):
    trainer = tiny_trainer.make_trainer(
        folder, max_steps=6, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2
    )
    clip = clip_layers(trainer, rule)
    if resume is not None and trainer.args.process_index:
        clip.load_state_dict(
            {**clip.state_dict(), "counts": {n: torch.tensor(77) for n in clip.state_dict()["counts"]}}
        )
    trainer.train(resume_from_checkpoint=resume)
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"weights": weights.tolist(), "counts": clip.counts(), "state": str(clip.state_dict())}


def trainers(rank, ranks, folder):
    """A Trainer that clips layers, and one that resumes from its checkpoint: what rank 0 reads counts."""
    rule = AGGC(high=0.2, by=By.LAYER)
    straight = fitted(folder, rule)
    return {"straight": straight, "resumed": fitted(folder, rule, str(folder / "out" / "checkpoint-4"))}
