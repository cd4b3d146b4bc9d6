"""Scenarios without a trainer: each rank tallies its rows of a batch that all of them know."""

import os
import signal
import time

import torch
import torch.distributed as dist

import rlwatch
from rlwatch.control.commands import request
from rlwatch.integrations.ranks import begin_together
from rlwatch.integrations.step_tally import StepTally
from rlwatch.records import Command
from rlwatch.tensors.tokens import TokenBatch

CUTS = {1: (0, 12), 2: (0, 5, 12), 4: (0, 3, 9, 9, 12)}
"""Rows at which the ranks' shares of a batch begin: unequal, and of four ranks the third gets nothing."""
STEPS = 3
SPIKE = {"row": 10, "position": 1}


def whole_batch(seed, rows=12, tokens=7):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, tokens + 1, (rows, 1), generator=g)
    old = -torch.rand(rows, tokens, generator=g)
    logp = old + 0.2 * torch.randn(rows, tokens, generator=g)
    logp[SPIKE["row"], SPIKE["position"]] = -40.0
    lengths[SPIKE["row"]] = tokens
    return {
        "logp": logp,
        "mask": torch.arange(tokens) < lengths,
        "entropy": torch.rand(rows, tokens, generator=g),
        "ids": torch.randint(0, 5, (rows, tokens), generator=g),
        "advantages": torch.randn(rows, generator=g),
        "old_logp": old,
        "ref_logp": old + 0.1 * torch.randn(rows, tokens, generator=g),
        "rollout_logp": old + 0.05 * torch.randn(rows, tokens, generator=g),
        "cut": torch.rand(rows, generator=g) < 0.3,
    }


def add_rows(tally, seed, start, end):
    """Some rows, in micro-batches of at most two."""
    rows = whole_batch(seed)
    for at in range(start, end, 2):
        upto = min(at + 2, end)
        tally.add_batch(TokenBatch(**{name: x[at:upto] for name, x in rows.items()}, clip=(0.2, 0.28)))


def tally_steps(run, rank, ranks, text=None):
    """Every step of the scenario."""
    cuts = CUTS[ranks]
    for step in range(1, STEPS + 1):
        tally = StepTally()
        add_rows(tally, step, cuts[rank], cuts[rank + 1])
        tally.add_number("policy/kl_coef", 0.1 if rank == 0 else 99.0)
        tally.seal(step, shared=run.linked).deliver(run, text)


def join_group(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)


def begin(folder, **kwargs):
    return begin_together(lambda: rlwatch.init(store=folder / "store", run_id="r", sigterm=False, **kwargs))


def statistics(rank, ranks, folder):
    join_group(rank, ranks, folder)
    run = begin(folder)
    state = [run.active, run.linked, run.measures]
    tally_steps(run, rank, ranks, text=lambda ids: f"<{ids[0]}>")
    finished = run.finish(deadline_s=30.0)
    return {"state": state, "finished": finished, "counters": dict(run.counters.snapshot())}


def meet(name, rank):
    """Wait until every rank is here, without a collective that a dead rank would block."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{rank}", "here")


def wait_for(name, rank):
    dist.distributed_c10d._get_default_store().wait([f"{name}/{rank}"])


def slow_rank(rank, ranks, folder):
    """Rank 1 sends each step only after rank 0 has gone on to the next one."""
    join_group(rank, ranks, folder)
    run = begin(folder)
    for step in range(1, STEPS + 1):
        if rank == 1:
            wait_for(f"sent {step}", 0)
        tally = StepTally()
        add_rows(tally, step, *((0, 6) if rank == 0 else (6, 12)))
        tally.seal(step, shared=run.linked).deliver(run)
        run.log({"loss": float(step)}, step=step)
        meet(f"sent {step}", rank)
    return {"finished": run.finish(deadline_s=30.0)}


def all_linked(run, ranks):
    """Wait until this rank is linked, or on rank 0 all are: a command that comes before is refused."""
    link = run.ranks
    for _ in range(6000):
        if len(link.hub.linked()) == ranks - 1 if run.rank == 0 else link.settled(0.0):
            return
        time.sleep(0.01)
    raise AssertionError(f"rank {run.rank} was not linked within a minute")


def ask_all(run, store, kind, **words):
    """On rank 0 a person asks for a command once all ranks can hear of it, and their threads have time to answer: before
    that it is refused, on a busy machine at a step or another.
    """
    if run.ranks is not None:
        all_linked(run, run.world_size)
        run.ranks.chair.place_s = 60.0
    request(rlwatch.open_store(store), run.info.run_id, kind, **words)


def round_of(run, commands, step):
    """What comes of ``commands`` at a boundary; the other ranks come to it when rank 0 has called them, or is done."""
    ranks = run.ranks
    store = dist.distributed_c10d._get_default_store()
    try:
        while run.rank and not (ranks.spoke.member.called or not ranks.spoke.member.open):
            if store.check([f"round {step}/0"]):
                break
            time.sleep(0.001)
        if not ranks.meets(step, wanted=run.rank == 0, staying=False):
            return "nothing heard"
        heard = ranks.share(commands if run.rank == 0 else [])
        return ranks.agree(None) if heard else "nothing heard"
    finally:
        ranks.over()
        ranks.leave()
        if run.rank == 0:
            meet(f"round {step}", 0)


def dying_rank(rank, ranks, folder, *, dies):
    """Rank ``dies`` is killed at step 4 of 8; every rank also looks for commands at each step."""
    join_group(rank, ranks, folder)
    run = begin(folder)
    all_linked(run, ranks)
    commands = [Command("c", "r", "wave")]
    agreed, since = [], 0.0
    for step in range(1, 9):
        if step == 4:
            run.flush(20.0)  # a killed process loses what it did in its last tenth of a second
            meet("about to die", rank)
            if rank == dies:
                for other in range(ranks):
                    wait_for("about to die", other)
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for("about to die", dies)
            since = time.monotonic()
        tally = StepTally()
        add_rows(tally, step, 3 * rank, 3 * rank + 3)
        tally.seal(step, shared=run.linked).deliver(run)
        agreed.append(round_of(run, commands, step))
    finished = run.finish(deadline_s=20.0)
    return {"agreed": agreed, "finished": finished, "seconds": time.monotonic() - since}


def dying_other(rank, ranks, folder):
    return dying_rank(rank, ranks, folder, dies=2)


def dying_first(rank, ranks, folder):
    return dying_rank(rank, ranks, folder, dies=0)
