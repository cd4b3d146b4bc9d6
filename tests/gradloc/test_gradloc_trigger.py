"""Which steps are worth localising: synthetic norms whose spikes are known, and public runs where they exist."""

import csv
import gzip
import json
import math
import random
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.gradloc.trigger import LASTING, PUBLISHED, RELEASED, Trigger
from rlwatch.metrics import resolve

PUBLIC = Path(__file__).parents[3] / "shared" / "real_runs"
TOKENS = 65_536


def healthy(length, *, seed=0, per_token=100.0, sigma=0.25, silent=0.0, varied=True):
    """(norm, tokens) of steps: noise per token, batches of one to sixteen thousand tokens, some without a signal."""
    noise = random.Random(seed)
    steps = []
    for _ in range(length):
        tokens = noise.randint(1_000, 16_000) if varied else TOKENS
        norm = per_token * math.exp(noise.gauss(0.0, sigma)) / math.sqrt(tokens)
        steps.append((1e-3 * norm if noise.random() < silent else norm, tokens))
    return steps


def fired(steps, trigger=None, start=0):
    """The steps at which it fired."""
    trigger = trigger or Trigger()
    return [step for step, (norm, tokens) in enumerate(steps, start) if trigger.check(step, norm, tokens).fires]


def with_spikes(steps, at, times):
    """The same, with norms multiplied at some steps."""
    return [(norm * times if step in at else norm, tokens) for step, (norm, tokens) in enumerate(steps)]


@pytest.mark.parametrize("sigma", [0.05, 0.25, 0.6])
def test_healthy_noise_fires_less_than_once_in_a_thousand_steps(sigma):
    """Batches vary sixteenfold in tokens, so norms vary fourfold by that alone."""
    alarms = sum(len(fired(healthy(1000, seed=seed, sigma=sigma))) for seed in range(5))

    assert alarms <= 5


@pytest.mark.parametrize(("norm", "tokens"), [(0.0, 1000), (-1.0, 1000), (1.0, 0), (0.0, 0)])
def test_a_step_without_gradient_or_tokens_neither_fires_nor_teaches(norm, tokens):
    """No group had a signal, or nothing was sampled; the threshold of one that has is known all the same."""
    trigger, plain = Trigger(), Trigger()
    for step, (usual, n) in enumerate(healthy(50)):
        decision = trigger.check(step, norm, tokens)
        assert not decision.fires
        assert trigger.check(step, usual, n) == plain.check(step, usual, n)


def test_a_sixteenfold_larger_batch_is_no_spike_nor_is_a_smaller_one():
    """What counts is the norm of a single token's gradient: neither direction fires or hides a spike."""
    tokens = [16_000] * 60 + [1_000] * 60 + [16_000] * 60
    steps = [(norm * math.sqrt(TOKENS / n), n) for (norm, _), n in zip(healthy(180, varied=False), tokens, strict=True)]

    assert fired(steps) == []
    assert fired(with_spikes(steps, {61, 121}, 8.0)) == [61, 121]


@pytest.mark.parametrize(("times", "least"), [(5.0, 0.7), (8.0, 0.95), (20.0, 1.0)])
def test_spikes_are_found_and_do_not_hide_later_ones(times, least):
    """A tenth of the steps spike, over thousands of steps: they stay out of the level."""
    at = set(range(40, 3000, 10))
    found = fired(with_spikes(healthy(3000), at, times))

    assert len(at.intersection(found)) >= least * len(at)
    assert len(set(found) - at) <= 3


def test_batches_without_a_signal_say_nothing_of_the_level():
    """Half the batches have (nearly) no gradient: the informative ones are no spikes, and spikes are still found."""
    steps = healthy(2000, silent=0.5)
    loud = [step for step, (norm, tokens) in enumerate(steps) if norm * math.sqrt(tokens) > 1.0]
    at = set(loud[30::40])

    assert len(fired(steps)) <= 2
    assert len(at.intersection(fired(with_spikes(steps, at, 20.0)))) == len(at)


def test_zero_norms_neither_fire_nor_teach():
    """All groups agree: the level stays what it was, for as long as it takes."""
    trigger = Trigger()
    fired(healthy(50), trigger)
    before = trigger.state_dict()

    assert fired([(0.0, 5_000)] * 500, trigger, start=50) == []
    assert trigger.state_dict() == before
    assert fired(healthy(50, seed=1), trigger, start=550) == []


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_always_fires(norm):
    """From the first step on, again and again, whatever the tokens, and it leaves the level alone."""
    trigger = Trigger()

    assert trigger.check(0, norm, 100).reason == "non-finite"
    assert fired([(norm, 100)] * 50, trigger, start=1) == list(range(1, 51))
    assert trigger.check(51, norm, 0).fires
    assert trigger.check(51, norm, 0).threshold is None
    assert fired(healthy(100), trigger, start=52) == []


def test_a_lasting_new_level_is_adopted():
    """Ten times the norm fires for some steps, then is the new normal, against which spikes are found again."""
    shifted = healthy(100) + healthy(200, seed=1, per_token=1000.0)
    found = fired(shifted)

    assert 0 < len(found) <= LASTING
    assert min(found) == 100
    assert fired(with_spikes(shifted, {200}, 20.0))[-1] == 200


def test_a_burst_does_not_become_the_level():
    """Eight bad steps in a row, all told; the ninth spike, later on, is told as well."""
    bursting = with_spikes(healthy(200), {*range(100, 108), 150}, 20.0)

    assert fired(bursting) == [*range(100, 108), 150]


