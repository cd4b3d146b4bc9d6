"""Watching a plain loop changes nothing, costs no wait and never raises into it."""

import copy
import logging
from collections import Counter

import pytest
import torch
from tiny_loop import CLIP, EOS, FakeRun, train
from torch.utils._python_dispatch import TorchDispatchMode

import rlwatch
from rlwatch.error_boundary import LIMIT
from rlwatch.integrations.level import Level
from rlwatch.integrations.torch import taps as collector_module

pytestmark = pytest.mark.torch
LOOPS = {
    "plain": {},
    "accumulating": {"accumulate": 3},
    "reusing rollouts": {"epochs": 2, "accumulate": 2, "steps": 4},
}


def watched(policy, optimizer, reference, **kwargs):
    given = {"ref_model": reference, "clip": CLIP, "eos": EOS, "run": FakeRun(), **kwargs}
    return rlwatch.Watcher(policy, optimizer, **given)


def left_behind(outcome):
    """Everything a checkpoint would hold, and the random state."""
    moments = outcome.optimizer.state_dict()["state"]
    return {
        **{f"policy.{name}": tensor for name, tensor in outcome.policy.state_dict().items()},
        **{f"reference.{name}": tensor for name, tensor in outcome.reference.state_dict().items()},
        **{f"{i}.{name}": value for i, entry in moments.items() for name, value in entry.items()},
        "random": outcome.random_state,
        **{f"rollouts.{i}": batch.ids for i, batch in enumerate(outcome.batches)},
    }


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("loop", LOOPS, ids=list(LOOPS))
def test_training_is_bit_identical_to_training_unwatched(loop, level):
    """Parameters, optimizer state, random state, rollouts: the same seed, with and without."""
    plain = left_behind(train(None, **LOOPS[loop]))
    seen = left_behind(train(lambda *args: watched(*args, level=level), **LOOPS[loop]))
    other = left_behind(train(None, **{**LOOPS[loop], "seed": 1}))

    assert differing(plain, seen) == []
    assert "policy.head.weight" in differing(plain, other)


def test_a_real_run_changes_nothing_either(tmp_path):
    """With its threads, its store and the text of completions."""

    def make(policy, optimizer, reference):
        return rlwatch.Watcher(policy, optimizer, ref_model=reference, store=tmp_path, completions=True)

    plain, seen = train(None, accumulate=2), train(make, accumulate=2)
    seen.watcher.finish()

    assert differing(left_behind(plain), left_behind(seen)) == []


