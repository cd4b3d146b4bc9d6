"""What the rewards and answers of a group say, against counting them one by one."""

import itertools
import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch.tensors.groups import PASS_AT, Grouping, agreement, all_among, answer_stats, consecutive, reward_stats
from rlwatch.tensors.mergeable import merge

pytestmark = pytest.mark.torch
NAN = math.nan


def read(stats):
    """What would be recorded: values of what is measured."""
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def of(rewards, groups, *, scored=None, right=None):
    """Statistics of lists; ``groups`` ids or a size."""
    r = torch.tensor(rewards, dtype=torch.float32)
    ids = consecutive(len(r), groups) if isinstance(groups, int) else torch.tensor(groups)
    there = torch.ones_like(r, dtype=torch.bool) if scored is None else torch.tensor(scored)
    return reward_stats(r, ids, there, None if right is None else torch.tensor(right))


def members(values, ids):
    """The values of each group."""
    return [[v for v, i in zip(values, ids, strict=True) if i == one] for one in dict.fromkeys(ids)]


def test_groups_split_into_too_easy_too_hard_other_and_those_that_teach():
    """Fractions are of samples, numbers of groups."""
    got = read(of([1, 1, 0, 0, 0.5, 0.5, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4]))

    assert got["reward/zero_std_frac"] == pytest.approx(10 / 12)
    assert got["reward/zero_std_right_frac"] == pytest.approx(6 / 12)
    assert got["reward/zero_std_wrong_frac"] == pytest.approx(2 / 12)
    assert got["reward/zero_std_other_frac"] == pytest.approx(2 / 12)
    assert (got["reward/groups_right"], got["reward/groups_wrong"], got["reward/effective_groups"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], True),  # not equal as floats
        ([100.0, 100.00001], True),
        ([0.5, 0.5 + 1e-6], False),
        ([0.0, 1e-7], False),
        ([0.0, 0.9e-8], True),
        ([-1.0, 1.0], False),
    ],
)
def test_rewards_that_differ_by_their_rounding_are_equal(rewards, flat):
    """A millionth of their size, or 1e-8: a trainer that compares a deviation with 0 would miss such groups."""
    assert read(of(rewards, 2))["reward/zero_std_frac"] == flat


def test_a_deviation_of_equal_rewards_is_not_always_zero():
    """TRL's own test of its own deviation misses a group of equal rewards whose float32 mean is none of them."""
    utils = pytest.importorskip("trl.trainer.utils")
    rewards = torch.tensor([[0.7] * 7, [0.1] * 7])  # neither mean is exact
    std = utils.nanstd(rewards, dim=1)

    missed = ~torch.isclose(std, torch.zeros_like(std))

    assert missed.any()
    assert read(of(rewards.flatten().tolist(), 7))["reward/zero_std_frac"] == 1.0


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=6))
def test_the_deviation_within_groups_is_trls(groups):
    """Sample deviation of each group; mean over samples."""
    utils = pytest.importorskip("trl.trainer.utils")
    rewards = torch.tensor(groups)

    got = read(of(rewards.flatten().tolist(), 4))["reward/group_std"]

    assert got == pytest.approx(utils.nanstd(rewards, dim=1).mean().item(), rel=1e-4, abs=1e-6)


def test_the_deviation_within_groups_is_the_same_whatever_their_order():
    """To the bit: some trainers give groups random ids, and two runs of one seed are to be equal."""
    order = random.Random(0)

    def deviation(rewards, groups):
        return read(of(rewards, [group for group in groups for _ in range(4)]))["reward/group_std"]

    for seed in range(8):
        rewards = torch.rand(7, 4, generator=torch.Generator().manual_seed(seed)).flatten().tolist()
        assert deviation(rewards, range(7)) == deviation(rewards, order.sample(range(7), 7))


@pytest.mark.parametrize(
    ("rewards", "scored", "measured"),
    [
        ([1.0, NAN], None, False),  # a broken reward: nothing can be said
        ([1.0, math.inf], None, False),
        ([-math.inf, -math.inf], None, False),
        ([1.0, NAN], [True, False], False),  # one member left
        ([1.0], None, False),
        ([1.0, 1.0, NAN], [True, True, False], True),
        ([], None, False),
    ],
)
def test_groups_of_which_too_little_is_known_are_not_measured(rewards, scored, measured):
    """Neither flat nor effective, and no deviation of one."""
    got = read(of(rewards, [7] * len(rewards), scored=scored))

    assert ("reward/zero_std_frac" in got) == measured
    assert ("reward/group_std" in got) == measured
    assert ("reward/effective_groups" in got) == measured


