"""A policy that wanders from its first rows by steps too small to see, and the moves that are none."""

import math
import random

import pytest
from exact_runs import alarms, exact, when, worst
from shaped_runs import coarse

from rlwatch.detectors.drift import SlowDrift
from rlwatch.detectors.trust_region.kl_reference import KLReference
from rlwatch.testing.small_batches import small_run

GONE = {
    "policy/kl_ref": (0.007, 2.0),
    "policy/entropy": (0.4, 1.2),
    "len/mean": (200.0, 600.0),
    "len/clipped": (0.05, 0.6),
    "optim/grad_norm": (0.3, 6.0),
    "ratio/clipfrac": (0.01, 0.2),
    "mismatch/logp_absdiff": (0.01, 0.08),
}
"""Where each begins, and where it ends 60 steps later."""


def drifting(*names, reward=lambda s: 0.4, seed=0, start=20, end=80, jitter=0.15, length=120):
    """The metrics drift geometrically from ``start`` to ``end``; the others stay where they are."""
    noise = random.Random(seed)

    def curve(name):
        before, after = GONE[name]

        def at(step):
            share = min(max((step - start) / (end - start), 0.0), 1.0) if name in names else 0.0
            return before * (after / before) ** share * math.exp(noise.gauss(0.0, jitter))

        return at

    curves = {name: curve(name) for name in GONE} | {"reward/mean": lambda s: reward(s) + noise.gauss(0.0, 0.03)}
    return exact(curves, length=length)


@pytest.mark.parametrize(
    "names",
    [
        ("policy/kl_ref", "policy/entropy", "len/mean"),
        ("policy/entropy", "len/clipped"),
        ("optim/grad_norm", "ratio/clipfrac"),
        ("mismatch/logp_absdiff", "policy/kl_ref"),
    ],
)
@pytest.mark.parametrize("every", [1, 5, 10])
def test_two_families_that_drift_while_the_reward_stands_are_told_on_their_way(names, every):
    """A warning before they have arrived, critical soon after; the onset is on the way."""
    begins = 20 if every == 1 else 8 * every
    ends = begins + 60
    run = drifting(*names, start=begins, end=ends, length=ends + 80)
    found = alarms(SlowDrift(), coarse(run, every))
    first = found.get("warning", found["critical"])  # two coarse rows are many steps already

    assert begins < first.step <= ends + 2 * every
    assert begins < first.onset_step <= ends
    assert first.step <= found["critical"].step <= ends + 10 + 4 * every
    assert any(name in found["critical"].message for name in names)


@pytest.mark.parametrize("name", GONE)
def test_one_family_by_itself_is_no_drift(name):
    """Others judge it by its own limits."""
    assert worst(SlowDrift(), drifting(name)) is None


def test_the_drift_begins_when_the_second_family_has_left_and_the_reward_no_longer_pays():
    """KL is far out by step 60 and the reward rises with it; at 130 the reward falls and the answers run on."""
    gone = {"policy/kl_ref": (20, 60), "len/clipped": (130, 140)}

    def reward(step):
        return 0.3 + 0.5 * min(step / 60, 1.0) if step < 130 else 0.2

    def curve(name):
        before, after = GONE[name]
        start, end = gone[name]
        return lambda s: before * (after / before) ** min(max((s - start) / (end - start), 0.0), 1.0)

    noise = random.Random(3)
    rows = exact(
        {n: curve(n) for n in gone} | {"reward/mean": lambda s: reward(s) + noise.gauss(0.0, 0.02)}, length=200
    )

    assert 128 <= alarms(SlowDrift(), rows)["critical"].onset_step <= 145


def test_what_the_reward_pays_for_is_no_drift():
    """It rises with them; and where it is full, nothing says that they cost."""
    rising = drifting(*GONE, reward=lambda s: 0.3 + 0.4 * min(max(s - 15, 0) / 60, 1.0))
    full = drifting(*GONE, reward=lambda s: 0.97)

    assert worst(SlowDrift(), rising) is None
    assert worst(SlowDrift(), full) == "warning"


def test_a_reward_that_nobody_logs_leaves_it_a_warning():
    """It may pay."""
    rows = exact({name: lambda s, n=name: GONE[n][0 if s < 40 else 1] for name in GONE}, length=80)

    assert worst(SlowDrift(), rows) == "warning"


@pytest.mark.parametrize("every", [1, 5])
def test_sound_runs_of_small_batches_do_not_drift(every):
    """Eight answers a step, data of changing difficulty."""
    assert [seed for seed in range(6) if worst(SlowDrift(), small_run(seed, every=every).rows) is not None] == []


def test_kl_is_told_while_the_reward_stands_however_slowly_it_grew():
    """To three nats in 400 steps, a doubling in 50: its own past is like it, its first rows are not."""
    rows = exact(
        {"policy/kl_ref": lambda s: 0.01 * 1.014**s, "reward/mean": lambda s: 0.4 + 0.02 * (s % 3)}, length=420
    )
    paid = exact({"policy/kl_ref": lambda s: 0.01 * 1.014**s, "reward/mean": lambda s: 0.3 + 0.001 * s}, length=380)

    assert 300 <= when(KLReference(), rows, "kl_drift")["warning"] <= 350
    assert "warning" not in when(KLReference(), paid, "kl_drift")
