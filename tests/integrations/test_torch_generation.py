"""What a loop passes of a generation: rewards, groups, lengths, tasks, answers, texts."""

import math
import warnings

import numpy as np
import pytest
import torch
from tiny_loop import FakeRun

import rlwatch
from rlwatch.clock import ManualClock
from rlwatch.integrations.completions import KeepCompletions
from rlwatch.integrations.torch.batch import GenerationReader, Samples
from rlwatch.text import TextProbe

pytestmark = pytest.mark.torch
REWARDS = [1.0, 0.0, 1.0, 1.0]


def measured(**inputs):
    """Metrics of a step with one generation, and the run."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run, eos=2)
    watcher.rollouts(**inputs)
    watcher.step(1)
    metrics = run.steps[1]
    metrics.pop("time/step")
    return metrics, run


# --- how it may be given -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, torch.tensor, lambda x: torch.tensor(x)[:, None]],
    ids=["list", "tuple", "array", "tensor", "column"],
)
def test_rewards_and_lengths_come_as_tensors_arrays_or_lists(make):
    """The same numbers."""
    metrics, run = measured(rewards=make(REWARDS), lengths=make([3, 4, 5, 6]))

    assert run.counters.snapshot() == {}
    assert metrics["reward/mean"] == pytest.approx(0.75)
    assert (metrics["reward/min"], metrics["reward/max"], metrics["len/mean"]) == (0.0, 1.0, 4.5)


@pytest.mark.parametrize("groups", [2, [7, 7, 9, 9], ["a", "a", "b", "b"], torch.tensor([0, 0, 1, 1])])
def test_groups_come_as_a_size_or_as_ids(groups):
    """Half of the groups agree, and both of it are right."""
    metrics, run = measured(rewards=REWARDS, groups=groups)

    assert run.counters.snapshot() == {}
    assert metrics["reward/zero_std_frac"] == 0.5
    assert metrics["reward/zero_std_right_frac"] == 0.5
    assert metrics["reward/effective_groups"] == 1.0


def test_groups_may_be_spread_over_several_calls():
    """A generation that comes in pieces."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run)
    watcher.rollouts(rewards=[1.0, 0.0], groups=["a", "b"])
    watcher.rollouts(rewards=[1.0, 1.0], groups=["a", "b"])
    watcher.step(1)

    assert run.steps[1]["reward/zero_std_frac"] == 0.5
    assert run.steps[1]["reward/mean"] == 0.75


def test_a_response_without_a_reward_is_left_out_and_a_nan_is_not():
    """None is missing; NaN was measured."""
    missing, _ = measured(rewards=[1.0, None, 0.0])
    broken, _ = measured(rewards=[1.0, math.nan, 0.0])

    assert missing["reward/mean"] == 0.5
    assert math.isnan(broken["reward/mean"])
    assert broken["nonfinite/reward"] == 1


def test_tasks_and_answers_have_their_own_metrics():
    """Reward and length for each task; how many answers a group gives."""
    metrics, _ = measured(
        rewards=REWARDS,
        lengths=[1, 2, 3, 4],
        groups=4,
        tasks=["math", "code", "math", None],
        answers=["4", "5", "4", None],
    )

    assert metrics["reward/by_task/math"] == 1.0
    assert metrics["reward/by_task/code"] == 0.0
    assert metrics["len/by_task/unnamed"] == 4.0
    assert metrics["reward/unique_answers"] == pytest.approx(2 / 3)


def test_cut_responses_and_carried_ones_are_counted():
    """And those that never end."""
    metrics, _ = measured(
        lengths=[2, 3, 3, 1],
        cut=[False, True, True, False],
        retention=[0, 0, 1, 3],
        ids=[[5, 2], [5, 6, 7], [5, 6, 2], [2]],
    )

    assert metrics["len/clipped"] == 0.5
    assert metrics["partial/frac"] == 0.5
    assert metrics["text/eos_missing"] == 0.25


@pytest.mark.parametrize("layout", ["list", "jagged", "strided", "padded"])
def test_ids_come_padded_or_as_rows(layout):
    """With a mask where they are padded."""
    rows = [torch.tensor([5, 2]), torch.tensor([5, 6, 7])]
    mask = None
    ids = rows
    if layout == "jagged":
        ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
    elif layout == "strided":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.nested.nested_tensor(rows)
    elif layout == "padded":
        ids, mask = torch.tensor([[5, 2, 0], [5, 6, 7]]), torch.tensor([[1, 1, 0], [1, 1, 1]])

    metrics, run = measured(ids=ids, mask=mask)

    assert run.counters.snapshot() == {}
    assert metrics["text/eos_missing"] == 0.5