def test_a_level_that_falls_for_good_is_followed():
    """Norms decay a hundredfold over a run: a spike is one by the level of its time."""
    decaying = [(norm * math.exp(-i / 200), n) for i, (norm, n) in enumerate(healthy(1000))]

    assert fired(with_spikes(decaying, {900}, 20.0)) == [900]


def test_slow_ramps_do_not_fire():
    """A hundredfold rise over a thousand steps is drift: other detectors speak of it."""
    rising = [(norm * math.exp(i / 200), n) for i, (norm, n) in enumerate(healthy(1000))]

    assert len(fired(rising)) <= 1


def test_nothing_fires_while_it_warms_up():
    """A spike among the first steps cannot be told from how the run is; it does not spoil the level either."""
    assert fired(with_spikes(healthy(60), {5, 30}, 20.0)) == [30]


def test_the_published_threshold_needs_no_warm_up():
    """T / sqrt(N): 2.5 at 65 536 tokens for T = 640, whatever the level is."""
    trigger = Trigger(factor=None, token_threshold=PUBLISHED)

    calm, spike = trigger.check(0, 2.4, TOKENS), trigger.check(1, 2.6, TOKENS)

    assert calm.threshold == pytest.approx(2.5)
    assert (calm.fires, calm.reason) == (False, "")
    assert (spike.fires, spike.reason) == (True, "above the fixed threshold")
    assert Trigger(token_threshold=RELEASED).check(0, 1.0, 10_000).threshold == pytest.approx(1.0)


def test_the_threshold_told_is_in_the_unit_of_the_norm():
    """Constant norms: four times the level, at any batch size; a norm above it fires, one below it does not."""
    trigger = Trigger()
    fired([(1.0, 10_000)] * 40, trigger)

    assert trigger.check(40, 1.0, 2_500).threshold == pytest.approx(4.0 * 2.0)
    assert not trigger.check(41, 3.99, 10_000).fires
    told = trigger.check(42, 4.01, 10_000)
    assert (told.fires, told.reason) == (True, "above 4 times the run's own level")
    assert told.threshold == pytest.approx(4.0)


def test_a_step_without_tokens_is_not_judged():
    """No tokens, no norm per token: not even a huge norm fires, or enters the level."""
    trigger = Trigger()
    fired(healthy(50), trigger)

    assert trigger.check(50, 1e9, 0) == trigger.check(50, 1e9, -1)
    assert not trigger.check(50, 1e9, 0).fires


def test_going_back_to_a_checkpoint_forgets_what_lay_after_it():
    """The level is as if the steps since had not been; several optimizer steps of one step are kept."""
    there_and_back, straight = Trigger(), Trigger()
    for trigger in (there_and_back, straight):
        for step, (norm, tokens) in enumerate(healthy(60)):
            trigger.check(step // 2, norm, tokens)
    fired(healthy(30, seed=2, per_token=300.0), there_and_back, start=30)

    decisions = [trigger.check(29, 1.0, 10_000) for trigger in (there_and_back, straight)]

    assert decisions[0] == decisions[1]
    assert there_and_back.state_dict()["_level"] == straight.state_dict()["_level"]


def test_a_resumed_run_decides_like_an_uninterrupted_one():
    """State goes through JSON, in the middle of a level shift."""
    steps = with_spikes(healthy(400), set(range(200, 300)), 10.0)
    whole, first, second = Trigger(), Trigger(), Trigger()
    expected = [whole.check(i, *step) for i, step in enumerate(steps)]
    head = [first.check(i, *step) for i, step in enumerate(steps[:205])]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert head + [second.check(i, *step) for i, step in enumerate(steps[205:], 205)] == expected


@settings(max_examples=60, deadline=None)
@given(
    norms=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), max_size=80),
    tokens=st.lists(st.integers(0, 10**9), min_size=80, max_size=80),
    step=st.lists(st.integers(0, 50), min_size=80, max_size=80),
)
def test_no_numbers_make_it_raise_and_what_fires_is_above_what_it_names(norms, tokens, step):
    """Subnormal, huge, negative: a decision each time; the same on another rank; bounded memory."""
    here, there = Trigger(warm_up=3, token_threshold=1e6), Trigger(warm_up=3, token_threshold=1e6)
    for norm, n, at in zip(norms, tokens, step, strict=False):
        decision = here.check(at, norm, n)
        assert decision == there.check(at, norm, n)
        if decision.fires and math.isfinite(norm):
            assert decision.threshold is not None
            assert norm >= decision.threshold * (1.0 - 1e-9)
            assert decision.reason
    assert len(json.dumps(here.state_dict())) < 10_000


def public_norms():
    """severity -> one list of gradient norms by step per public run."""
    with (PUBLIC / "index.csv").open() as file:
        severity = {info["run_id"]: info["severity"] for info in csv.DictReader(file)}
    norms = defaultdict(dict)
    with gzip.open(PUBLIC / "runs.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            reading = resolve(row["metric"]) if row["value"] and "grad_norm" in row["metric"] else None
            if reading is not None and reading.metric.name == "optim/grad_norm":
                norms[row["run_id"]][int(float(row["step"]))] = float(row["value"])
    found = defaultdict(list)
    for run, series in norms.items():
        found[severity[run]].append([series[step] for step in sorted(series)])
    return found


def test_healthy_public_runs_when_present_fire_rarely():
    """Below 0.5 % of the steps of those labelled healthy: their real spikes, for the greater part."""
    if not PUBLIC.is_dir():
        pytest.skip(f"the public runs are not here ({PUBLIC})")
    runs = public_norms()["healthy"]

    alarms = sum(len(fired([(norm, TOKENS) for norm in run])) for run in runs)

    assert len(runs) >= 20
    assert 0 < alarms < 0.005 * sum(map(len, runs))
