"""Scenarios of the loop in docs/own-loop.md, whose ranks set up and arrive in every order."""

import itertools
import os
import resource
import socket
import time

import torch
import torch.distributed as dist
from tallying import all_linked, meet, wait_for
from torch import nn

import rlwatch
from rlwatch.control import mailbox
from rlwatch.control.commands import request
from rlwatch.errors import RLWatchError
from rlwatch.integrations import ranks as distributed
from rlwatch.integrations.torch import Watcher  # here, before the ranks are forked: it takes its time
from rlwatch.link.wire import HubAddress

STEPS = 5
SAVE_AT = 3
APART_S = 0.3
"""Between the arrivals of two ranks: far more than linking takes, so that each order really happens."""
STRANGERS = 300
FILES = 200


def group(rank, ranks):
    """As a launcher makes it: over a TCPStore that rank 0's process holds."""
    mailbox.POLL_S = 0.0
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)


class Loop:
    """The documented loop of one rank: ``obey()`` first. Notes how long each call of it took, and where it saved."""

    def __init__(self, folder, run_id, **kwargs):
        self.policy = nn.Linear(3, 3)
        self.saved, self.waits, self.at = [], [], 0
        begin = time.monotonic()
        self.watcher = Watcher(
            self.policy, store=folder / "store", run_id=run_id, sigterm=False, save=self.save, **kwargs
        )
        self.setting_up = time.monotonic() - begin

    def save(self):
        self.saved.append(self.at)
        return "here"

    def step(self, step, *, together=True):
        self.at = step
        begin = time.monotonic()
        self.watcher.obey()
        self.waits.append(time.monotonic() - begin)
        logp = self.policy(torch.ones(2, 3)).log_softmax(-1)
        self.watcher.observe(logp=logp, mask=torch.ones(2, 3, dtype=torch.bool))
        if together:
            dist.all_reduce(torch.ones(1))  # what every data-parallel step does
        self.watcher.step(step, loss=1.0)

    def end(self):
        self.watcher.finish()
        return {"saved": self.saved, "waited": max(self.waits), "setting up": self.setting_up}


def ask(folder, run_id, loop):
    """A person asks rank 0's run to save, and rank 0's process has heard of it."""
    request(rlwatch.open_store(folder / "store"), run_id, "save-checkpoint", by="ann", why="to see")
    loop.watcher.run.has_commands(for_all_ranks=True)  # the loop listens from its first obey() on, which may be to come
    for _ in range(4000):
        if loop.watcher.run.has_commands():
            return
        time.sleep(0.005)
    raise AssertionError("nothing was heard of the command")


def orders(rank, ranks, folder):
    """One run for every order in which the ranks can come to their first line, and to the first step."""
    group(rank, ranks)
    found = {}
    for order in itertools.permutations(range(ranks)):
        name = "".join(map(str, order))
        dist.barrier()
        time.sleep(APART_S * order.index(rank))
        loop = Loop(folder, name)
        for step in range(STEPS):
            if step == SAVE_AT:  # all are linked by then, and come to the command in the same order
                all_linked(loop.watcher.run, ranks)
                if rank == 0:
                    ask(folder, name, loop)
                dist.barrier()
                time.sleep(0.1 * order.index(rank))
            loop.step(step)
        found[name] = loop.end()
    return found


def asked_before_anybody_came(rank, ranks, folder):
    """The command is there when rank 0 comes to its first boundary; the others come later, and are not waited for."""
    group(rank, ranks)
    if rank:
        wait_for("rank 0 passed its first boundary", 0)
    loop = Loop(folder, "r")
    if rank == 0:
        ask(folder, "r", loop)
    loop.step(1, together=False)
    meet("rank 0 passed its first boundary", rank)
    for step in range(2, STEPS):
        loop.step(step)
    return loop.end()


def absent(rank, ranks, folder):
    """Rank 1 has no watcher, and rank 2 one that it never calls; neither holds up rank 0, and commands are refused."""
    group(rank, ranks)
    if rank == 1:
        for _ in range(STEPS):
            dist.all_reduce(torch.ones(1))
        wait_for("done", 0)
        return {}
    loop = Loop(folder, "r")
    for step in range(STEPS):
        if rank == 2:
            dist.all_reduce(torch.ones(1))
            continue
        if step == SAVE_AT:
            ask(folder, "r", loop)
        loop.step(step)
    if rank == 0:
        meet("done", 0)
        return loop.end()
    wait_for("done", 0)
    begin = time.monotonic()
    loop.watcher.finish()
    return {"saved": loop.saved, "finishing": time.monotonic() - begin}


def late(rank, ranks, folder):
    """The last rank comes when the others have trained to the end; none of them has waited, and its share is counted."""
    group(rank, ranks)
    if rank == ranks - 1:
        for other in range(ranks - 1):
            wait_for("trained", other)
    loop = Loop(folder, "r")
    for step in range(STEPS):
        loop.step(step, together=False)
    meet("trained", rank)
    wait_for("trained", ranks - 1)
    return loop.end()


def besieged(rank, ranks, folder):
    """The last rank is a stranger: it opens connections to rank 0 and says nothing, before rank 1 has come."""
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    group(rank, ranks)
    if rank == ranks - 1:
        place = distributed.meeting()
        while (said := place.get("address")) is None:
            time.sleep(0.01)
        address = HubAddress.from_text(said)
        callers = [socket.create_connection((address.candidates[0], address.port), 10.0) for _ in range(STRANGERS)]
        meet("strangers are there", rank)
        for _ in range(STEPS):
            dist.all_reduce(torch.ones(1))
        wait_for("trained", 0)
        return {"callers": len(callers), "hosts": address.hosts}
    if rank:
        wait_for("strangers are there", ranks - 1)
    loop = Loop(folder, "r")
    if rank == 0:
        loop.watcher.run.ranks.hub.inbox.leave(ranks - 1)  # the stranger is no rank of this run
        wait_for("strangers are there", ranks - 1)
    opened = 0
    for step in range(STEPS):
        loop.step(step)
        (folder / f"file{rank}-{step}").write_text("the trainer writes a checkpoint")
        opened += 1
    result = loop.end()
    meet("trained", rank)
    return {**result, "opened": opened}


def secretive(rank, ranks, folder):
    """Each rank has another secret in its environment: they are not linked, and train all the same."""
    os.environ["RLWATCH_LINK_SECRET"] = f"the secret of rank {rank} alone"
    group(rank, ranks)
    loop = Loop(folder, "r")
    for step in range(STEPS):
        loop.step(step)
    return loop.end()


def misled(rank, ranks, folder):
    """A port that rank 0 is told and cannot have is an error at set-up, and the others are let go."""
    group(rank, ranks)
    if rank:
        loop = Loop(folder, "r")
        linked = loop.watcher.run.ranks.settled(60.0)
        meet("has looked", rank)
        return {"linked": linked}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            Loop(folder, "r", link=f"127.0.0.1:{taken.getsockname()[1]}")
        except RLWatchError as error:
            wait_for("has looked", 1)
            return {"error": str(error)}
    return {}
