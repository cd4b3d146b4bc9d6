"""Recorded completions as rows and as a table."""

import json
import math

import numpy as np
import pytest

import rlwatch
from rlwatch.records import CompletionBatch
from rlwatch.rollouts import completion_rows


def _batch(step, n=2, **more):
    return CompletionBatch(step, {"completion": [f"text {step}.{i}" for i in range(n)], **more})


def test_the_newest_step_comes_first_and_rows_keep_their_order():
    """As the trainer recorded them, groups stay together."""
    rows = completion_rows([_batch(3), _batch(9)])

    assert [(row["step"], row["completion"]) for row in rows] == [
        (9, "text 9.0"),
        (9, "text 9.1"),
        (3, "text 3.0"),
        (3, "text 3.1"),
    ]


def test_there_are_never_more_rows_than_asked_for():
    """A run of a week has thousands."""
    assert len(completion_rows([_batch(step, 40) for step in range(9)], most=50)) == 50
    assert completion_rows([]) == []


def test_values_are_plain_and_a_nan_reward_stays_one():
    """JSON needs Python numbers."""
    rows = completion_rows([_batch(1, reward=np.array([0.5, math.nan]), length=np.array([3, 4]))])

    assert type(rows[0]["reward"]) is float
    assert type(rows[0]["length"]) is int
    assert math.isnan(rows[1]["reward"])


def test_show_prints_completions_and_says_how_to_get_them(invoke, tmp_path):
    """Escapes in a sampled text cannot command the terminal."""
    store = str(tmp_path / "runs")
    with rlwatch.init(store=store, run_id="r1") as run:
        run.log({"reward": 1.0}, step=1)
    empty = invoke("show", "r1", "--completions", "--store", store)
    with rlwatch.init(store=store, run_id="r1") as run:
        run.log_completions(CompletionBatch(2, {"completion": ["a\x1b[31mb"], "reward": np.array([math.inf])}))
    shown = invoke("show", "r1", "--completions", "--store", store)

    assert "no completions recorded" in empty.stdout
    assert "\x1b[31m" not in shown.stdout
    assert "Inf" in shown.stdout


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A store with completions of 120 steps, two a step."""
    store = str(tmp_path_factory.mktemp("completions") / "runs")
    with rlwatch.init(store=store, run_id="r1") as run:
        for step in range(120):
            columns = {
                "prompt": [f"What is {step} + 1?", "Sort it"],
                "prompt_id": [f"id{step}", "sorting"],
                "completion": [f"It is {step + 1}", "a " * step],
                "reward": np.array([math.nan if step == 7 else step / 100, -1.0]),
                "reward/format": np.array([1.0, 0.5]),
                "length": np.array([4, step], dtype=np.int64),
                "repetition": np.array([0.0, min(1.0, step / 60)]),
            }
            run.log_completions(CompletionBatch(step, columns))
    return store


def told(invoke, store, *options):
    """JSON of the completions that fit."""
    shown = invoke("show", "r1", *options, "--store", store, "--format", "json")
    return json.loads(shown.stdout)["completions"]


def test_every_recorded_completion_can_be_asked_for(invoke, recorded):
    """Not only the newest; by step, by prompt, and by what is worst; options alone mean completions."""
    assert len(told(invoke, recorded, "--completions")) == 240
    assert [row["step"] for row in told(invoke, recorded, "--from", "3", "--to", "4")] == [4, 4, 3, 3]
    longest = told(invoke, recorded, "--sort", "length", "--prompt", "sort")
    assert [row["length"] for row in longest[:2]] == [119, 118]
    assert longest[0]["flags"] == ["repeats itself"]
    worst = told(invoke, recorded, "--sort", "reward")
    assert [row["reward"] for row in worst[:2]] == ["NaN", -1.0]
    assert worst[0]["flags"] == ["reward NaN"]
    assert told(invoke, recorded, "--sort", "reward", "--reverse")[1]["reward"] == 1.19
    assert told(invoke, recorded, "--prompt", "id12", "--to", "12")[0]["completion"] == "It is 13"


def test_a_table_of_completions_says_how_many_more_fit(invoke, recorded):
    """And that nothing fits."""
    shown = invoke("show", "r1", "--sort", "repetition", "--most", "3", "--store", recorded).stdout
    none = invoke("show", "r1", "--completions", "--from", "9999", "--store", recorded).stdout

    assert "3 of 240" in shown
    assert "237 more match" in shown
    assert "repeats itself" in shown
    assert "none of the 240" in none


def test_the_report_shows_the_best_and_the_worst(invoke, recorded, tmp_path):
    """With what each reward function gave; their text cannot become markup."""
    with rlwatch.init(store=recorded, run_id="r2") as run:
        hostile = "<img src=x onerror=alert(1)> [x](javascript:alert(1))"
        run.log_completions(CompletionBatch(1, {"completion": [hostile], "reward": np.array([-9.0])}))
    page = tmp_path / "report.html"
    invoke("report", "r1", "--store", recorded, "--output", str(page))
    other = tmp_path / "other.html"
    invoke("report", "r2", "--store", recorded, "--output", str(other))

    text = page.read_text()
    assert "Best and worst completions" in text
    assert "It is 120" in text
    assert "format 1" in text
    assert "<img" not in other.read_text()
    assert "&lt;img" in other.read_text()
