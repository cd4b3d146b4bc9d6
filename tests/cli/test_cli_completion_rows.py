"""Recorded completions as rows and as a table."""

import math

import numpy as np

import rlwatch
from rlwatch.analysis.rows import completion_rows
from rlwatch.records import CompletionBatch


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
