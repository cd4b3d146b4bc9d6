"""Scenarios: loops of one's own on several ranks, localised at every step, where a rank fails, dies or is missing."""

import logging
import os
import signal
import time

import torch
import torch._dynamo  # see training.py
from tallying import join_group, meet, wait_for
from training import CLIP, Policy, logp_of, marks, replicated, sharded, whole

from rlwatch.errors import RLWatchError
from rlwatch.gradloc import locate
from rlwatch.integrations import localising as of_ranks
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.torch import Watcher
from rlwatch.run import ranks as joining

EVERY_STEP = Localise(threshold=1e-12, share=0.99, culprits=4)
STEPS, TOKENS, VOCABULARY, ROWS = 5, 6, 7, 8
CUTS = {1: (0, 8), 2: (0, 5, 8), 3: (0, 3, 6, 8)}
PLANTED = {"step": 3, "row": 7, "position": 1}
"""On the last rank."""
FAILS_AT = 3
WAIT_S = 2.0
"""Of the ranks' own group here, where one does not come."""
NEVER_S = 3600.0
"""Elsewhere: a scenario that waits for so long is killed."""


def batch(step):
    """Of all ranks; token counts differ by row."""
    g = torch.Generator().manual_seed(step)
    advantages = torch.randn(ROWS, TOKENS, generator=g)
    lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=g)
    if step == PLANTED["step"]:
        advantages[PLANTED["row"], PLANTED["position"]] = 200.0
    return {
        "ids": torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=g),
        "mask": torch.arange(TOKENS) < lengths,
        "advantages": advantages,
    }


def one_step(policy, optimizer, watcher, step, rows, ranks):
    every = batch(step)
    part = {name: x[rows] for name, x in every.items()}
    forward = logp_of if watcher is None else lambda *args: watcher.forward(logp_of, *args)
    logp, _ = forward(policy, part["ids"])
    loss = -(logp * part["advantages"] * part["mask"]).sum() * ranks / every["mask"].sum()
    if watcher is not None:
        watcher.observe(logp=logp, mask=part["mask"], advantages=part["advantages"], ids=part["ids"][:, 1:])
    optimizer.zero_grad()
    loss.backward()
    if watcher is not None:
        watcher.gradients()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
    optimizer.step()
    if watcher is not None:
        watcher.step(step, loss=loss.detach())


class Hearing(logging.Handler):
    """What rlwatch warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def train(rank, ranks, folder, wrap, name, *, localise=EVERY_STEP, before=None):
    """``before(step, watcher)`` is called before each step. Returns what training left, and what was found."""
    torch.manual_seed(5)
    policy = wrap(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    hearing, watcher, reports = Hearing(), None, []
    logging.getLogger("rlwatch").addHandler(hearing)
    if localise:
        watcher = Watcher(policy, optimizer, store=folder / "store", run_id=name, sigterm=False, localise=localise)
        listen(watcher, reports)
    torch.manual_seed(rank)
    rows, slowest = slice(*CUTS[ranks][rank : rank + 2]), 0.0
    for step in range(1, STEPS + 1):
        if before is not None:
            before(step, watcher)
        began = time.monotonic()
        one_step(policy, optimizer, watcher, step, rows, ranks)
        slowest = max(slowest, time.monotonic() - began)
    errors = 0 if watcher is None else watcher.run.counters.snapshot().get("errors", 0)
    if watcher is not None:
        watcher.finish()
    logging.getLogger("rlwatch").removeHandler(hearing)
    moments = [v for e in optimizer.state.values() for v in e.values()]
    return {
        "left": [marks(policy), [float(getattr(m, "to_local", lambda m=m: m)().sum()) for m in moments],
                 torch.get_rng_state().sum().item()],
        "reports": reports, "warned": hearing.said, "errors": errors, "slowest": slowest,
    }  # fmt: skip


def listen(watcher, reports):
    """Keep what each localisation reports on this rank."""
    localiser = watcher.collector.localiser
    if localiser is None:
        return
    check = localiser.check

    def heard(spike):
        located = check(spike)
        if located is not None:
            reports.append(told(spike.step, located.report))
        return located

    localiser.check = heard


def told(step, report):
    culprits = [
        {
            "at": [c.at.rank, c.at.microbatch, c.at.row, c.at.position],
            "cause": c.cause.value, "contribution": c.contribution, "own": c.own.norm,
        }
        for c in report.culprits
    ]  # fmt: skip
    return {
        "step": step, "norm": report.norm, "threshold": report.threshold, "tokens": report.tokens, "gap": report.gap,
        "layers": dict(report.layers), "cause": report.cause.value, "why_not": report.why_not, "culprits": culprits,
    }  # fmt: skip


def unwatched(rank, ranks, folder, wrap):
    return train(rank, ranks, folder, wrap, "none", localise=None)


def late(rank, watcher):
    """Clocks differ: this rank's own budget was spent long ago."""
    if rank and watcher is not None:
        watcher.collector.localiser.budget.allowance_s = -1e9
        watcher.collector.localiser.budget.granted = 1


def failing(rank, name):
    """The last rank fails in the middle of localising a step."""

    def broken(*args, **kwargs):
        raise ZeroDivisionError("injected")

    original = getattr(locate, name)

    def before(step, watcher):
        setattr(locate, name, broken if rank == 1 and step == FAILS_AT else original)

    return before


def missing(rank):
    """A rank that once does not look at its gradients: the others wait for it, once."""

    def before(step, watcher):
        if rank == 1 and step == FAILS_AT:
            watcher.gradients = lambda: None

    return before


def unlinked(rank, ranks, folder, wrap):
    """A rank that finds no way to rank 0."""
    link = joining.OtherRank

    def no_way(rank, find, counters, **settings):
        def found():
            raise RLWatchError("no way")

        return link(rank, found, counters, **settings)

    joining.OtherRank = no_way
    try:
        return train(rank, ranks, folder, wrap, "unlinked")
    finally:
        joining.OtherRank = link


def loops(rank, ranks, folder):
    """Under DDP and FSDP2: unwatched, localised, and with a rank that fails, is missing, or was never linked."""
    join_group(rank, ranks, folder)
    of_ranks.TIMEOUT_S = NEVER_S
    found = {}
    for wrap in (replicated, sharded):
        kind = wrap.__name__
        found[kind] = {
            "unwatched": unwatched(rank, ranks, folder, wrap),
            "localised": train(rank, ranks, folder, wrap, kind, before=lambda step, watcher: late(rank, watcher)),
            "failing": train(rank, ranks, folder, wrap, f"{kind}-failing", before=failing(rank, "screen")),
        }
    found["replicated"]["failing late"] = train(
        rank, ranks, folder, replicated, "failing-late", before=failing(rank, "describe")
    )
    found["replicated"]["unlinked"] = unlinked(rank, ranks, folder, replicated)
    of_ranks.TIMEOUT_S = WAIT_S
    found["replicated"]["missing"] = train(rank, ranks, folder, replicated, "missing", before=missing(rank))
    return found


def dying(rank, ranks, folder):
    """Each rank trains by itself; the last one is killed."""
    join_group(rank, ranks, folder)
    of_ranks.TIMEOUT_S = NEVER_S

    def before(step, watcher):
        if step == FAILS_AT and watcher is not None:
            watcher.run.flush(20.0)
            meet("about to die", rank)
            if rank == ranks - 1:
                for other in range(ranks):
                    wait_for("about to die", other)
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for("about to die", ranks - 1)

    return {
        "unwatched": unwatched(rank, ranks, folder, whole),
        "dying": train(rank, ranks, folder, whole, "dying", before=before),
    }