def test_a_generation_of_no_responses_measures_nothing():
    """Not even a 0; nothing fails."""
    metrics, run = measured(rewards=[], lengths=torch.zeros(0), groups=4, tasks=[], ids=[])

    assert metrics == {}
    assert run.counters.snapshot() == {}
    assert measured()[0] == {}


def test_responses_without_a_token_are_responses():
    """Length 0 is a length."""
    metrics, _ = measured(lengths=[0, 4], ids=[[], [5, 6, 7, 2]])

    assert metrics["len/empty"] == 0.5
    assert metrics["len/min"] == 0.0


# --- what does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "refused"),
    [
        ({"lengths": [1, 2]}, {"lengths": "it is of 2 responses where rewards is of 4"}),
        ({"lengths": torch.zeros(4, 3)}, {"lengths": "it has shape (4, 3) where (B,) is needed"}),
        ({"ids": torch.zeros(4)}, {"ids": "it has shape (4,) where (B, T) is needed"}),
        ({"groups": 3}, {"groups": "4 responses do not divide into groups of 3"}),
        ({"groups": 0}, {"groups": "4 responses do not divide into groups of 0"}),
        ({"cut": 5}, {"cut": "object of type 'int' has no len()"}),
        (
            {"tasks": ["a"], "lengths": ["x"] * 4},
            {"tasks": "it is of 1 responses where rewards is of 4", "lengths": None},
        ),
    ],
)
def test_what_does_not_fit_is_left_out_alone(inputs, refused):
    """Rewards are measured all the same."""
    reader = GenerationReader()
    batch = reader.read({"rewards": REWARDS, **inputs})

    assert batch.rewards.tolist() == REWARDS
    assert reader.refused.keys() == refused.keys()
    for name, reason in refused.items():
        assert reason is None or reader.refused[name] == reason
        assert getattr(batch, name) is None


def test_a_mask_that_does_not_go_with_the_ids_is_left_out():
    """The ids stay: all of them count."""
    reader = GenerationReader()
    batch = reader.read({"ids": torch.zeros(2, 3, dtype=torch.int64), "mask": torch.ones(2, 4)})

    assert "mask" in reader.refused
    assert batch.mask.all()


def test_nothing_that_fits_is_no_batch():
    """Not an empty one."""
    reader = GenerationReader()

    assert reader.read({}) is None
    assert reader.read({"rewards": 3.0}) is None
    assert reader.read({"groups": 4}) is None
    assert set(reader.refused) == {"groups"}


def test_a_sharded_tensor_is_refused():
    """Which rank's responses it holds nobody knows here."""

    class Sharded(torch.Tensor):
        full_tensor = None

    reader = GenerationReader()
    reader.read({"rewards": torch.zeros(4).as_subclass(Sharded)})

    assert reader.refused["rewards"].startswith("it is a DTensor")


# --- texts -------------------------------------------------------------------------------------------------


TEXTS = {"prompts": ["1+1=", "1+2=", "2+2=", "3+1="], "completions": ["2", "4", "4", "4 4 4 4"]}


def texts_of(run):
    (batch,) = run.texts
    return batch


def test_no_text_is_kept_unless_asked_for():
    """The default."""
    assert measured(rewards=REWARDS, **TEXTS)[1].texts == []


