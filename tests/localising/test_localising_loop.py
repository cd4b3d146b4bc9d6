"""Spikes of the gradient in a loop of one's own: ``forward`` keeps the passes, ``gradients`` looks."""

import copy
import math

import pytest
import torch
from tiny_loop import FakeRun, Rollouts, fresh_policy, generate, logp_of, loss_of, micro_batches
from torch.utils._python_dispatch import TorchDispatchMode

import rlwatch
from rlwatch.clipping import SkipOnSpike
from rlwatch.error_boundary import LIMIT
from rlwatch.errors import ConfigError
from rlwatch.integrations import localising as localiser_module
from rlwatch.integrations.localising import Localise
from rlwatch.records import CULPRITS

EVERY_STEP = Localise(threshold=1e-12, share=0.99)


def watched(policy, optimizer, run, **kwargs):
    return rlwatch.Watcher(policy, optimizer, run=run, **{"localise": EVERY_STEP, "strict": True, **kwargs})


def planted(rollouts, place, size):
    old = rollouts.old_logp.clone()
    old[place] -= math.log(size)
    advantages = rollouts.advantages.clone()
    advantages[place[0]] = -1.0
    return Rollouts(**{**vars(rollouts), "old_logp": old, "advantages": advantages})


def train(make=None, *, steps=4, accumulate=2, plant=None, scaler=None, unscale=False, forward=None):
    """What training leaves behind; ``plant`` (step, place, size)."""
    policy = fresh_policy()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    torch.manual_seed(1)
    watcher = None if make is None else make(policy, optimizer)
    run_forward = forward or (logp_of if watcher is None else lambda *args: watcher.forward(logp_of, *args))
    for step in range(1, steps + 1):
        rollouts = generate(policy, reference)
        if plant is not None and plant[0] == step:
            rollouts = planted(rollouts, *plant[1:])
        optimizer.zero_grad()
        for part in micro_batches(rollouts, accumulate):
            logp, logits = run_forward(policy, part.ids)
            if watcher is not None:
                watcher.observe(
                    logp=logp, logits=logits, ids=part.responses, mask=part.mask, advantages=part.advantages,
                    old_logp=part.old_logp, ref_logp=part.ref_logp,
                )  # fmt: skip
            loss = loss_of(logp, part) / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if watcher is not None:
            watcher.gradients()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if watcher is not None:
            watcher.step(step, loss=loss.detach())
    if watcher is not None:
        watcher.finish()
    moments = [torch.as_tensor(v) for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
    return [*policy.parameters(), *moments, torch.get_rng_state()]


def localised(run):
    return [event for event in run.events if event.kind == "gradient_localised"]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_step_is_attributed_completely_and_training_does_not_notice():
    """With dropout and two micro-batches: the forward of each runs again with the random numbers it had."""
    run = FakeRun()
    left = train(lambda p, o: watched(p, o, run))

    assert same(train(), left)
    assert [event.step for event in localised(run)] == [1, 2, 3, 4]
    assert all(event.body["complete"] and abs(event.body["gap"]) <= 1e-3 for event in localised(run))
    assert run.counters.snapshot() == {}


def test_the_planted_token_is_the_worst_culprit():
    """In the second micro-batch, at the place it was planted at."""
    run = FakeRun()
    train(lambda p, o: watched(p, o, run), plant=(3, (11, 0), 400.0))
    batch = next(b for b in run.spikes if b.reason == CULPRITS and b.step == 3)

    assert (batch.columns["sequence"][0], batch.columns["microbatch"][0], batch.columns["position"][0]) == (11, 1, 0)
    assert batch.columns["cause"][0] == "token ratio"
    assert batch.columns["ratio"][0] > 100


@pytest.fixture(scope="module")
def plain():
    """The run without a loss scale."""
    run = FakeRun()
    train(lambda p, o: watched(p, o, run))
    return run


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled gradients", "unscaled gradients"])
def test_a_loss_scale_does_not_show(plain, unscale):
    """Coefficients carry it, gradients perhaps no longer: the contributions sum up to the norm all the same."""
    run = FakeRun()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(lambda p, o: watched(p, o, run, scaler=scaler), scaler=scaler, unscale=unscale)

    for event, expected in zip(localised(run), localised(plain), strict=True):
        assert event.body["complete"], event.body
        assert event.body["norm"] == pytest.approx(expected.body["norm"], rel=1e-3)


class Reads(TorchDispatchMode):
    """Counts copies and reads that wait for a device."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func.overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_no_spike_is_not_looked_at():
    """Then nothing is read but the norm, in one copy."""
    counts = []
    for make in (None, lambda p, o: watched(p, o, FakeRun(), localise=True)):
        with Reads() as reads:
            train(make)
        counts.append(reads.seen)

    assert counts[0] == counts[1]


def test_a_loop_without_forward_is_not_localised():
    """What was not kept cannot be run again, and is no mistake."""
    run = FakeRun()
    left = train(lambda p, o: watched(p, o, run), forward=logp_of)

    assert same(train(), left)
    assert localised(run) == []


def test_log_probs_that_forward_did_not_return_are_refused(caplog):
    """Their gradient would be another one: a warning says so, and the step is not localised."""
    run = FakeRun()
    watcher = rlwatch.Watcher(fresh_policy(), run=run, localise=EVERY_STEP)
    with_gradient = torch.zeros(2, 3, requires_grad=True) - 1.0
    watcher.forward(lambda: with_gradient)
    watcher.observe(logp=with_gradient * 1.0, mask=torch.ones(2, 3))
    watcher.gradients()

    assert run.counters.snapshot() == {"refused": 1}
    assert "not what forward() returned" in caplog.text
    assert localised(run) == []


def test_what_the_forward_raises_passes():
    """It is the loop's own function."""
    watcher = rlwatch.Watcher(fresh_policy(), run=FakeRun())

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watcher.forward(broken)


def test_a_localisation_that_fails_is_counted_and_given_up(monkeypatch):
    """Three times; training goes on, bit for bit."""
    run = FakeRun()

    def explode(*args, **kwargs):
        raise RuntimeError("boom")

    monkeypatch.setattr(localiser_module, "locate", explode)
    left = train(lambda p, o: watched(p, o, run), steps=5)

    assert same(train(steps=5), left)
    assert run.counters["errors"] == LIMIT


def test_a_step_with_a_culprit_is_left_out_if_that_is_wanted():
    """Weights, moments and counts stay as they were before it; the run says why; all other steps are taken."""
    skip = Localise(threshold=1e-12, share=0.99, skip=SkipOnSpike(share=0.8))
    run, place = FakeRun(), (11, 0)
    skipped = train(lambda p, o: watched(p, o, run, localise=skip), steps=3, plant=(3, place, 4e4))
    before = train(steps=2)
    events = [event for event in run.events if event.kind == "step_skipped"]

    assert [event.step for event in events] == [3]
    assert "one token holds" in events[0].body["reason"]
    assert same(skipped[:-1], before[:-1])


def test_a_budget_that_is_spent_is_kept():
    """Refusals are counted, and say so; the first localisation is always granted."""
    run = FakeRun()
    train(lambda p, o: watched(p, o, run, localise=Localise(threshold=1e-12, share=1e-9, allowance_s=1e-9)), steps=4)

    assert [event.step for event in localised(run) if not event.body["why_not"]] == [1]
    assert ["budget" in event.body["why_not"] for event in localised(run)] == [False, True, True, True]
    assert run.counters["localisations_refused"] == 3


def test_a_step_without_a_signal_says_so():
    """All advantages zero, no KL: there is no gradient to localise."""
    run = FakeRun()
    policy = fresh_policy()
    watcher = watched(policy, None, run)
    rollouts = generate(policy, policy)
    logp, _ = watcher.forward(logp_of, policy, rollouts.ids)
    watcher.observe(logp=logp, mask=rollouts.mask)
    (logp * 0).sum().backward()
    watcher.gradients()

    assert localised(run) == []


@pytest.mark.parametrize("wish", ["yes", 1, Localise], ids=str)
def test_a_wish_that_is_none_is_refused_at_set_up(wish):
    """With what it should be."""
    with pytest.raises(ConfigError, match="True, False or Localise"):
        rlwatch.Watcher(run=FakeRun(), localise=wish)
