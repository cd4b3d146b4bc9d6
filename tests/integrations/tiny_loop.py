"""A GRPO loop in plain PyTorch on a tiny recurrent policy, with or without a watcher; and a fake run."""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

from rlwatch.control.mailbox import PendingCommand
from rlwatch.control.policy import RunHealth
from rlwatch.recorder.losses import Counters
from rlwatch.records import Command, Event, RunInfo

torch.set_num_threads(1)
VOCABULARY, EOS, WIDTH = 9, 0, 6
PROMPTS, GROUP, BETA, CLIP = 4, 4, 0.05, (0.2, 0.28)


class Policy(nn.Module):
    """Next-token logits; dropout, so that a stray random number would show."""

    def __init__(self, hidden=12):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList([nn.GRU(hidden, hidden, batch_first=True) for _ in range(2)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = self.drop(layer(hidden)[0])
        return self.head(hidden)


def fresh_policy(seed=0):
    torch.manual_seed(seed)
    return Policy()


@dataclass
class Rollouts:
    """Prompt and response (N, 1 + T); the rest (N, T) or (N,), of the responses."""

    ids: torch.Tensor
    mask: torch.Tensor
    old_logp: torch.Tensor
    ref_logp: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    advantages: torch.Tensor

    @property
    def responses(self):
        return self.ids[:, 1:]


def logp_of(policy, ids):
    """Log-probs of the responses and the logits they were chosen from."""
    logits = policy(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1), logits


@torch.no_grad()
def generate(policy, reference):
    policy.eval()
    prompts = torch.randint(1, VOCABULARY, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
    ids, alive, columns = prompts, torch.ones(len(prompts), dtype=torch.bool), []
    for _ in range(WIDTH):
        token = torch.multinomial(policy(ids)[:, -1].softmax(-1), 1)
        columns.append(alive)
        ids = torch.cat([ids, torch.where(alive[:, None], token, EOS)], 1)
        alive = alive & (token[:, 0] != EOS)
    mask = torch.stack(columns, 1)
    rewards = ((ids[:, 1:] % 2 == 1) & mask).sum(1) / WIDTH
    grouped = rewards.view(PROMPTS, GROUP)
    advantages = (grouped - grouped.mean(1, keepdim=True)).flatten()
    old, ref = logp_of(policy, ids)[0], logp_of(reference, ids)[0]
    policy.train()
    groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
    return Rollouts(ids, mask, old, ref, rewards, groups, advantages)


def loss_of(logp, part):
    ratio = (logp - part.old_logp).exp()
    a = part.advantages[:, None]
    policy = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * a)
    gap = part.ref_logp - logp
    per_token = policy + BETA * (gap.exp() - gap - 1)
    return (per_token * part.mask).sum() / part.mask.sum().clamp(min=1)


def micro_batches(rollouts, n):
    rows = torch.arange(len(rollouts.ids)).chunk(n)
    return [Rollouts(**{name: value[chunk] for name, value in vars(rollouts).items()}) for chunk in rows]


@dataclass
class Outcome:
    """Everything training leaves behind."""

    policy: Policy
    reference: Policy
    optimizer: torch.optim.Optimizer
    watcher: object
    random_state: torch.Tensor
    batches: list = field(default_factory=list)


class Nobody:
    """Watches nothing."""

    should_stop = False

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def train(make_watcher=None, *, steps=3, accumulate=1, epochs=1, lr=5e-3, seed=0, before_step=None):
    """Train; ``make_watcher(policy, optimizer, reference)``, ``before_step(step, watcher)``."""
    policy = fresh_policy(seed)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    torch.manual_seed(seed + 1)
    watcher = Nobody() if make_watcher is None else make_watcher(policy, optimizer, reference)
    outcome = Outcome(policy, reference, optimizer, watcher, torch.get_rng_state())
    step = 0
    while step < steps:
        if before_step is not None:
            before_step(step, watcher)
        watcher.obey()
        if watcher.should_stop:
            break
        rollouts = generate(policy, reference)
        outcome.batches.append(rollouts)
        cut = rollouts.mask[:, -1] & (rollouts.ids[:, -1] != EOS)
        watcher.rollouts(rewards=rollouts.rewards, groups=rollouts.groups, lengths=rollouts.mask.sum(1), cut=cut)
        for _ in range(epochs):
            step += 1
            loss = update(policy, optimizer, rollouts, accumulate, watcher)
            watcher.step(step, loss=loss)
    outcome.random_state = torch.get_rng_state()
    return outcome


def update(policy, optimizer, rollouts, accumulate, watcher):
    """One optimizer step over micro-batches; returns the loss of the last."""
    optimizer.zero_grad()
    for part in micro_batches(rollouts, accumulate):
        logp, logits = logp_of(policy, part.ids)
        loss = loss_of(logp, part) / accumulate
        watcher.observe(**seen(part, logp, logits))
        loss.backward()
    watcher.gradients()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    return loss


def seen(part, logp, logits):
    """What the loop passes of a micro-batch."""
    return {
        "logp": logp,
        "logits": logits,
        "ids": part.responses,
        "mask": part.mask,
        "advantages": part.advantages,
        "old_logp": part.old_logp,
        "ref_logp": part.ref_logp,
    }


class FakeRun:
    """Has the methods of ``rlwatch.Run`` that a watcher uses, and remembers every call."""

    rank, world_size, ranks, linked = 0, 1, None, False
    info = RunInfo("r")

    def __init__(self):
        self.logged, self.spikes, self.events, self.ends, self.texts = [], [], [], [], []
        self.queue, self.answers = [], []
        self.counters, self.active, self.findings = Counters(), True, ()

    def introduce(self):
        """Nothing: it is recorded nowhere."""

    def decide(self, *, resumed=None, step=None):
        """Nothing: it is no run of a store."""

    @property
    def measures(self):
        return self.active

    def log(self, metrics, step):
        self.logged.append((step, dict(metrics)))

    def log_spikes(self, batch):
        self.spikes.append(batch)

    def log_completions(self, batch):
        self.texts.append(batch)

    def event(self, kind, step=None, **body):
        self.events.append(Event(kind, step, body))

    def has_commands(self, *, for_all_ranks=False):
        return bool(self.queue)

    def commands(self, *, for_all_ranks=False):
        taken, self.queue = self.queue, []
        return [PendingCommand(command, self.answers.append) for command in taken]

    def health(self):
        return RunHealth(tuple(self.findings))

    def finish(self, state="finished", reason="", deadline_s=10.0):
        self.ends.append((str(state), reason))
        self.active = False
        return True

    def send(self, kind="reset-reference", *, force=False, **args):
        self.queue.append(Command(f"c{len(self.answers)}", "r", kind, args, force, requested_by="ann@lab", why="so"))

    @property
    def steps(self):
        """Step -> its metrics."""
        merged = {}
        for step, metrics in self.logged:
            merged.setdefault(step, {}).update(metrics)
        return merged