class Waits(TorchDispatchMode):
    """Counts what makes the CPU wait for a device, and draws of random numbers."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indexed_by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"} or indexed_by_mask:
            self.seen[name] += 1
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen["random"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loop", LOOPS, ids=list(LOOPS))
def test_watching_adds_no_wait_and_no_random_number(loop):
    """Not one scalar read, data-dependent shape or draw more than unwatched."""
    counts = []
    for make in (None, watched):
        with Waits() as waits:
            train(make, **LOOPS[loop])
        counts.append(waits.seen)

    assert counts[0]["random"] > 0
    assert counts[1] == counts[0]


def test_a_default_device_of_the_loop_is_not_ours():
    """What is made on the CPU stays there: made on a device, it would be waited for."""
    run, rows = FakeRun(), torch.rand(2, 3)
    given = {"logp": [-rows[0], -rows[1, :2]], "old_logp": [-rows[0], -rows[1, :2]], "ids": [[1, 2, 3], [4, 5]]}
    with torch.device("meta"):
        watcher = rlwatch.Watcher(run=run, clip=CLIP, eos=EOS)
        watcher.rollouts(
            rewards=[1.0, None],
            groups=["a", "a"],
            lengths=[3, 2],
            tasks=["x", "y"],
            answers=["1", None],
            ids=[[1, 0], [2]],
        )
        watcher.observe(**given, advantages=[0.5, -0.5])
        watcher.step(1, loss=0.5)

    assert run.counters.snapshot() == {}
    assert {"reward/mean", "len/by_task/x", "ratio/mean", "text/repetition"} < set(run.steps[1])


def test_no_graph_and_no_gradient_is_kept():
    """What was observed can be freed: nothing of the tally requires a gradient."""
    watcher = watched(torch.nn.Linear(1, 1), None, None)
    logp = torch.randn(2, 3, requires_grad=True)
    watcher.observe(logp=logp * 1, logits=torch.randn(2, 3, 5, requires_grad=True) * 1, mask=torch.ones(2, 3))
    stats = watcher.steps.tally.stats.values()

    assert stats
    assert not any(stat.settle().value().requires_grad for stat in stats)
    assert logp.grad is None


def test_a_loop_may_write_over_what_it_passed():
    """Advantages normalised in place, buffers used again: what was observed is what it was then."""
    generator = torch.Generator().manual_seed(3)
    tokens = {name: -torch.rand(4, 5, generator=generator) for name in ("logp", "old_logp", "ref_logp", "rollout_logp")}
    tokens |= {"entropy": torch.rand(4, 5, generator=generator), "mask": torch.ones(4, 5), "advantages": torch.randn(4)}
    tokens |= {"ids": torch.randint(0, 9, (4, 5), generator=generator), "staleness": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    responses = {"rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]), "lengths": torch.tensor([5.0, 4.0, 3.0, 2.0])}
    responses |= {"groups": torch.tensor([0, 0, 1, 1]), "cut": torch.tensor([True, False, False, True])}
    responses |= {"ids": tokens["ids"].clone(), "mask": tokens["mask"].clone(), "retention": torch.zeros(4)}
    measured = []
    for overwritten in (False, True):
        run, ours, theirs = FakeRun(), copy.deepcopy(tokens), copy.deepcopy(responses)
        watcher = rlwatch.Watcher(run=run, clip=CLIP, truncation=2.0, eos=EOS)
        watcher.rollouts(**theirs)
        watcher.observe(**ours)
        for tensor in (*ours.values(), *theirs.values()) if overwritten else ():
            tensor.zero_()
        watcher.step(1)
        measured.append({name: value for name, value in run.steps[1].items() if not name.startswith("time/")})

    assert len(measured[0]) > 100
    assert measured[1] == measured[0]


def explode(*args, **kwargs):
    raise RuntimeError("boom")


@pytest.mark.parametrize("broken", ["read_gradients", "observe_responses", "BatchReader", "vocab_size_of", "nonfinite"])
def test_a_failure_of_rlwatch_neither_stops_nor_changes_training(monkeypatch, caplog, broken):
    """Counted, said once, said once more when the tap is switched off; the rest goes on."""
    plain = train(None, steps=5)
    monkeypatch.setattr(collector_module, broken, explode)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        seen = train(watched, steps=5)
    said = [record.getMessage() for record in caplog.records]
    run = seen.watcher.run

    assert differing(left_behind(plain), left_behind(seen)) == []
    assert run.counters["errors"] == LIMIT
    assert sum("RuntimeError: boom" in line for line in said) == 1
    assert sum("switched its tap" in line for line in said) == 1


@pytest.mark.parametrize("method", ["log", "event", "has_commands"])
def test_a_run_that_fails_does_not_stop_training(monkeypatch, method):
    """What the run itself raises stays with us."""
    monkeypatch.setattr(FakeRun, method, explode)
    outcome = train(watched, steps=5)

    assert len(outcome.batches) == 5
    assert outcome.watcher.run.counters["errors"] > 0


def test_a_function_of_the_loop_that_fails_is_our_problem_not_its():
    """The weight of the KL term is asked for inside the error boundary; the step is recorded without it."""
    outcome = train(lambda *args: watched(*args, kl_coef=explode), steps=2)

    assert list(outcome.watcher.run.steps) == [1, 2]
    assert "policy/kl_coef" not in outcome.watcher.run.steps[1]


def test_the_model_and_the_optimizer_are_not_touched():
    """No hook, no wrapper, no attribute: there is nothing to undo."""
    policy, optimizer = torch.nn.Linear(2, 2), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    before = (set(vars(policy)), set(vars(optimizer)), dict(optimizer.param_groups[0]))
    hooks = [
        len(store) for store in (policy._forward_hooks, policy._backward_hooks, optimizer._optimizer_step_pre_hooks)
    ]
    watcher = watched(policy, optimizer, None)
    watcher.gradients()
    watcher.step(1)
    watcher.obey()

    assert (set(vars(policy)), set(vars(optimizer)), dict(optimizer.param_groups[0])) == before
    assert hooks == [0, 0, 0]
    assert [
        len(s) for s in (policy._forward_hooks, policy._backward_hooks, optimizer._optimizer_step_pre_hooks)
    ] == hooks
