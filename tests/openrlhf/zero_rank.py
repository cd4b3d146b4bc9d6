"""One rank whose gradients DeepSpeed parts: ``python zero_rank.py STAGE FOLDER``, with the variables of a launcher set.

Leaves as ``FOLDER/rank<i>.json`` what rlwatch reads between the backward and the engine's step, and after it, beside
what plain torch has for the mean of both ranks' losses.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from torch import nn

from rlwatch.gradloc.distributed import whole_gradients
from rlwatch.tensors.gradnorm import grad_norms


def policy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))


def loss(model, rank):
    return model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))).square().mean()


def layers(norms):
    return None if norms is None else dict(zip(norms.layers, norms.squares.tolist(), strict=True))


def looked_at(stage, rank):
    settings = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    model = policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(loss(engine, rank))
    found = {"here": layers(grad_norms(model.named_parameters(), rank=rank))}
    with whole_gradients(model):
        found["whole"] = {name: p.grad.tolist() for name, p in model.named_parameters()}
    found["left"] = [name for name, p in model.named_parameters() if p.grad is not None]
    engine.step()
    found["after"] = layers(grad_norms(model.named_parameters(), rank=rank))
    found["weights"] = {name: p.tolist() for name, p in model.named_parameters()}
    return found


def plain():
    model = policy()
    (0.5 * (loss(model, 0) + loss(model, 1))).backward()
    norms = grad_norms(model.named_parameters())
    gradients = {name: p.grad.tolist() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {
        "here": layers(norms),
        "whole": gradients,
        "weights": {name: p.tolist() for name, p in model.named_parameters()},
    }


if __name__ == "__main__":
    # What DeepSpeed would compile for messages between processes of one machine; gloo carries them as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    here = int(os.environ["RANK"])
    told = {"zero": looked_at(int(sys.argv[1]), here), "plain": plain()}
    (Path(sys.argv[2]) / f"rank{here}.json").write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)
