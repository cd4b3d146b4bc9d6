"""Which completions are kept: the telling ones, without chance, cut, within a budget."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.errors import ConfigError
from rlwatch.integrations.completions import CompletionSampler, KeepCompletions, choose, prompt_id
from rlwatch.rollouts import CUT


def _texts(n):
    return [f"p{i}" for i in range(n)], [f"c{i}" for i in range(n)]


@given(
    rewards=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40),
    most=st.integers(1, 12),
)
def test_the_best_the_worst_and_what_is_no_number_are_among_the_chosen(rewards, most):
    """As long as there is room; and as many as there may be are kept, each once."""
    chosen = choose(rewards, len(rewards), most)

    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(most, len(rewards))
    broken = [i for i, r in enumerate(rewards) if math.isnan(r)]
    whole = [r for r in rewards if not math.isnan(r)]
    if len(broken) + 2 <= most and whole:
        assert set(broken) <= set(chosen)
        assert {max(whole), min(whole)} <= {rewards[i] for i in chosen}


def test_without_rewards_the_sample_is_spread_over_the_batch():
    """Not the first ones, which all belong to one prompt."""
    assert choose(None, 64, 4) == [0, 16, 32, 48]
    assert choose(None, 0, 4) == []


def test_a_sample_is_due_every_so_many_steps_and_again_after_a_rollback():
    """A resumed run goes back to earlier steps."""
    sampler = CompletionSampler(KeepCompletions(every=10))
    assert sampler.due(7)
    assert sampler.sample(7, *_texts(2), {}) is not None

    assert [sampler.due(step) for step in (8, 16, 17, 18, 3)] == [False, False, True, True, True]


def test_a_long_text_keeps_its_beginning_and_its_end():
    """The answer stands at the end, the prompt's task at the beginning."""
    sampler = CompletionSampler(KeepCompletions(max_chars=25))

    batch = sampler.sample(1, ["short"], ["b" * 500 + "the end"], {"reward": [1.0]})

    [text] = batch.columns["completion"]
    assert len(text) <= 25
    assert text.startswith("bbb")
    assert CUT in text
    assert text.endswith("the end")
    assert list(batch.columns["prompt"]) == ["short"]


def test_columns_go_along_with_their_completions():
    """Whole numbers stay whole, NaN stays NaN, words stay words."""
    columns = {"reward": [0.0, math.nan, 1.0], "length": [3, 4, 5], "task": ["a", "b", "a"]}

    batch = CompletionSampler(KeepCompletions(rows=2)).sample(4, *_texts(3), columns)

    assert batch.columns["completion"] == ["c1", "c2"]
    assert math.isnan(batch.columns["reward"][0])
    assert batch.columns["length"].tolist() == [4, 5]
    assert batch.columns["length"].dtype == "int64"
    assert batch.columns["task"] == ["b", "a"]


def test_a_column_of_another_length_is_left_out():
    """Nothing tells which completion its values belong to."""
    batch = CompletionSampler(KeepCompletions()).sample(1, *_texts(3), {"reward": [1.0, 2.0]})

    assert "reward" not in batch.columns


def test_an_empty_generation_gives_nothing():
    """And is not counted as a sample."""
    sampler = CompletionSampler(KeepCompletions())

    assert sampler.sample(1, [], [], {}) is None
    assert sampler.due(1)


def test_a_budget_is_never_exceeded_and_what_it_costs_is_counted(caplog):
    """A week of text must not fill a disk."""
    sampler = CompletionSampler(KeepCompletions(every=1, budget_mb=0.00001))
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        assert sampler.sample(1, ["prompt"], ["completion"], {}) is None

    assert not sampler.due(2)
    assert "1e-05 MB" in caplog.text
    assert sampler.left_out == 1


def test_a_budget_reaches_to_the_end_of_a_long_run():
    """The interval grows fourfold whenever half of what was left is spent: the crash comes at the end."""
    sampler = CompletionSampler(KeepCompletions(every=1, rows=1, budget_mb=0.01))
    kept = [
        step
        for step in range(4000)
        if sampler.wants(step, list) and sampler.sample(step, [""], ["x" * 100], {}) is not None
    ]

    assert kept[:3] == [0, 1, 2]
    assert kept[-1] > 2000
    assert sum(100 for _ in kept) <= 10_000
    assert sampler.left_out == 4000 - len(kept)


def test_a_prompt_that_comes_back_is_kept_again():
    """Also between two samples: its answers are to be compared. Its best and its worst of then."""
    sampler = CompletionSampler(KeepCompletions(every=10, rows=4))
    sampler.sample(1, ["a"], ["1"], {"reward": [0.0]})
    prompts = ["b", "a", "b", "a", "a"]
    names = [prompt_id(prompt) for prompt in prompts]

    assert not sampler.wants(4, lambda: names)
    assert not sampler.wants(10, lambda: [prompt_id("b")])
    sampler.sample(11, ["c"], ["3"], {"reward": [0.0]})
    assert sampler.wants(17, lambda: names)
    batch = sampler.sample(17, prompts, list("12345"), {"reward": [9.0, 0.5, 9.0, 0.1, 0.7]})

    assert batch.columns["prompt"] == ["a", "a"]
    assert batch.columns["completion"] == ["4", "5"]
    assert batch.columns["prompt_id"] == [prompt_id("a")] * 2
    assert not sampler.wants(18, lambda: names)


def test_what_is_known_of_a_completion_goes_with_it():
    """Asked for only of those that are kept; a loop is told from prose, with ids and without."""
    asked = []

    def kl(rows):
        asked.extend(rows)
        return [math.nan for _ in rows]

    sampler = CompletionSampler(KeepCompletions(rows=2, max_chars=40))
    texts = ["the cat sat on a mat", "no no " * 40, "x", "y"]
    batch = sampler.sample(3, ["p"] * 4, texts, {"reward": [0, 1, 0, 0], "kl": kl, "reward/math": [0.0, 1.0, 0.0, 0.0]})

    assert asked == [0, 1]
    assert batch.columns["reward"].dtype == "float64"
    assert np.isnan(batch.columns["kl"]).all()
    assert batch.columns["reward/math"].tolist() == [0.0, 1.0]
    assert batch.columns["chars"].tolist() == [len(texts[0]), len(texts[1])]
    assert batch.columns["generated"].tolist() == [4, 4]
    assert batch.columns["repetition"][0] == 0.0
    assert batch.columns["repetition"][1] > 0.9
    by_ids = sampler.sample(99, ["p"], ["!!"], {}, ids=lambda _: [0] * 50)
    assert by_ids.columns["repetition"][0] > 0.9


def test_a_lone_surrogate_does_not_raise():
    """Byte-level tokenizers decode broken text."""
    assert CompletionSampler(KeepCompletions()).sample(1, ["\ud800"], ["\udfff"], {}) is not None


@pytest.mark.parametrize("wrong", [{"every": 0}, {"rows": True}, {"max_chars": 3}, {"budget_mb": math.nan}])
def test_a_wrong_setting_is_refused_with_its_name_and_value(wrong):
    """Before training begins."""
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} must be a number.*{value!r}"):
        KeepCompletions(**wrong)


def test_text_is_kept_only_on_request():
    """True means the defaults."""
    assert KeepCompletions.of(False) is None
    assert KeepCompletions.of(True) == KeepCompletions()
    assert KeepCompletions.of(KeepCompletions(rows=1)).rows == 1
    with pytest.raises(ConfigError, match="completions must be True, False"):
        KeepCompletions.of(8)
