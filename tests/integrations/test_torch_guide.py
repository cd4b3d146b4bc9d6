"""The guide to a loop of one's own says what the code does."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from tiny_loop import CLIP, FakeRun, fresh_policy, train

import rlwatch
from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.integrations.level import Level

pytestmark = pytest.mark.torch
GUIDE = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
METHODS = (
    "rollouts",
    "forward",
    "observe",
    "step",
    "gradients",
    "obey",
    "saved",
    "resumed",
    "state_dict",
    "load_state_dict",
    "verifier",
    "tool",
    "stage",
)


def parameters(function):
    return set(inspect.signature(function).parameters) - {"self", "scalars", "init_arguments"}


def rows_of(title):
    """The cells of the table under a heading."""
    part = GUIDE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("|")][2:]


def test_every_argument_in_the_guide_is_one():
    """Of the method its row names, or of Watcher."""
    known = set().union(*(parameters(getattr(rlwatch.Watcher, name)) for name in METHODS), parameters(rlwatch.Watcher))
    said = {name for cell, _ in rows_of("What each argument provides") for name in re.findall(r"(\w+)=", cell)}

    assert said - known == set()


@pytest.mark.parametrize("method", ["rollouts", "observe"])
def test_every_argument_of_the_looking_methods_is_in_the_guide(method):
    """What a loop can pass buys something, and the table says what."""
    cells = " ".join(cell for cell, _ in rows_of("What each argument provides"))

    assert {name for name in parameters(getattr(rlwatch.Watcher, method)) if f"{name}=" not in cells} <= {
        "right",
        "retention",
    }


def test_every_command_is_in_the_guide():
    """With what it needs."""
    said = {name for cell, *_ in rows_of("Commands") for name in re.findall(r"`([a-z-]+)`", cell)}

    assert said == set(COMMAND_KINDS)


def test_every_level_is_in_the_guide():
    """By its word."""
    assert all(f'"{level}"' in GUIDE for level in Level)


def test_the_methods_in_the_guide_are_there():
    """As it calls them."""
    called = set(re.findall(r"watcher\.(\w+)", GUIDE))

    assert called <= {*METHODS, "should_stop", "synced", "unavailable", "verifier"}
    assert all(hasattr(rlwatch.Watcher, name) for name in called)


def test_packed_sequences_are_read_as_the_guide_says():
    """Offsets and the longest row, as varlen attention has them."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run)
    offsets = torch.tensor([0, 3, 4])
    logp = torch.nested.nested_tensor_from_jagged(torch.tensor([-1.0, -2.0, -3.0, -4.0]), offsets=offsets, max_seqlen=3)
    watcher.observe(logp=logp)
    watcher.step(1)

    assert run.steps[1]["policy/logp_mean"] == -2.5
    assert run.counters.snapshot() == {}


def test_the_norm_alone_is_recorded_where_the_gradients_are_not_read():
    """As clip_grad_norm_ returned it."""
    run, policy = FakeRun(), fresh_policy()
    watcher = rlwatch.Watcher(policy, run=run)
    policy(torch.ones(1, 2, dtype=torch.int64)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    watcher.step(1, grad_norm=norm)

    assert run.steps[1]["optim/grad_norm"] == pytest.approx(norm.item())
    assert watcher.unavailable["grad_layer/"] == "never given: gradients()"


def test_without_a_watcher_the_same_loop_trains_the_same():
    """The lines can be taken out again."""
    watched = train(lambda p, o, r: rlwatch.Watcher(p, o, ref_model=r, clip=CLIP, run=FakeRun()), steps=1)
    bare = train(None, steps=1)

    assert all(torch.equal(a, b) for a, b in zip(watched.policy.parameters(), bare.policy.parameters(), strict=True))
