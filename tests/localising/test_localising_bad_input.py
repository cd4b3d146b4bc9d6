"""Batches and models that nobody wished for: the right token or a reason, and training as if nobody had looked."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from tiny_loop import FakeRun
from torch import nn

import rlwatch
from rlwatch.integrations.localising import Localise
from rlwatch.records import CULPRITS

pytestmark = pytest.mark.torch

ROWS, LENGTH, VOCABULARY, WIDE = 6, 7, 11, 8
ROW, POSITION, SIZE = 4, 3, 300.0
EVERY_STEP = Localise(threshold=1e-12, share=0.99)


class Policy(nn.Module):
    """A causal mean of what came before; ``inside`` is applied to the hidden states."""

    def __init__(self, *, tied=False, inside=None, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(VOCABULARY, WIDE, padding_idx=0), nn.Linear(WIDE, WIDE)
        self.head, self.drop = nn.Linear(WIDE, VOCABULARY, bias=False), nn.Dropout(dropout)
        if tied:
            self.head.weight = self.embed.weight
        self.inside = inside or (lambda hidden: hidden)

    def forward(self, ids, start=None):
        """``start`` (B, L): where the sequence that a position belongs to begins."""
        hidden = self.embed(ids).cumsum(1)
        if start is not None:
            before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
            hidden = hidden - before.gather(1, start[..., None].expand_as(hidden))
        return self.head(self.inside(self.drop(torch.tanh(self.inner(hidden)))))


def logp_of(policy, ids):
    return policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def batch_ids(rows=ROWS, length=LENGTH):
    return torch.randint(1, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(5))


@dataclass
class Case:
    """``forward(policy, ids)`` makes log-probs through ``run(compute, *args)``; ``says`` is part of the reason expected.

    ``named`` is the place (row, position) of the token to blame in the first ``steps`` steps; None where a reason is
    the right answer.
    """

    forward: object = lambda run, policy, ids: run(logp_of, policy, ids)
    ids: torch.Tensor = field(default_factory=batch_ids)
    policy: object = Policy
    weights: object = None
    mask: object = None
    named: tuple | None = (ROW, POSITION)
    says: str = ""
    strict: bool = True
    more: object = lambda policy: 0.0
    steps: int = 2
    pad: bool = True


def planted(rows=ROWS, length=LENGTH, at=(ROW, POSITION)):
    weights = torch.ones(rows, length)
    weights[at] = SIZE
    return weights


def ragged(logp):
    return [row[: 5 if i == 1 else LENGTH] for i, row in enumerate(logp)]


def nested(layout):
    return lambda run, policy, ids: run(
        lambda p, x: torch.nested.as_nested_tensor(ragged(logp_of(p, x)), layout=layout), policy, ids
    )


def packed(run, policy, ids):
    """All sequences one after the other in one row, as flash attention takes them."""

    def compute(p, flat, start):
        logits = p(flat[None, :-1], start[None, :-1])
        every = logits.log_softmax(-1).gather(-1, flat[None, 1:, None])[..., 0]
        return torch.cat([every, every.new_zeros(1, 1)], 1)

    start = torch.arange(ids.numel()) // ids.shape[1] * ids.shape[1]
    return run(compute, policy, ids.flatten(), start)


def padding_free(run, policy, ids):
    """Packed inside, rectangular outside: what a padding-free collator does."""

    def compute(p, x, mask):
        kept = p(x[:, :-1])[mask].log_softmax(-1).gather(-1, x[:, 1:][mask][:, None])[:, 0]
        return torch.zeros(mask.shape).masked_scatter(mask, kept)

    mask = torch.arange(LENGTH) < torch.tensor([7, 4, 7, 5, 6, 1])[:, None]
    return run(compute, policy, ids, mask)


def flat(run, policy, ids):
    """Nothing but a row of log-probs."""
    return run(lambda p, x: logp_of(p, x).flatten(), policy, ids)


def shared_prompts(run, policy, ids):
    """Prompts come once for each group, and are repeated inside."""

    def compute(p, prompts, answers):
        return logp_of(p, torch.cat([prompts.repeat_interleave(2, 0), answers], 1))

    return run(compute, policy, ids[::2, :1].contiguous(), ids[:, 1:])


class Straight(torch.autograd.Function):
    """Rounds forward and passes the gradient straight through: no derivative of what was computed."""

    @staticmethod
    def forward(_ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(_ctx, gradient):
        return gradient


class Cube(torch.autograd.Function):
    """A custom operation without a forward derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3 + x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (3 * x**2 + 1)


def frozen():
    policy = Policy()
    policy.embed.requires_grad_(False)
    policy.inner.bias.requires_grad_(False)
    return policy


def noisy(size):
    """A kernel that never computes the same twice, with a generator of its own: the same noise in every test."""

    def policy():
        own = torch.Generator().manual_seed(7)
        return Policy(inside=lambda hidden: hidden + size * torch.randn(hidden.shape, generator=own))

    return policy


def failing(error, *, after):
    """The forward works in training, and raises from the ``after``-th time on that it is run again."""

    def forward(run, policy, ids):
        calls = []

        def compute(p, x):
            calls.append(1)
            if len(calls) > after:
                raise error
            return logp_of(p, x)

        return run(compute, policy, ids)

    return forward


def consuming(run, policy, ids):
    """A batch that can be read once."""
    batches = iter([ids])
    return run(lambda p: logp_of(p, next(batches)), policy)


