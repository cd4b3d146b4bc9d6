"""Two ranks that train verl's worker: python two_ranks.py FOLDER. Each writes what it found as JSON."""

import os
import sys
from pathlib import Path

import conftest  # noqa: F401  (verl on a CPU)

FOLDER = Path(sys.argv[1])

import json  # noqa: E402

import tiny_verl as tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from rlwatch.integrations.localising import decoded_batches  # noqa: E402
from rlwatch.integrations.verl.ranks import accepted  # noqa: E402
from rlwatch.records import CULPRITS  # noqa: E402
from rlwatch.tensors.gradnorm import layer_of  # noqa: E402

RANK = int(os.fork() == 0)  # what takes seconds to import is imported once
os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2")

ROW, POSITION, CULPRIT = 3, 1, 1
"""Where the culprit is, and on which rank."""
ONE_STEP = {"mini_batch_size": 8, "global_batch_size": 8, "micro_batch_size_per_gpu": 2}


def batch(*, nan=False):
    """This rank's four responses. Lengths differ between the ranks."""
    length = 4 + RANK
    old = [torch.full((length,), -2.8) for _ in range(4)]
    advantages = [torch.full((length,), 0.2) for _ in range(4)]
    if RANK == CULPRIT:
        old[ROW][POSITION] -= 4
        advantages[ROW] = torch.full((length,), torch.nan if nan else -0.2)
    return tiny.batch_of(RANK, 4, lengths=[length] * 4, old_log_probs=old, advantages=advantages)


def gathered(worker):
    """The whole weights in float64, by layer."""
    layers = {}
    for name, p in worker.actor.engine.module.named_parameters():
        weight = p.full_tensor() if hasattr(p, "full_tensor") else p
        layers.setdefault(layer_of(name), []).append(weight.detach().double().flatten())
    return {layer: torch.cat(parts) for layer, parts in layers.items()}


def change_of(before, after):
    """What an update changed, in float64: by layer and altogether."""
    ratios = {layer: ((after[layer] - before[layer]).norm() / before[layer].norm()).item() for layer in before}
    old, new = (torch.cat([*weights.values()]) for weights in (before, after))
    return {f"update_layer/{layer}": ratio for layer, ratio in ratios.items()} | {
        "optim/update_norm": (new - old).norm().item(), "optim/update_ratio": ((new - old).norm() / old.norm()).item(),
    }  # fmt: skip


def trained(localise):
    """Three updates, the second with a gradient of NaN: the worker, and the culprits of each.

    Of the first one also how far it moved the weights: as the rank measured it, and of the whole ones.
    """
    tiny.untap()
    worker = tiny.make_worker(FOLDER, "actor_rollout_ref.actor.clip_ratio_c=1e6")
    if localise:
        assert tiny.attach(worker, "full", localise={"threshold": 1e-9, "culprits": 2})["not_localised"] is None
    torch.manual_seed(RANK)
    found, moved = [], {}
    for step in range(3):
        weights = gathered(worker)
        tiny.update(worker, batch(nan=step == 1), **ONE_STEP)
        if localise:
            (reply,) = accepted([worker.rlwatch_collect(step)])
            found += [summary(one, reply["errors"]) for one in reply["localised"]]
            moved = moved or {"parcel": reply["parcel"].hex(), "exact": change_of(weights, gathered(worker))}
    return worker, found, moved


def summary(one, errors):
    """Culprits here as (rank, sequence, position), and what is told of the step."""
    places = []
    for batch in decoded_batches(one["batches"]):
        if batch.reason == CULPRITS:
            columns = [batch.columns[name].tolist() for name in ("sequence", "position")]
            places += [(batch.rank, *place) for place in zip(*columns, strict=True)]
    event = {name: str(value) for name, value in one.get("event", {}).items()}
    return {"errors": errors, "culprits": places, "event": event}


def state(worker):
    """Parameters and moments, in this rank's shards, and random numbers."""
    moments = worker.actor.engine.optimizer.state
    tensors = [
        x.to_local()
        for p in worker.actor.engine.module.parameters()
        for x in (p, *moments[p].values())
        if hasattr(x, "to_local")
    ]
    return [*tensors, torch.get_rng_state()]


dist.init_process_group("gloo", rank=RANK, world_size=2, init_method=f"file://{FOLDER}/rendezvous")
plain, *_ = trained(localise=False)
before = state(plain)
worker, found, moved = trained(localise=True)
same = [torch.equal(one, other) for one, other in zip(before, state(worker), strict=True)]
(FOLDER / f"rank{RANK}.json").write_text(
    json.dumps({"found": found, "compared": len(same), "same": all(same), "moved": moved})
)
dist.barrier()
if RANK == 0:
    os.wait()
os._exit(0)  # threads of gloo may abort a process that ends in order
