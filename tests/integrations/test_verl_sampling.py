"""Steps too large for the driver's budget: which rows are measured, what stays exact, who knows the extremes."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from rlwatch.errors import ConfigError
from rlwatch.integrations.step_tally import StepTally, encoded_tally, merge_workers
from rlwatch.integrations.verl import sampling
from rlwatch.integrations.verl.batch import BatchSettings, StepBatch
from rlwatch.integrations.verl.sampling import EveryResponse, SamplingBudget
from rlwatch.integrations.verl.settings import VerlSettings
from rlwatch.integrations.verl.taps import before_update
from rlwatch.tensors.observe import observe
from rlwatch.tensors.responses import observe_responses
from rlwatch.tensors.tokens import TokenBatch

EOS = 2
LONGEST = 12


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def queue_of(rows=40, seed=0):
    """Columns of ``rows`` responses by name, as lists of rows, and their lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (rows,), generator=g).tolist()
    ids = [torch.randint(0, 5, (n,), generator=g) for n in lengths]
    scores = [torch.cat([torch.zeros(n - 1), torch.randint(0, 2, (1,), generator=g).float()]) for n in lengths]
    columns = {"responses": ids, "rm_scores": scores, "response_mask": [torch.ones_like(x) for x in ids]}
    columns |= {"uid": [f"u{row // 4}" for row in range(rows)], "data_source": [f"t{row % 3}" for row in range(rows)]}
    return columns, lengths


def fetching(columns, seen=None):
    def fetch(keys, fields):
        if seen is not None:
            seen.append((list(keys), list(fields)))
        rows = [int(key.split("_")[1]) for key in keys]
        chosen = {name: [columns[name][row] for row in rows] for name in fields if name in columns}
        return {name: x if isinstance(x[0], str) else jagged(x) for name, x in chosen.items()}

    return fetch


def keys_of(rows):
    return [f"u{row // 4}_{row}_0" for row in range(rows)]


def metrics(stats):
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: float(stat.value()) for name, stat in settled.items() if float(stat.count) > 0}