def test_a_broken_group_leaves_the_others_measured():
    """And is in no count of theirs."""
    got = read(of([1, 1, NAN, 0, 0, 1], 2))

    assert got["reward/zero_std_frac"] == 0.5
    assert got["reward/effective_groups"] == 1
    assert got["reward/group_std"] == pytest.approx(math.sqrt(0.5) / 2)


ragged = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, -1.0])), min_size=1, max_size=16)


@settings(deadline=None)
@given(ragged, st.sampled_from(PASS_AT))
def test_pass_at_k_is_the_chance_over_all_draws(pairs, k):
    """Against drawing every combination of k responses of every group that has k."""
    ids, rewards = zip(*pairs, strict=True)
    large = [group for group in members(rewards, ids) if len(group) >= k]
    draws = [list(itertools.combinations(group, k)) for group in large]

    got = read(of(list(rewards), list(ids)))

    assert (f"reward/pass_at_{k}" in got) == bool(large)
    for name, test in ((f"reward/pass_at_{k}", any), (f"reward/all_correct_at_{k}", all)):
        if draws and name in got:
            chances = [statistics.fmean(test(r == 1 for r in draw) for draw in each) for each in draws]
            assert got[name] == pytest.approx(statistics.fmean(chances), abs=1e-5)


@pytest.mark.parametrize(("n", "c", "k"), [(64, 1, 64), (64, 63, 2), (1000, 3, 64), (5, 0, 1), (8, 8, 8)])
def test_chances_of_large_groups_are_exact(n, c, k):
    """Where factorials would overflow."""
    got = all_among(torch.tensor([float(c)]), torch.tensor([float(n)]), (k,)).item()

    assert got == pytest.approx(math.comb(c, k) / math.comb(n, k), rel=1e-4)


@pytest.mark.parametrize("rewards", [[0.0, 0.5], [2.0, 1.0], [NAN, 1.0], [0.999, 0.0]])
def test_without_right_and_wrong_there_is_no_pass_at_k(rewards):
    """One reward of the step that is neither is enough: the other groups would be a choice of easy and hard ones."""
    got = read(of([*rewards, 1.0, 0.0], 2))

    assert not any("_at_" in name for name in got)


def test_of_a_trainer_that_judges_apart_from_the_reward_its_judgement_counts():
    """Then rewards may be anything."""
    got = read(of([0.7, 0.7, -0.3, 0.9], 2, right=[True, True, False, True]))

    assert got["reward/pass_at_1"] == 0.75
    assert got["reward/pass_at_2"] == 1.0
    assert got["reward/all_correct_at_2"] == 0.5
    assert got["reward/zero_std_right_frac"] == 0.5


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=20))
def test_answers_are_counted_within_their_group(pairs):
    """Against sets and counts of Python; a negative code is no answer."""
    ids, answers = zip(*pairs, strict=True)
    given_ = [[a for a in group if a >= 0] for group in members(answers, ids)]
    some = [group for group in given_ if len(group) > 1]

    got = read(answer_stats(torch.tensor(answers), torch.tensor(ids)))

    shares = [[group.count(a) / len(group) for a in set(group)] for group in some]
    expected = {
        "reward/unique_answers": [len(set(group)) / len(group) for group in some],
        "reward/majority_share": [max(share) for share in shares],
        "reward/answer_entropy": [-sum(p * math.log(p) for p in share) for share in shares],
    }
    assert set(got) == (set(expected) if some else set())
    for name, value in got.items():
        assert value == pytest.approx(statistics.fmean(expected[name]), abs=1e-5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=5)), min_size=1, max_size=8))
