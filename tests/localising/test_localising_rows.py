"""A loop's own forward is run again for single sequences: its arguments are cut, dropout is given out by row."""

import functools
import types
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from tiny_loop import FakeRun
from torch import nn
from torch.utils.checkpoint import checkpoint

import rlwatch
from rlwatch.errors import ConfigError
from rlwatch.integrations.localising import Localise
from rlwatch.records import CULPRITS

pytestmark = pytest.mark.torch

ROWS, LENGTH, VOCABULARY, WIDE = 6, 7, 11, 8
EVERY_STEP = Localise(threshold=1e-12, share=0.99)


class Policy(nn.Module):
    """A causal mean of what came before, with dropout; counts the sequences of each forward."""

    def __init__(self, dropout=0.0, recompute=False, mixing=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(VOCABULARY, WIDE), nn.Linear(WIDE, WIDE)
        self.head, self.drop = nn.Linear(WIDE, VOCABULARY), nn.Dropout(dropout)
        self.recompute, self.mixing, self.ran = recompute, mixing, []

    def block(self, hidden):
        return self.drop(torch.tanh(self.inner(self.drop(hidden))))

    def forward(self, ids):
        self.ran.append(len(ids))
        hidden = self.drop(self.embed(ids)).cumsum(1)
        if self.mixing:
            hidden = hidden - hidden.mean(0, keepdim=True)
        hidden = checkpoint(self.block, hidden, use_reentrant=False) if self.recompute else self.block(hidden)
        return self.head(hidden)


def logp_of(policy, ids):
    return policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def step(policy, call, ids=None, *, rows=None, place=(4, 3), advantages=None):
    """One step with a planted token; returns the batch of culprits, the event, the sequences of each later forward."""
    run = FakeRun()
    watcher = rlwatch.Watcher(policy, run=run, localise=EVERY_STEP, strict=True, rows=rows)
    ids = batch_ids() if ids is None else ids
    torch.manual_seed(3)
    logp = call(watcher, policy, ids)
    weights = torch.ones(ROWS, LENGTH) if advantages is None else advantages
    weights[place] = 300.0
    watcher.observe(logp=logp, mask=torch.ones(ROWS, LENGTH), advantages=weights)
    (logp * weights).sum().backward()
    policy.ran.clear()
    before = [p.grad.clone() for p in policy.parameters()], torch.get_rng_state()
    watcher.gradients()
    assert all(torch.equal(p.grad, g) for p, g in zip(policy.parameters(), before[0], strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])
    event = next(event for event in run.events if event.kind == "gradient_localised")
    return next(b for b in run.spikes if b.reason == CULPRITS), event.body, list(policy.ran)


def batch_ids():
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))


@dataclass
class Batch:
    ids: torch.Tensor
    extra: dict


class Pair(NamedTuple):
    ids: torch.Tensor
    name: str


def of_batch(policy, batch):
    return logp_of(policy, batch.ids + batch.extra["none"])


def plain(watcher, policy, ids):
    return watcher.forward(logp_of, policy, ids)


