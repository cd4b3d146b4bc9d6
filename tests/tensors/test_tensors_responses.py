"""One generation batch in, canonical statistics out."""

import itertools
import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import CountWaits

from rlwatch.integrations.step_tally import StepTally
from rlwatch.metrics import BY_NAME, metric_of
from rlwatch.tensors.groups import Grouped
from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.responses import (
    CODE_BITS,
    LONGEST_TASK_NAME,
    OTHER_TASKS,
    UNNAMED_TASK,
    ResponseBatch,
    TaskNames,
    by_task,
    codes_of,
    observe_responses,
)
from rlwatch.tensors.transfer import Transfer, pack, unpack

pytestmark = pytest.mark.torch


def read(stats):
    """What would be recorded."""
    settled = {name: stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def everything(n=8, **changed):
    """Arguments of a batch that measures all there is."""
    columns = {
        "rewards": [float(i % 3 == 0) for i in range(n)],
        "groups": [i // 2 for i in range(n)],
        "answers": [str(i % 3) for i in range(n)],
        "lengths": [10 * (i + 1) for i in range(n)],
        "cut": [i == 1 for i in range(n)],
        "entropy": [0.1 * (i % 4) for i in range(n)],
        "tasks": ["ab"[i % 2] for i in range(n)],
        "ids": [[1, 2, i % 2, 4, 5][: 3 + i % 3] for i in range(n)],
        "retention": [i % 3 for i in range(n)],
    }
    return {**columns, "eos": (5,), "budget": 1000.0, **changed}


def test_every_metric_is_in_the_table_or_of_an_open_family():
    """Names are canonical; nothing is invented."""
    got = observe_responses(ResponseBatch.of(**everything()))

    assert [name for name in got if metric_of(name) is None] == []
    assert len(set(got) & set(BY_NAME)) > 40


def test_what_was_not_given_is_absent():
    """Each statistic needs what it is of, and nothing else."""
    assert observe_responses(ResponseBatch()) == {}
    assert observe_responses(ResponseBatch.of(groups=["a", "a"])) == {}
    assert {name.partition("/")[0] for name in observe_responses(ResponseBatch.of(lengths=[1, 2]))} == {"len"}
    assert not any("group" in name or "zero" in name for name in observe_responses(ResponseBatch.of(rewards=[1.0])))
    assert "len/clipped" not in observe_responses(ResponseBatch.of(lengths=[1, 2]))


def test_lists_arrays_and_tensors_say_the_same():
    """Whatever a trainer holds its responses in."""
    given_ = everything()
    lists = read(observe_responses(ResponseBatch.of(**given_)))
    plain = ("rewards", "lengths", "cut", "entropy", "retention", "groups")
    for kind in (np.array, torch.tensor):
        other = given_ | {name: kind(given_[name]) for name in plain}
        assert read(observe_responses(ResponseBatch.of(**other))) == pytest.approx(lists)


def test_a_reward_that_is_missing_is_left_out_and_one_that_is_nan_is_not():
    """Missing and NaN are two things."""
    missing = read(observe_responses(ResponseBatch.of(rewards=[1.0, None, 0.0, 1.0], groups=2)))
    broken = read(observe_responses(ResponseBatch.of(rewards=[1.0, math.nan, 0.0, 1.0], groups=2)))

    assert (missing["reward/mean"], missing["nonfinite/reward"]) == (pytest.approx(2 / 3), 0)
    assert math.isnan(broken["reward/mean"])
    assert broken["nonfinite/reward"] == 1
    assert missing["reward/pass_at_1"] == 0.75
    assert "reward/pass_at_1" not in broken
    assert missing["reward/effective_groups"] == broken["reward/effective_groups"] == 1


def test_a_tensor_says_beside_it_which_rewards_are_missing():
    """TRL writes NaN for a completion no function could score; it is no broken reward."""
    rewards = torch.tensor([1.0, math.nan, 1.0])

    got = read(observe_responses(ResponseBatch.of(rewards=rewards, scored=~rewards.isnan(), groups=3)))

    assert (got["reward/mean"], got["nonfinite/reward"], got["reward/zero_std_right_frac"]) == (1.0, 0, 1.0)


@pytest.mark.parametrize("n", [0, 1])
def test_an_empty_batch_and_one_response_measure_no_more_than_there_is(n):
    """No group, no deviation, no tail; and no exception."""
    got = read(observe_responses(ResponseBatch.of(**everything(n))))

    assert not any("group" in name or "zero_std" in name or name.endswith("/std") for name in got)
    assert (got == {}) == (n == 0)


def test_groups_that_are_whole_keep_nothing():
    """Their statistics are sums at once; of groups that may go on elsewhere every value is kept."""
    whole = observe_responses(ResponseBatch.of(**everything(groups=2)))
    spread = observe_responses(ResponseBatch.of(**everything()))

    assert not any(isinstance(stat, Grouped) for stat in whole.values())
    assert isinstance(spread["reward/zero_std_frac"], Grouped)
    assert read(whole) == pytest.approx(read(spread))


rows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0.0, 1.0, 0.5, None]),
        st.integers(0, 40),
        st.sampled_from(["a", "b", "c", None]),
        st.sampled_from(["x", "y", None]),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(rows, st.lists(st.integers(0, 12), max_size=3))