def test_agreement_is_that_of_all_pairs(rows):
    """Against comparing each pair at each position both have."""
    ids = torch.tensor([row + [9] * (5 - len(row)) for _, row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (5 - len(row)) for _, row in rows])
    groups = [group for group, _ in rows]
    pairs = [pair for group in members([row for _, row in rows], groups) for pair in itertools.combinations(group, 2)]
    cells = [one == other for first, second in pairs for one, other in zip(first, second, strict=False)]

    stat = agreement(ids, mask, torch.tensor(groups)).settle()

    assert stat.count == len(cells)
    assert stat.kept == sum(cells)


def test_agreement_is_of_the_beginning():
    """64 positions; what comes later is not compared."""
    ids = torch.zeros(2, 100, dtype=torch.int64)
    ids[1, 64:] = 1
    ids[1, :16] = 1

    assert agreement(ids, torch.ones_like(ids), torch.tensor([3, 3])).value() == 0.75


cut = st.lists(st.integers(0, 12), max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.5, NAN])), min_size=1, max_size=12), cut)
def test_a_group_may_be_spread_over_batches_and_ranks(pairs, cuts):
    """However responses are dealt out, merging says the same as one batch."""
    ids, rewards = (list(column) for column in zip(*pairs, strict=True))
    places = sorted({0, len(pairs), *(min(c, len(pairs)) for c in cuts)})
    parts = [of(rewards[a:b], ids[a:b]) for a, b in itertools.pairwise(places)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)

    assert read(merged) == pytest.approx(read(of(rewards, ids)), rel=1e-5, abs=1e-6)


def test_whole_groups_of_two_batches_stay_apart_and_need_not_be_kept():
    """Counted within a batch their ids are the same; reduced at once, they merge to the same as those kept."""
    parts = [of([1.0, 1.0, 0.0, 1.0], 2), of([0.0, 0.0], 2)]
    together = of([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], 2)
    reduced = [{name: stat.reduce() for name, stat in part.items()} for part in parts]

    assert read(merge(*parts)) == pytest.approx(read(together))
    assert read(merge(*reduced)) == pytest.approx(read(together))


def test_one_unknown_reward_in_any_batch_takes_pass_at_k_from_all():
    """Also where batches were reduced before they merged."""
    parts = [{name: stat.reduce() for name, stat in of(r, 2).items()} for r in ([1.0, 0.0], [0.5, 0.0], [1.0, 1.0])]

    merged = merge(merge(*parts[:2]), parts[2])

    assert "reward/pass_at_1" in read(parts[0])
    assert "reward/pass_at_1" not in read(merged)
    assert read(merged)["reward/zero_std_frac"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("n", "size"), [(5, 2), (3, 0), (4, -1), (1, 2)])
def test_groups_must_divide_the_batch(n, size):
    """The message names both numbers."""
    with pytest.raises(ValueError, match=f"{n} responses do not divide into groups of {size}"):
        consecutive(n, size)


@settings(deadline=None)
@given(st.lists(st.integers(-(2**52), 2**52), max_size=20))
def test_labels_are_equal_within_a_group_only(ids):
    """Whatever the ids are."""
    labels = Grouping.of(torch.tensor(ids, dtype=torch.int64)).labels.tolist()

    for one, other in itertools.combinations(range(len(ids)), 2):
        assert (labels[one] == labels[other]) == (ids[one] == ids[other])
    assert all(0 <= label < len(ids) for label in labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_rewards_of_any_type_are_read(dtype):
    """Half precision is widened, not rounded again."""
    rewards = torch.tensor([1, 1, 0, 1], dtype=dtype)

    got = read(reward_stats(rewards, consecutive(4, 2), torch.ones(4), None))

    assert got["reward/zero_std_right_frac"] == 0.5
    assert got["reward/pass_at_1"] == 0.75


def test_a_trainer_may_write_over_what_it_gave():
    """What is kept until the step ends is ours; and the next step, of the same tensors, is read anew."""
    rewards, ids, scored = torch.tensor([1.0, 1.0]), torch.tensor([5, 5]), torch.ones(2, dtype=torch.bool)
    first = reward_stats(rewards, ids, scored, None)

    rewards[0], ids[0], scored[:] = 0.0, 6, True
    second = reward_stats(rewards, ids, scored, None)

    assert read(first)["reward/zero_std_right_frac"] == 1.0
    assert "reward/zero_std_frac" not in read(second)
    assert read(second)["reward/pass_at_1"] == 0.5