def test_a_step_within_the_budget_is_measured_whole():
    assert SamplingBudget(1000.0).rows([sampling.LEAST // 2, sampling.LEAST // 2], 1) is None
    assert SamplingBudget(None).rows([2**24] * 64, 1) is None


def test_rows_of_a_large_step_fit_the_budget_and_every_length_is_there():
    """512 responses of up to 32k tokens: a few, from the shortest to the longest, and other ones at the next step."""
    lengths = [1024 + 62 * row for row in range(512)]
    budget = SamplingBudget(1000.0)
    first, again, next_step = budget.rows(lengths, 7), budget.rows(lengths, 7), budget.rows(lengths, 8)

    assert first == again != next_step
    assert sum(lengths[row] for row in first) <= 1.3 * budget.tokens
    mean = sum(lengths[row] for row in first) / len(first)
    assert mean == pytest.approx(sum(lengths) / len(lengths), rel=0.05)


@given(lengths=some.lists(some.integers(1, 40), min_size=20, max_size=60), step=some.integers(0, 10**6))
def test_rows_are_distinct_and_never_none_and_draw_nothing_from_training(lengths, step):
    state, torch_state = random.getstate(), torch.get_rng_state()
    rows = SamplingBudget(8 * sampling.FIRST_GUESS, least=8).rows(lengths, step)

    assert rows == sorted(set(rows))
    assert 1 <= len(rows) < len(lengths)
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_each_row_is_as_likely_as_any_other():
    lengths, budget = [5] * 40, SamplingBudget(50 * sampling.FIRST_GUESS, least=8)
    taken = [row for step in range(3000) for row in budget.rows(lengths, step)]
    share = len(taken) / 3000 / 40

    for row in range(40):
        assert taken.count(row) / 3000 == pytest.approx(share, abs=0.04)


def test_what_a_token_costs_is_learnt():
    """A machine ten times as slow measures a tenth; one slow step alone does not decide it for good."""
    budget = SamplingBudget(10_000.0)
    usual = budget.tokens
    for _ in range(8):
        budget.spent(10**6, 10 * sampling.FIRST_GUESS * 10**6)

    assert usual / 16 <= budget.tokens <= usual / 8
    for _ in range(8):
        budget.spent(10**6, sampling.FIRST_GUESS * 10**6)
    assert budget.tokens >= usual / 2


@pytest.mark.parametrize("at_once", [1, 30, 2**20])
def test_every_response_is_known_as_if_the_whole_batch_had_been_read(at_once):
    """Rewards, groups, lengths, cuts and tasks, however few rows are copied at once."""
    columns, lengths = queue_of()
    keys, tags = keys_of(40), [{"response_len": n} for n in lengths]
    reading = BatchSettings(longest=LONGEST, eos=EOS)
    whole = StepBatch.of(keys, tags, fetching(columns)(keys, list(columns)), 3)
    want = metrics(observe_responses(whole.response_batch(reading)))
    every = EveryResponse.read(keys, lengths, fetching(columns), reading, at_once=at_once)
    got = metrics(observe_responses(every.response_batch(reading)))

    assert got == {name: want[name] for name in got}
    assert {"reward/mean", "reward/zero_std_frac", "len/clipped", "len/p99", "reward/by_task/t1"} <= got.keys()


def test_a_reward_that_is_not_a_number_stays_with_its_response():
    columns, lengths = queue_of(8)
    columns["rm_scores"][3] = torch.full((lengths[3],), torch.nan)
    every = EveryResponse.read(keys_of(8), lengths, fetching(columns), BatchSettings(longest=LONGEST, eos=EOS))

    assert every.rewards.isnan().nonzero().flatten().tolist() == [3]


def test_ids_are_copied_only_of_responses_that_may_have_been_cut():
    columns, lengths = queue_of()
    seen = []
    EveryResponse.read(keys_of(40), lengths, fetching(columns, seen), BatchSettings(longest=LONGEST, eos=EOS))
    asked = [key for keys, fields in seen if "responses" in fields for key in keys]

    assert len(asked) == sum(n == LONGEST for n in lengths) < 40


def test_a_queue_without_rewards_gives_lengths_and_no_rewards():
    columns, lengths = queue_of()
    del columns["rm_scores"]
    every = EveryResponse.read(keys_of(40), lengths, fetching(columns), BatchSettings(longest=LONGEST, eos=EOS))
    got = metrics(observe_responses(every.response_batch(BatchSettings(longest=LONGEST, eos=EOS))))

    assert "len/mean" in got
    assert not [name for name in got if name.startswith("reward/")]


def tokens_of(rows, seed=1):
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(rows, 6, generator=g)
    far = torch.randn(rows, 6, generator=g)
    return TokenBatch(logp, torch.ones(rows, 6, dtype=torch.bool), rollout_logp=logp + far, ref_logp=logp - far)


def share_of(batch, *, before=True):
    """What a worker sends of ``batch``, whose policy has moved since."""
    worker = StepTally()
    update = replace(batch, logp=batch.logp + 9.0, old_logp=batch.logp)
    worker.add_stats(observe(replace(update, rollout_logp=None, ref_logp=None)))
    if before:
        worker.add_stats(before_update(update, full=True))
    return encoded_tally(worker, 1)


def test_tokens_of_a_sampled_step_are_those_of_all_workers():
    """The driver reads one row of eight; two workers saw four each, before and after their update."""
    batch = tokens_of(8)
    one, low, high = part(batch, 0, 1), part(batch, 0, 4), part(batch, 4, 8)
    driver = StepTally()
    driver.add_stats(observe(one))
    want, alone = metrics(observe(batch)), metrics(observe(one))
    shares = {0: share_of(low), 1: share_of(high)}
    got = merge_workers(1, driver, shares, sampled=True).metrics

    for name, value in want.items():
        if name not in ("nonfinite/logp", "len/mean"):
            assert got[name] == pytest.approx(value, rel=1e-5), name
    assert want["mismatch/logp_absdiff_max"] != pytest.approx(alone["mismatch/logp_absdiff_max"])
    assert got["nonfinite/old_logp"] == 0
    assert not [name for name in got if name.startswith("before")]


@pytest.mark.parametrize("sampled", [True, False])
def test_what_not_all_workers_measured_is_not_taken_for_the_whole(sampled):
    """At the first large step no worker, after a restart of one perhaps not every one, was asked to."""
    batch, driver = tokens_of(8), StepTally()
    driver.add_stats(observe(part(batch, 0, 1)))
    alone = metrics(observe(part(batch, 0, 1)))
    shares = {0: share_of(part(batch, 0, 4)), 1: share_of(part(batch, 4, 8), before=not sampled)}
    got = merge_workers(1, driver, shares, sampled=sampled).metrics

    assert got["mismatch/logp_absdiff_max"] == pytest.approx(alone["mismatch/logp_absdiff_max"])
    assert not [name for name in got if name.startswith("before")]


def part(batch, first, last):
    rows = slice(first, last)
    return TokenBatch(
        batch.logp[rows], batch.mask[rows], rollout_logp=batch.rollout_logp[rows], ref_logp=batch.ref_logp[rows]
    )


@pytest.mark.parametrize("wish", [0, -3, "much", True])
def test_a_budget_that_is_none_is_refused(wish):
    with pytest.raises(ConfigError, match=r"budget_ms is milliseconds above 0.*got"):
        VerlSettings.of({"trainer": {"rlwatch": {"budget_ms": wish}}})


def test_no_budget_is_no_limit():
    assert VerlSettings.of({"trainer": {"rlwatch": {"budget_ms": None}}}).budget_ms is None
    assert VerlSettings.of({}).budget_ms == 1000.0