def test_however_responses_are_dealt_out_the_step_says_the_same(responses, cuts):
    """Micro-batches and ranks of any size, also empty ones."""
    names = TaskNames()

    def part(some):
        groups, rewards, lengths, tasks, answers = zip(*some, strict=True) if some else ((),) * 5
        ids = torch.arange(70).repeat(len(some), 1) % 7
        mask = torch.arange(70) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
        return observe_responses(
            ResponseBatch.of(
                rewards=rewards, groups=list(groups), lengths=list(lengths), tasks=tasks, task_names=names,
                answers=answers, ids=ids, mask=mask, eos=(3,), retention=list(groups), entropy=[0.5 * x for x in lengths],
            )
        )  # fmt: skip

    whole = part(responses)
    places = sorted({0, len(responses), *(min(c, len(responses)) for c in cuts)})
    merged = part([])
    for a, b in itertools.pairwise(places):
        merged = merge(merged, part(responses[a:b]))

    assert read(merged) == pytest.approx(read(whole), rel=1e-4, abs=1e-5)


def test_observing_and_reading_never_wait_for_the_device_nor_draw_a_random_number():
    """No scalar read, no data-dependent shape, from the tensors to what a step sends to the CPU."""
    spread, whole = (ResponseBatch.of(**everything(groups=groups)) for groups in ([0, 0, 1, 1, 2, 2, 3, 3], 2))
    state = torch.get_rng_state()
    with CountWaits() as count:
        for batch in (spread, whole):
            tally = StepTally()
            tally.add_stats(observe_responses(batch))
            tally.add_stats(observe_responses(batch))
            tally.seal(1)

    assert count.seen == []
    assert torch.equal(state, torch.get_rng_state())


def test_a_step_records_what_was_measured_and_leaves_out_what_was_not(tmp_path):
    """Through the tally that every integration uses."""

    class Run:
        def log(self, metrics, step):
            self.metrics = metrics

    tally, run = StepTally(), Run()
    tally.add_stats(observe_responses(ResponseBatch.of(rewards=[1.0, 1.0, 0.0], groups=["p", "p", "q"])))

    tally.seal(3).deliver(run)

    assert run.metrics["reward/zero_std_right_frac"] == 1.0
    assert "reward/pass_at_4" not in run.metrics
    assert not any(math.isnan(value) for value in run.metrics.values())


def test_one_number_of_responses_in_everything():
    """The message says which is how long."""
    with pytest.raises(ValueError, match=r"got numbers \{'rewards': 3, 'lengths': 2\}"):
        ResponseBatch.of(rewards=[1.0, 0.0, 1.0], lengths=[3, 4])
    with pytest.raises(ValueError, match="3 responses do not divide into groups of 2"):
        ResponseBatch.of(rewards=[1.0, 0.0, 1.0], groups=2)
    with pytest.raises(ValueError, match="without any tensor of responses"):
        ResponseBatch.of(groups=2)
    with pytest.raises(ValueError, match=r"ids must be \(B, T\), got a shape of \(3,\)"):
        ResponseBatch.of(ids=[1, 2, 3])


