"""A loop that localises every step, on any device, with a culprit planted into one of them."""

import math
from contextlib import nullcontext

import numpy as np
import torch
from tiny_loop import FakeRun
from torch import nn

import rlwatch
from rlwatch.clipping import LayerClip
from rlwatch.integrations.localising import Localise
from rlwatch.records import CULPRITS

VOCABULARY, ROWS, TOKENS, SPIKE_AT = 31, 8, 12, 3


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)


def logp_of(policy, ids):
    every = policy(ids[:, :-1]).log_softmax(-1)
    return every.gather(-1, ids[:, 1:, None]).squeeze(-1), -(every.exp() * every).sum(-1)


def rollouts(step):
    """On the CPU: a generation of ``ROWS`` responses."""
    g = torch.Generator().manual_seed(step)
    return {
        "ids": torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=g),
        "mask": torch.arange(TOKENS) < torch.randint(4, TOKENS + 1, (ROWS, 1), generator=g),
        "rewards": torch.randn(ROWS, generator=g),
    }


def ratio(values):
    """One token is e^7 times as likely as it was."""
    values["old"][1, 2] -= 7.0


def reference(values):
    """The reference thought one token e^6 times as likely."""
    values["ref"][1, 2] += 6.0


def advantage(values):
    values["advantages"][1] = math.nan


def old_logp(values):
    values["old"][1, 2] = math.nan


PLANTS = [ratio, reference, advantage, old_logp, None]


def train(device, plant, *, move=nn.Module.to, entropy_bonus=0.0, around=nullcontext, **options):
    """The watched run of a few steps on ``device``; before ``SPIKE_AT`` ends ``plant`` changes its second batch."""
    torch.manual_seed(0)
    policy = move(Policy(), device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    run = FakeRun()
    localise = Localise(threshold=1e-12, share=0.99, **options)
    watcher = rlwatch.Watcher(policy, optimizer, clip=(0.2, 0.28), run=run, localise=localise)
    clip = LayerClip(policy)
    for step in range(1, SPIKE_AT + 2):
        batch = {name: x.to(device) for name, x in rollouts(step).items()}
        advantages = batch["rewards"] - batch["rewards"].mean()
        watcher.rollouts(rewards=batch["rewards"], groups=4, lengths=batch["mask"].sum(1), ids=batch["ids"][:, 1:])
        optimizer.zero_grad()
        for number in range(2):
            part = slice(4 * number, 4 * number + 4)
            ids, mask = batch["ids"][part], batch["mask"][part]
            logp, entropy = watcher.forward(logp_of, policy, ids)
            values = {"old": logp.detach() + 0.1, "ref": logp.detach() - 0.1, "advantages": advantages[part].clone()}
            if step == SPIKE_AT and number == 1 and plant is not None:
                plant(values)
            gap = values["ref"] - logp
            each = -(logp - values["old"]).exp() * values["advantages"][:, None] + 0.1 * (gap.exp() - gap - 1)
            loss = ((each - entropy_bonus * entropy) * mask).sum() / mask.sum() / 2
            watcher.observe(
                logp=logp, entropy=entropy, ids=ids[:, 1:], mask=mask, advantages=values["advantages"],
                old_logp=values["old"], ref_logp=values["ref"],
            )  # fmt: skip
            loss.backward()
        with around():
            watcher.gradients()
        clip()
        if plant is None or step != SPIKE_AT:
            optimizer.step()
        watcher.step(step, loss=loss)
    watcher.finish()
    assert run.counters.snapshot() == {}
    return run


def culprits(run):
    return [batch for batch in run.spikes if batch.reason == CULPRITS]


def assert_same_columns(found, expected):
    assert found.columns.keys() == expected.columns.keys()
    for name, values in expected.columns.items():
        if isinstance(values, np.ndarray) and values.dtype.kind == "f":
            np.testing.assert_allclose(found.columns[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
        elif name != "layers":
            assert list(found.columns[name]) == list(values), name


def assert_same_runs(found, expected):
    """Culprits, causes, shares, and what the events say."""
    assert len(culprits(found)) == len(culprits(expected))
    for mine, theirs in zip(culprits(found), culprits(expected), strict=True):
        assert_same_columns(mine, theirs)
    events = [sorted(run.events, key=lambda event: (event.kind, event.step)) for run in (found, expected)]
    for mine, theirs in zip(*events, strict=True):  # what the device has measured comes when it is there
        assert (mine.kind, mine.step, list(mine.body)) == (theirs.kind, theirs.step, list(theirs.body))
        assert mine.body.get("why_not") == theirs.body.get("why_not")
        assert mine.body.get("origin") == theirs.body.get("origin")