def with_pad(rows):
    """Token 0 is the padding row of the embedding, and stands in the middle of the text."""
    ids = batch_ids()
    ids[rows, 2] = 0
    return ids


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
CASES = {
    "ragged": Case(lambda run, p, ids: run(lambda q, x: ragged(logp_of(q, x)), p, ids), pad=False),
    "nested": Case(nested(torch.jagged), pad=False),
    "nested, strided": Case(nested(torch.strided), pad=False),
    "packed": Case(packed, weights=planted(1, 48, (0, 35)), mask=torch.ones(1, 48), named=(0, 35)),
    "padding-free": Case(padding_free),
    "flat": Case(
        flat, weights=planted().flatten(), mask=torch.ones(ROWS * LENGTH), named=None, strict=False,
        says="no forward pass of this step was kept",
    ),
    "empty mask": Case(mask=torch.zeros(ROWS, LENGTH), named=None, says="no forward pass"),
    "a row without tokens": Case(mask=(torch.arange(ROWS) != 1)[:, None].float().expand(ROWS, LENGTH)),
    "answers of one token": Case(ids=batch_ids(ROWS, 1), weights=planted(ROWS, 1, (4, 0)), mask=torch.ones(ROWS, 1), named=(4, 0)),
    "one answer": Case(ids=batch_ids(1), weights=planted(1, LENGTH, (0, 3)), mask=torch.ones(1, LENGTH), named=(0, 3)),
    "duplicated rows": Case(ids=batch_ids()[[0, 1, 2, 4, 4, 4]]),
    "shared prompts": Case(shared_prompts, says="was verified as a whole"),
    "frozen parameters": Case(policy=frozen),
    "tied embeddings": Case(policy=lambda: Policy(tied=True), ids=with_pad([0, 4])),
    "a term without a gradient": Case(more=lambda policy: policy.inner.weight.detach().square().sum()),
    "a term outside the log-probs": Case(
        more=lambda policy: 2000 * policy.inner.weight.square().sum(), named=None, says="incomplete",
    ),
    "a custom operation": Case(policy=lambda: Policy(inside=Cube.apply)),
    "a straight-through estimator": Case(policy=lambda: Policy(inside=Straight.apply)),
    "noise of a kernel": Case(policy=noisy(1e-7)),
    "much noise": Case(policy=noisy(0.3), says="incomplete"),
    "dropout": Case(policy=lambda: Policy(dropout=0.3)),
    "out of memory at once": Case(failing(OOM, after=1), named=None, says="out of memory"),
    "out of memory in the middle": Case(failing(OOM, after=4), says="out of memory"),
    "an error in the middle": Case(failing(ZeroDivisionError("mine"), after=4), says="mine"),
    "a batch that is gone": Case(consuming, named=None, says="StopIteration"),
    "not a number": Case(weights=planted() * torch.where(planted() > 1, torch.nan, 1.0), steps=1),
    "double precision": Case(policy=lambda: Policy().double()),
}  # fmt: skip


def weighted(logp, weights):
    if isinstance(logp, torch.Tensor) and not logp.is_nested:
        return (logp * weights).sum()
    rows = logp.unbind() if isinstance(logp, torch.Tensor) else logp
    return sum((row * w[: len(row)]).sum() for row, w in zip(rows, weights, strict=True))


def trained(case, watched):
    """What two steps leave behind, and the run of the watched loop."""
    torch.manual_seed(2)
    policy, run = case.policy(), FakeRun()
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    watcher = rlwatch.Watcher(policy, optimizer, run=run, localise=EVERY_STEP, strict=case.strict) if watched else None
    call = watcher.forward if watched else lambda compute, *args: compute(*args)
    torch.manual_seed(3)
    weights = planted() if case.weights is None else case.weights
    mask = torch.ones(ROWS, LENGTH) if case.mask is None else case.mask
    for step in (1, 2):
        ids = copy.deepcopy(case.ids)
        optimizer.zero_grad()
        logp = case.forward(call, policy, ids)
        if watched:
            watcher.observe(logp=logp, **({"mask": mask} if case.pad else {}))
        (weighted(logp, weights) + case.more(policy)).backward()
        if watched:
            watcher.gradients()
        optimizer.step()
        if watched:
            watcher.step(step)
    moments = [torch.as_tensor(v) for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
    return [*policy.parameters(), *moments, torch.get_rng_state()], run


@pytest.mark.parametrize("kind", CASES)
def test_the_right_token_or_a_reason(kind):
    """The planted one leads the culprits of both steps; where it does not, or not surely, the report says why."""
    case = CASES[kind]
    _, run = trained(case, watched=True)
    events = [event.body for event in run.events if event.kind == "gradient_localised"]
    batches = [batch for batch in run.spikes if batch.reason == CULPRITS]

    assert len(events) == 2
    for body in events:
        told = [body["why_not"], *body["notes"], *([] if body["complete"] else [f"incomplete, gap {body['gap']}"])]
        assert case.says in "; ".join(told)
        if not case.says and body["method"] != "trace":
            assert body["complete"], body
    for number in range(case.steps) if case.named else ():
        first = {name: batches[number].columns[name][0] for name in ("sequence", "position")}
        assert (first["sequence"], first["position"]) == case.named
    assert "errors" not in run.counters.snapshot()


@pytest.mark.parametrize("kind", [kind for kind in CASES if "noise" not in kind])
def test_training_does_not_notice(kind):
    """Parameters, moments and random state after two steps, bit for bit."""
    case = CASES[kind]
    watched, alone = trained(case, watched=True)[0], trained(case, watched=False)[0]

    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(watched, alone, strict=True))
