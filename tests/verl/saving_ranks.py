"""Two ranks of verl's worker that are rolled back: python saving_ranks.py FOLDER. Each writes what it found as JSON."""

import os
import sys
from pathlib import Path

import conftest  # noqa: F401  (verl on a CPU)

FOLDER = Path(sys.argv[1])

import hashlib  # noqa: E402
import json  # noqa: E402

import tiny_verl as tiny  # noqa: E402
import torch.distributed as dist  # noqa: E402

RANK = int(os.fork() == 0)  # what takes seconds to import is imported once
os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2")
ONE_STEP = {"mini_batch_size": 8, "global_batch_size": 8, "micro_batch_size_per_gpu": 2}
ALWAYS = {"every": 1, "share": 1.0}


def state(worker):
    """Bytes of this rank's shards: parameters, moments, step counts; and the schedule."""
    engine = worker.actor.engine
    digest = hashlib.sha256(str(engine.lr_scheduler.state_dict()).encode())
    for p in engine.module.parameters():
        for x in (p, *engine.optimizer.state.get(p, {}).values()):
            digest.update((x.to_local() if hasattr(x, "to_local") else x).detach().numpy().tobytes())
    return digest.hexdigest()


def answered(reply):
    assert "refused" not in reply, reply
    return reply


def refused(reply):
    return reply.get("refused", "")


def trained(snapshots, steps=3):
    """Updates, each with a snapshot after it if that is wished for: worker, and the state after each."""
    tiny.untap()
    worker = tiny.make_worker(FOLDER)
    tiny.attach(worker, "full", snapshots=snapshots, run_id="r")
    states = []
    for step in range(steps):
        tiny.update(worker, tiny.batch_of(10 * step + RANK, 4, lengths=[4 + RANK] * 4), **ONE_STEP)
        if snapshots:
            plan = {"step": step, "keep": list(range(step)), "known": []}
            for call in (worker.rlwatch_check, worker.rlwatch_do, worker.rlwatch_settle):
                answered(call("take-snapshot", plan))
        states.append(state(worker))
    return worker, states


dist.init_process_group("gloo", rank=RANK, world_size=2, init_method=f"file://{FOLDER}/saving-rendezvous")
_, plain = trained(None)
worker, states = trained(ALWAYS)
found = {"harmless": plain == states, "distinct": len(set(states)) == len(states)}

answered(worker.rlwatch_check("rollback", {"to": 0}, 9))
report = answered(worker.rlwatch_do("rollback", {"to": 0}))["report"]
found["back"] = state(worker) == states[0]
found["steps"] = [report["from_step"], report["to_step"]]
answered(worker.rlwatch_settle("rollback", {"to": 0}, "rank 1 does not answer"))
found["another rank failed"] = state(worker) == states[2]
answered(worker.rlwatch_do("rollback", {"to": 1}))
answered(worker.rlwatch_settle("rollback", {"to": 1}))
found["kept"] = state(worker) == states[1]
answered(worker.rlwatch_check("rollback", {"to": 9}, 10))
answered(worker.rlwatch_do("rollback", {"to": 9}))
answered(worker.rlwatch_settle("rollback", {"to": 9}))
found["undone"] = state(worker) == states[2]
found["missing"] = refused(worker.rlwatch_check("rollback", {"to": 2}, 11))
tiny.update(worker, tiny.batch_of(RANK, 4, lengths=[5] * 4), **ONE_STEP)
found["moves on"] = state(worker) != states[2]
(FOLDER / f"saving{RANK}.json").write_text(json.dumps(found))
dist.barrier()
if RANK == 0:
    os.wait()
os._exit(0)  # threads of gloo may abort a process that ends in order
