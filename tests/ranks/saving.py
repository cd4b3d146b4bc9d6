"""Scenarios that save a run on several ranks: FSDP2 in a loop of one's own, snapshots by shard, and a rank that dies."""

import hashlib
import os
import signal
import time

import torch
import torch._dynamo  # see training.py
from tallying import ask_all, join_group, meet, wait_for
from training import called_together, marks, models, one_step, resharded, sharded

from rlwatch.control import mailbox
from rlwatch.integrations.snapshots import Snapshots
from rlwatch.integrations.torch import Watcher

EVERY = Snapshots(every=1, keep=30, share=1.0)
BACK, UNDO, HOLD, SKIP, GOOD, GUARD, LAST = 4, 5, 6, 9, 11, 12, 15
"""The steps after which rank 0 asks: a roll-back, undo, a hold of two batches, an update left out, back to what is good,
and the next two updates left out if they are not finite."""
BROKEN = GUARD + 1
"""The step in which one value of one rank's shard of the gradients is NaN."""


def state(policy, optimizer):
    """Bytes of this rank's part: parameters, moments and step counts, rates."""
    resharded(policy)
    digest = hashlib.sha256(marks(policy).encode())
    for p in policy.parameters():
        for name, value in sorted(optimizer.state.get(p, {}).items()):
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(name.encode() + torch.as_tensor(local).detach().numpy().tobytes())
    digest.update(str([group["lr"] for group in optimizer.param_groups]).encode())
    return digest.hexdigest()


class Loop:
    """A training of ``steps``; ``asks``: step -> what rank 0 asks after it. Keeps the state around each boundary."""

    def __init__(self, rank, ranks, folder, name, *, snapshots=False, watched=True, then=None):
        self.rank, self.ranks, self.folder, self.name, self.asked = rank, ranks, folder, name, 0
        self.policy, self.reference = models()
        self.policy, self.reference = sharded(self.policy), sharded(self.reference)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.watcher, self.before, self.after, self.broken = None, {}, {}, False
        self.optimizer.register_step_pre_hook(lambda *_: self.break_gradient())
        schedule = None if then is None else Schedule(self.optimizer, then)
        if watched:
            self.watcher = Watcher(
                self.policy, self.optimizer, ref_model=self.reference, clip=0.2, store=folder / "store", run_id=name,
                sigterm=False, snapshots=snapshots, scheduler=schedule,
            )  # fmt: skip
        torch.manual_seed(rank)

    def train(self, asks=None, steps=LAST):
        self.after[0] = state(self.policy, self.optimizer)
        for step in range(1, steps + 1):
            watcher = self.watcher
            if watcher is not None:
                watcher.rollouts(rewards=torch.ones(4))
            self.broken = bool(asks) and step == BROKEN and self.rank == self.ranks - 1
            one_step(self.policy, self.reference, self.optimizer, watcher, step, self.rank, self.ranks)
            self.before[step] = state(self.policy, self.optimizer)
            if watcher is not None:
                if asks and step in asks:
                    self.ask(*asks[step])
                watcher.obey()
            self.after[step] = state(self.policy, self.optimizer)

    def break_gradient(self):
        if self.broken:
            parts = (p.grad.to_local() for p in self.policy.parameters() if p.grad is not None)
            next(part for part in parts if part.numel()).view(-1)[0] = float("nan")

    def ask(self, kind, args):
        if self.rank == 0:
            self.watcher.run.flush(20.0)  # what is known to be good is what has been judged
            ask_all(self.watcher.run, self.folder / "store", kind, args=args() if callable(args) else args)
            while not self.watcher.run.has_commands(for_all_ranks=True):  # it may be called for a snapshot already
                time.sleep(0.01)
            called_together(self.watcher.run)
        self.asked += 1
        meet(f"{self.name} asked {self.asked}", self.rank)
        wait_for(f"{self.name} asked {self.asked}", 0)  # an earlier round has called the other ranks as well

    @property
    def kept(self):
        return [one.step for one in self.watcher.snapshots.taken]

    def outcome(self):
        if self.watcher is not None:
            self.watcher.finish()
        return {
            "before": self.before, "after": self.after, "random": torch.get_rng_state().sum().item(),
            "kept": [] if self.watcher is None or self.watcher.snapshots is None else self.kept,
            "errors": 0 if self.watcher is None else self.watcher.run.counters.snapshot().get("errors", 0),
        }  # fmt: skip


def saving(rank, ranks, folder):
    """Unwatched, with snapshots alone, and with every command that saves a run."""
    mailbox.POLL_S = 0.0
    join_group(rank, ranks, folder)
    plain = Loop(rank, ranks, folder, "plain", watched=False)
    plain.train()
    snapped = Loop(rank, ranks, folder, "snapped", snapshots=EVERY)
    snapped.train()
    saved = Loop(rank, ranks, folder, "saved", snapshots=EVERY)
    saved.train(
        {
            BACK: ("rollback", lambda: {"to": max(step for step in saved.kept if step < BACK)}),
            UNDO: ("undo", {}),
            HOLD: ("hold", {"batches": 2}),
            SKIP: ("skip-step", {"steps": 1}),
            GOOD: ("rollback", {}),
            GUARD: ("skip-step", {"when": "nonfinite", "steps": 2}),
        }
    )
    return {"plain": plain.outcome(), "snapped": snapped.outcome(), "saved": saved.outcome()}


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """A schedule that is put back between the weights and the answer; ``then`` is called there."""

    def __init__(self, optimizer, then):
        super().__init__(optimizer, lambda step: 1.0)
        self.then = then

    def state_dict(self):
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state):
        self.then()


def broken(rank, ranks, folder, name, then):
    """A roll-back to the beginning; on the last rank ``then`` is called in the middle of its writes, once."""
    mailbox.POLL_S = 0.0
    join_group(rank, ranks, folder)
    interrupted = [then] if rank == ranks - 1 else []
    loop = Loop(rank, ranks, folder, name, snapshots=EVERY, then=lambda: interrupted.pop()() if interrupted else None)
    loop.train({3: ("rollback", {"to": 0})}, steps=3)
    return loop.outcome()


def failing(rank, ranks, folder):
    """The last rank cannot write."""

    def fails():
        raise OSError("no memory for the schedule")

    return broken(rank, ranks, folder, "failing", fails)


def killed(rank, ranks, folder):
    """The last rank dies."""
    return broken(rank, ranks, folder, "killed", lambda: os.kill(os.getpid(), signal.SIGKILL))


def missing(rank, ranks, folder):
    """The last rank does not have the snapshot."""
    mailbox.POLL_S = 0.0
    join_group(rank, ranks, folder)
    loop = Loop(rank, ranks, folder, "missing", snapshots=EVERY)
    if rank == ranks - 1:
        loop.watcher.snapshots.forget_after(-1)
    loop.train({3: ("rollback", {"to": 0})}, steps=3)
    return loop.outcome()