CALLS = {
    "tensor": plain,
    "keyword": lambda w, p, ids: w.forward(logp_of, p, ids=ids),
    "mapping": lambda w, p, ids: w.forward(lambda policy, of: logp_of(policy, of["ids"]), p, {"ids": ids, "b": ROWS}),
    "data class": lambda w, p, ids: w.forward(of_batch, p, Batch(ids, {"none": torch.zeros_like(ids)})),
    "object": lambda w, p, ids: w.forward(lambda q, b: logp_of(q, b.ids), p, types.SimpleNamespace(ids=ids)),
    "named tuple": lambda w, p, ids: w.forward(lambda q, b: logp_of(q, b.ids), p, Pair(ids, "x")),
    "rows in a list": lambda w, p, ids: w.forward(lambda q, b: logp_of(q, torch.stack(b)), p, list(ids)),
    "closed over": lambda w, p, ids: w.forward(lambda: logp_of(p, ids)),
    "default": lambda w, p, ids: w.forward(lambda q, ids=ids: logp_of(q, ids), p),
    "partial": lambda w, p, ids: w.forward(functools.partial(logp_of, p, ids)),
    "nested": lambda w, p, ids: w.forward(
        lambda q, n: logp_of(q, torch.stack(list(n.unbind()))),
        p, torch.nested.as_nested_tensor(list(ids), layout=torch.jagged),
    ),
    "positions first": lambda w, p, ids: w.forward(lambda q, t: logp_of(q, t.T.contiguous()), p, ids.T.contiguous()),
    "tuple of results": lambda w, p, ids: w.forward(lambda q, x: (0.5, logp_of(q, x)), p, ids)[1],
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_only_the_sequences_of_candidates_run(kind):
    """However the loop passes them: two forwards of all for the attribution, then of one sequence at a time."""
    culprits, body, ran = step(Policy(), CALLS[kind])

    assert (culprits.columns["sequence"][0], culprits.columns["position"][0]) == (4, 3)
    assert culprits.columns["verified"][0] == 1
    assert body["notes"] == []
    assert ran[:2] == [ROWS, ROWS]
    assert set(ran[2:]) == {1}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept activations", "recomputed"])
def test_dropout_is_given_out_by_row(recompute):
    """One more forward of all shows what was drawn; own gradients are those of passes of the whole micro-batch."""
    alone, body, ran = step(Policy(0.3, recompute), plain)
    together, _, whole = step(Policy(0.3, recompute), plain, rows=lambda rows, policy, ids: (policy, ids))

    assert body["notes"] == []
    assert ran[:3] == [ROWS] * 3
    assert ran[3] == 1
    assert ran[3:].count(ROWS) <= 2, "cures are tried on all"
    assert set(whole) == {ROWS}
    own = [dict(zip(zip(*places(b), strict=True), b.columns["own_norm"], strict=True)) for b in (alone, together)]
    assert own[0] == pytest.approx(own[1], rel=1e-4)


def places(batch):
    return batch.columns["sequence"].tolist(), batch.columns["position"].tolist()


def test_a_forward_that_mixes_sequences_runs_whole():
    """Alone a sequence is another one: that is seen, said, and the answer is the right one."""
    culprits, body, ran = step(Policy(mixing=True), plain)

    assert (culprits.columns["sequence"][0], culprits.columns["position"][0]) == (4, 3)
    assert "nats from those among the others" in body["notes"][0]
    assert ran.count(1) == 1


REFUSALS = {
    "hidden": (lambda w, p, ids: w.forward(functools.partial(_Hiding(p, ids).run)), "Watcher(rows=)"),
    "counts its rows": (lambda w, p, ids: w.forward(lambda q, x: logp_of(q, x.view(ROWS, LENGTH + 1)), p, ids), "failed"),
    "falls short": (lambda w, p, ids: w.forward(lambda q, x: logp_of(q, x[:, : len(x) + 2]), p, ids), "gives"),
}  # fmt: skip


class _Hiding:
    """Keeps the batch where no argument shows it."""

    def __init__(self, policy, ids):
        self.policy, self.ids = policy, ids

    def run(self):
        return logp_of(self.policy, self.ids)


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_cut_runs_whole_and_says_why(kind):
    """With what would help; the culprit is named all the same."""
    call, says = REFUSALS[kind]
    culprits, body, _ = step(Policy(), call)

    assert (culprits.columns["sequence"][0], culprits.columns["position"][0]) == (4, 3)
    assert says in body["notes"][0]


def test_a_loop_may_say_itself_how_its_arguments_are_cut():
    """Where nothing shows: ``rows=`` is given the row numbers and the arguments."""
    asked = []

    def rows(chosen, policy, hiding):
        asked.append(chosen)
        return policy, _Hiding(policy, hiding.ids[chosen])

    culprits, body, ran = step(Policy(), lambda w, p, ids: w.forward(_run_hidden, p, _Hiding(p, ids)), rows=rows)

    assert (culprits.columns["sequence"][0], culprits.columns["position"][0]) == (4, 3)
    assert body["notes"] == []
    assert [4] in asked
    assert set(ran[2:]) == {1}


def _run_hidden(policy, hiding):
    return logp_of(policy, hiding.ids)


def test_what_is_no_function_is_refused_at_set_up():
    """Before training begins."""
    with pytest.raises(ConfigError, match="rows must be a function"):
        rlwatch.Watcher(run=FakeRun(), rows=[1])


RAGGED = {
    "list": lambda logp: [row[:5] if i == 1 else row for i, row in enumerate(logp)],
    "nested": lambda logp: torch.nested.as_nested_tensor(
        [row[:5] if i == 1 else row for i, row in enumerate(logp)], layout=torch.jagged
    ),
}


@pytest.mark.parametrize("kind", RAGGED)
def test_rows_of_unequal_length_are_localised(kind):
    """As a list or nested: the loss takes them as they are, and the contributions sum up to the norm."""
    policy, run = Policy(), FakeRun()
    watcher = rlwatch.Watcher(policy, run=run, localise=EVERY_STEP, strict=True)
    given = watcher.forward(lambda ids: RAGGED[kind](logp_of(policy, ids)), batch_ids())
    watcher.observe(logp=given)
    rows = given.unbind() if isinstance(given, torch.Tensor) else given
    sum((row * (300.0 if i == 1 else 1.0)).sum() for i, row in enumerate(rows)).backward()
    watcher.gradients()
    body = next(event for event in run.events if event.kind == "gradient_localised").body

    assert body["complete"], body
    assert {culprit["sequence"] for culprit in body["culprits"]} == {1}
    assert body["notes"] == []


# A spike is localised, or says why not.


def reasons(prepare, *, steps=12, spike=10, **settings):
    """Why the steps of a loop whose gradient is 300 times as large at ``spike`` were not localised, by step."""
    policy, run = Policy(), FakeRun()
    watcher = rlwatch.Watcher(policy, run=run, **{"localise": True, "strict": True, **settings})
    for number in range(1, steps + 1):
        policy.zero_grad()
        prepare(watcher, policy, 300.0 if number == spike else 1.0)
        watcher.gradients()
        watcher.step(number)
    return {event.step: event.body["why_not"] for event in run.events if event.kind == "gradient_localised"}


def ordinary(watcher, policy, size, *, observed=True):
    logp = watcher.forward(logp_of, policy, batch_ids())
    if observed:
        watcher.observe(logp=logp, mask=torch.ones(ROWS, LENGTH))
    (logp * size).sum().backward()


def test_a_model_in_evaluation_mode_is_localised():
    """As ``from_pretrained`` leaves it; nothing else is different."""

    def prepare(watcher, policy, size):
        policy.eval()
        ordinary(watcher, policy, size)

    assert reasons(prepare) == {10: ""}


def test_a_spike_before_the_level_is_known_says_so():
    """From the eighth step on it is localised."""
    assert "3 steps tell no level: 8 do" in reasons(ordinary, spike=4)[4]
    assert reasons(ordinary, spike=9) == {9: ""}


def test_a_spike_of_a_step_that_was_not_kept_says_so():
    """The loop calls forward, but this step's log-probs come from elsewhere, or were not observed."""

    def elsewhere(watcher, policy, size):
        if size == 1.0:
            ordinary(watcher, policy, size)
            return
        logp = logp_of(policy, batch_ids())
        watcher.observe(logp=logp, mask=torch.ones(ROWS, LENGTH))
        (logp * size).sum().backward()

    def unobserved(watcher, policy, size):
        ordinary(watcher, policy, size, observed=size == 1.0)

    assert "do not come out of Watcher.forward()" in reasons(elsewhere)[10]
    assert "no forward pass of this step was kept" in reasons(unobserved)[10]


def test_a_gradient_that_is_none_in_the_first_step_is_traced_or_says_why_not():
    """There is nothing to wait for: a NaN is a NaN."""
    assert reasons(lambda w, p, size: ordinary(w, p, float("nan") if size > 1 else 1.0), spike=1, steps=1) == {1: ""}
    assert "no forward" in reasons(lambda w, p, size: ordinary(w, p, float("nan"), observed=False), spike=1, steps=1)[1]


def test_what_the_budget_refuses_says_so():
    """The first is granted."""
    found = reasons(ordinary, localise=Localise(threshold=1e-12, share=1e-9, allowance_s=1e-9), steps=3)

    assert found[1] == ""
    assert "budget" in found[2]
    assert "budget" in found[3]