def test_everything_goes_to_one_device():
    """That of the first tensor which is not on the CPU (to go there takes waiting), or the one asked for."""
    batch = ResponseBatch.of(
        rewards=torch.ones(2), lengths=torch.zeros(2, device="meta"), cut=[0, 1], tasks=["a", "b"], groups=2
    )
    tensors = [x for f in fields(batch) if isinstance(x := getattr(batch, f.name), torch.Tensor)]

    assert {x.device.type for x in tensors} == {"meta"}
    assert ResponseBatch.of(rewards=[1.0], device="meta").rewards.device.type == "meta"


def test_no_tensor_of_rlwatch_stays_behind_on_the_cpu():
    """On a device that holds no values whatever would be read, or is on another device, is an error."""
    batch = ResponseBatch.of(**everything(), device="meta")
    stats = merge(observe_responses(batch), observe_responses(batch))

    settled = [stat.settle() for stat in stats.values()]

    assert {x.device.type for stat in settled for x in (stat.value(), stat.count)} == {"meta"}


def test_no_graph_is_kept():
    """A reward of a differentiable model neither holds its graph nor gets a gradient."""
    rewards = torch.ones(4, requires_grad=True) * 2

    stats = observe_responses(ResponseBatch.of(rewards=rewards, groups=2, entropy=rewards, lengths=rewards))

    assert not any(stat.settle().value().requires_grad for stat in stats.values())


def test_codes_are_equal_for_what_is_equal_in_every_process():
    """A text, a number and nothing; a hash of Python would differ between ranks."""
    got = codes_of(["42", None, 42, "x", np.str_("x")])

    assert got[0] == got[2] == 2153420944245707
    assert got[1] == -1
    assert got[3] == got[4] != got[0]
    assert codes_of([3, 7]).tolist() == [3, 7]
    assert codes_of(np.array([3, 7])).tolist() == [3, 7]
    assert codes_of([]).dtype == torch.int64
    assert codes_of([str(i) for i in range(2000)]).unique().numel() == 2000
    assert codes_of([str(i) for i in range(2000)]).max() < 2**CODE_BITS


def test_answers_of_one_group_are_compared_across_batches():
    """Two ranks hold half a group each and have never heard of each other's answers."""
    one = ResponseBatch.of(answers=["42", "41"], groups=["p", "p"])
    other = ResponseBatch.of(answers=["42", None], groups=["p", "p"])

    got = read(merge(observe_responses(one), observe_responses(other)))

    assert got["reward/unique_answers"] == pytest.approx(2 / 3)
    assert got["reward/majority_share"] == pytest.approx(2 / 3)


def test_tasks_have_their_own_mean():
    """Of reward, length and entropy, over the responses to them."""
    batch = ResponseBatch.of(
        rewards=[1.0, 0.0, None, 0.5],
        lengths=[10, 20, 30, 40],
        entropy=[1.0, 2.0, 3.0, 4.0],
        tasks=["gsm8k", "gsm8k", "math", None],
    )

    got = read(observe_responses(batch))

    by = {name: value for name, value in got.items() if "by_task" in name}
    assert by == {
        "reward/by_task/gsm8k": 0.5, f"reward/by_task/{UNNAMED_TASK}": 0.5,
        "len/by_task/gsm8k": 15, "len/by_task/math": 30, f"len/by_task/{UNNAMED_TASK}": 40,
        "policy/entropy_by_task/gsm8k": 1.5, "policy/entropy_by_task/math": 3, f"policy/entropy_by_task/{UNNAMED_TASK}": 4,
    }  # fmt: skip


def test_the_number_of_tasks_is_bounded_and_the_most_frequent_come_first():
    """The rest share one name, which no task can take."""
    names = TaskNames(limit=2)

    assert names.codes(["rare", "often", "some", "often", "some", "often"]) == [2, 0, 1, 0, 1, 0]
    assert names.names == ("often", "some", OTHER_TASKS)
    assert names.codes([OTHER_TASKS, "new", "some"]) == [2, 2, 1]


def test_a_task_that_is_called_other_is_one_of_the_rest():
    """Else two means would have one name."""
    names = TaskNames()

    assert names.codes(["a", OTHER_TASKS, "a"]) == [0, 1, 0]
    assert names.names == ("a", OTHER_TASKS)


def test_a_task_keeps_its_place_while_others_come():
    """Else a series would change its meaning between two steps."""
    names = TaskNames(limit=3)
    names.codes(["a", "b"])

    assert names.codes(["c", "c", "b", "a"]) == [2, 2, 1, 0]