def test_some_completions_are_kept_with_what_is_known_of_them():
    """Of the step that trains on them; no more than the budget says."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run, completions=KeepCompletions(rows=2, every=5))
    for step in range(1, 5):
        watcher.rollouts(
            rewards=torch.tensor(REWARDS), lengths=[1, 1, 1, 7], groups=2, tasks=["a", "b", "a", "b"], **TEXTS
        )
        watcher.step(step)
    batch = texts_of(run)

    assert batch.step == 1
    assert batch.columns["prompt"] == ["1+1=", "1+2="]
    assert batch.columns["completion"] == ["2", "4"]
    assert batch.columns["reward"].tolist() == [1.0, 0.0]
    assert batch.columns["length"].tolist() == [1, 1]
    assert batch.columns["task"] == ["a", "b"]
    assert batch.columns["group"].tolist() == [0, 0]


def test_rewards_by_function_advantages_and_kl_are_kept_beside_a_completion():
    """As the loop passes them; what lies on no CPU or has another length is left out, alone."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run, completions=True)
    watcher.rollouts(
        rewards=REWARDS,
        advantages=torch.tensor([1.0, -1.0, math.nan, 0.0]),
        kl=[0.1, 0.2, math.inf, 0.0],
        reward_parts={"math": [1, 0, None, 1], "format": torch.ones(4), "short": [1.0]},
        prompt_index=[7, 7, 8, 8],
        groups=["x", "x", "y", "y"],
        completions=TEXTS["completions"],
    )
    columns = texts_of(run).columns

    assert columns["advantage"].tolist()[:2] == [1.0, -1.0]
    assert math.isnan(columns["advantage"][2])
    assert columns["kl"].tolist()[2] == math.inf
    assert columns["reward/math"].tolist()[:2] == [1.0, 0.0]
    assert math.isnan(columns["reward/math"][2])
    assert columns["reward/format"].tolist() == [1.0] * 4
    assert "reward/short" not in columns
    assert columns["prompt_id"] == ["row 7", "row 7", "row 8", "row 8"]
    assert columns["group"].tolist() == [0, 0, 1, 1]


def test_completions_without_prompts_or_rewards_are_kept_too():
    """With what there is; a missing reward is NaN."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run, completions=True)
    watcher.rollouts(completions=TEXTS["completions"], rewards=[1.0, None, 0.0, 1.0])

    assert texts_of(run).columns["prompt"] == [""] * 4
    assert math.isnan(texts_of(run).columns["reward"][1])


class Letters:
    """A tokenizer of single letters that writes ``a`` as ``b``."""

    eos_token_id = 2

    def decode(self, ids, **_):
        return "".join(chr(97 + i) for i in ids)

    def encode(self, text, **_):
        return [max(1, ord(c) - 97) for c in text]


def report(monkeypatch=None, **inputs):
    """What is measured of text, waited for."""
    samples = Samples(FakeRun(), tokenizer=Letters())
    samples.offer(1, inputs)
    found = samples.take(wait=True)
    samples.close()
    return found


def test_text_is_measured_without_being_kept():
    """Compression and odd characters, of what was passed."""
    found = report(completions=["same words " * 60, "\ufffd" * 300])

    assert found["text/zlib_ratio"] > 10
    assert found["text/replacement"] == 0.5


@pytest.mark.parametrize("ids", [[[0, 3], [3, 3]], torch.tensor([[0, 3, 9], [3, 3, 9]])])
def test_ids_that_do_not_survive_decoding_are_found(ids):
    """Lists of ids, or padded ones on the CPU with a mask."""
    mask = torch.tensor([[1, 1, 0]] * 2) if isinstance(ids, torch.Tensor) else None
    found = report(ids=ids, mask=mask)

    assert found["text/retok_exact"] == 0.5
    assert found["text/retok_naive"] == 0.25


def test_what_lies_on_a_device_is_not_fetched_for_its_text():
    """That would be a wait."""
    assert report(ids=torch.zeros(2, 3, device="meta"), mask=torch.ones(2, 3)) == {}
    assert report(ids=torch.zeros(2, 3, dtype=torch.int64)) == {}  # nobody knows what is padding
    assert report(rewards=[1.0]) == {}


def test_the_report_is_of_the_step_that_ends_when_it_is_ready():
    """And is not made again before its time."""
    run = FakeRun()
    watcher = rlwatch.Watcher(run=run)
    samples = watcher.collector.samples
    samples.probe = TextProbe(clock=ManualClock())
    watcher.rollouts(completions=["words and words " * 40])
    samples.probe.settle()
    watcher.step(1)
    watcher.rollouts(completions=["words and words " * 40])
    watcher.step(2)

    assert ["text/zlib_ratio" in metrics for metrics in run.steps.values()] == [True, False]


def test_a_tokenizer_that_fails_is_counted_and_training_goes_on():
    """The rest of the step is recorded."""

    class Broken(Letters):
        def decode(self, ids, **_):
            raise RuntimeError("no such id")

    run = FakeRun()
    watcher = rlwatch.Watcher(run=run, tokenizer=Broken())
    watcher.rollouts(rewards=[1.0], ids=[[0]])
    watcher.collector.samples.probe.settle()
    watcher.step(1)

    assert run.counters["errors"] == 1
    assert run.steps[1]["reward/mean"] == 1.0