def test_a_task_of_one_batch_and_of_another_merge_by_name():
    """Also when a new one has come between, which moves the place of the rest."""
    names = TaskNames(limit=2)
    parts = [ResponseBatch.of(rewards=[r] * len(t), tasks=t, task_names=names) for r, t in ((1.0, ["a"]), (0.0, "bac"))]

    got = read(merge(*(observe_responses(part) for part in parts)))

    assert got["reward/by_task/a"] == 0.5
    assert got["reward/by_task/b"] == got["reward/by_task/other"] == 0.0


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("open ai/gsm8k", "open_ai/gsm8k"),
        ("x" * 200, "x" * LONGEST_TASK_NAME),
        ("", UNNAMED_TASK),
        ("  ", UNNAMED_TASK),
        (7, "7"),
        ("/", UNNAMED_TASK),
    ],
)
def test_a_task_of_any_text_becomes_part_of_a_name(task, name):
    """One line, not too long, never empty."""
    names = TaskNames()
    names.codes([task])

    assert names.names == (name, OTHER_TASKS)


def test_a_nan_of_one_task_leaves_the_others():
    """And is not hidden in its own."""
    stats = by_task("t/", torch.tensor([math.nan, 1.0]), torch.ones(2), torch.tensor([0, 1]), ("a", "b"))

    assert math.isnan(stats["t/a"].value())
    assert stats["t/b"].value() == 1.0


def test_ids_may_be_ragged_nested_or_masked():
    """Padding is added, and what a mask leaves out was not sampled by the policy."""
    ragged = [[1, 2, 3], [1, 2], [1, 9, 3, 4]]
    nested = torch.nested.nested_tensor([torch.tensor(row) for row in ragged], layout=torch.jagged)
    expected = read(observe_responses(ResponseBatch.of(ids=ragged, groups=3, eos=(4,))))

    assert read(observe_responses(ResponseBatch.of(ids=nested, groups=3, eos=(4,)))) == expected
    assert expected["text/eos_missing"] == pytest.approx(2 / 3)
    assert expected["text/group_agreement"] == pytest.approx((3 + 1 + 0 + 1) / (2 + 3 + 2))
    masked = ResponseBatch.of(ids=ragged, mask=[[1, 0, 0], [1, 0], [1, 0, 0, 0]], groups=3)
    assert read(observe_responses(masked))["text/group_agreement"] == 1.0


def test_carried_over_responses_and_the_budget_of_an_iteration():
    """As C3PO++ counts them."""
    batch = ResponseBatch.of(lengths=[100, 300], retention=[0, 3], spans=[1, 4], budget=1000)

    got = read(merge(observe_responses(batch), observe_responses(batch)))

    assert (got["partial/frac"], got["partial/retention_mean"], got["partial/retention_max"]) == (0.5, 1.5, 3)
    assert (got["staleness/spans_mean"], got["staleness/spans_max"]) == (2.5, 4)
    assert got["len/budget_used"] == pytest.approx(0.8)


def sent(stats):
    """What arrives at rank 0 of another rank's statistics."""
    layout, tensors = pack(stats)
    return unpack(layout, Transfer(tensors).read())


def test_ranks_say_together_what_one_process_would():
    """Groups that lie on two ranks, tasks that only one has, answers neither knows of the other."""
    given_ = everything(12)
    names = TaskNames()

    def rank(places):
        columns = {name: [x[i] for i in places] if isinstance(x, list) else x for name, x in given_.items()}
        return observe_responses(ResponseBatch.of(**columns, task_names=names))

    whole = read(rank(range(12)))

    together = merge_ranks(merge_ranks(sent(rank([0, 3, 4])), sent(rank([1, 2, 5, 6, 7, 8]))), sent(rank([9, 10, 11])))

    assert read(together) == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_a_value_that_ranks_share_is_sent_once():
    """Twenty statistics of the rewards of groups are of the same tensors."""
    stats = observe_responses(ResponseBatch.of(rewards=[1.0, 0.0] * 8, groups=list("aabbccdd" * 2)))
    kept = {name: stat for name, stat in stats.items() if isinstance(stat, Grouped)}

    _layout, tensors = pack(kept)

    assert len(kept) > 20
    assert len(tensors) == 4  # a count, scores, groups, a mask
