"""When a row begins a new attempt: where steps that go back last, and never for a few rows of another counter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch import scan
from rlwatch.importers import LogTail, read_log
from rlwatch.importers.base import ImportedRow, Skips
from rlwatch.importers.step_order import COPY, OTHER_COUNTER, TOO_FEW, StepOrder
from rlwatch.testing.importer_contract import comparable

Stream = list[tuple[int, Iterable[str]]]
rows = st.lists(st.tuples(st.integers(0, 12), st.frozensets(st.sampled_from("abc"), min_size=1)), max_size=40)


def given_out(stream: Stream, skips: Skips | None = None, *, ended: bool = True) -> list[tuple[int, int, str]]:
    """Attempt, step and names of what is given out; each value is another, so that none is a copy."""
    order, skips = StepOrder(), skips or Skips()
    found = []
    for number, (step, names) in enumerate(stream):
        found += order.take(ImportedRow(step, dict.fromkeys(names, float(number)), number), skips)
    found += order.finish(skips) if ended else []
    return [(attempt, row.step, "".join(sorted(row.metrics))) for row, attempt in found]


def attempts_of(stream: Stream) -> list[tuple[int, int]]:
    return [(attempt, step) for attempt, step, _ in given_out(stream)]


def training(*steps: int) -> Stream:
    return [(step, "abc") for step in steps]


def test_steps_that_go_back_and_go_on_from_there_are_a_restart():
    """The trainer resumed from the checkpoint of step 2."""
    found = attempts_of(training(1, 2, 3, 4, 3, 4, 5))

    assert found == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5)]


@pytest.mark.parametrize("others", [1, 2])
def test_rows_of_the_same_names_that_go_back_while_the_others_go_on_are_left_out(others):
    """They are of another counter; that is said."""
    skips = Skips()
    found = given_out([*training(*range(1, 9)), *training(*range(1, 1 + others)), *training(9, 10)], skips)

    assert [(attempt, step) for attempt, step, _ in found] == [(1, step) for step in range(1, 11)]
    assert [(s.reason, s.count) for s in skips.listed()] == [(OTHER_COUNTER, others)]


@pytest.mark.parametrize("others", [1, 2, 5, 10])
def test_rows_of_other_names_need_to_last_longer(others):
    """An evaluation may print ten rows and call what it measures as the training does."""
    stream = [*training(*range(1, 31)), *((step, "a") for step in range(1, 1 + others)), *training(31, 32)]

    assert attempts_of(stream) == [(1, step) for step in range(1, 33)]
    assert attempts_of(stream[:-2]) == [(1, step) for step in range(1, 31)]


@pytest.mark.parametrize(("rows", "others", "attempts"), [(20, 3, 2), (160, 6, 1), (160, 8, 2), (1000, 7, 1)])
def test_in_a_long_run_a_return_lasts_once_it_is_more_than_a_few_rows(rows, others, attempts):
    """At the end of the log nothing else tells."""
    found = attempts_of([*training(*range(1, rows + 1)), *training(*range(1, 1 + others))])

    assert max(attempt for attempt, _ in found) == attempts


def test_rows_that_lag_ever_further_have_a_slower_counter_and_are_taken_where_they_were_printed():
    """A row of rewards a rollout, four rows of updates for each; nothing is left out."""
    stream = [part for n in range(1, 60) for part in [(n, "r"), *((4 * n + k, "l") for k in range(4))]]
    skips = Skips()
    rewards = [step for _, step, names in given_out(stream, skips) if names == "r"]

    assert len(rewards) == 59
    assert rewards == sorted(rewards)
    assert rewards[-1] == 4 * 58 + 3
    assert skips.listed() == ()


def test_a_restart_that_logs_other_names_is_one_once_it_lasts():
    """Nobody need print what was printed before."""
    found = attempts_of([*training(*range(1, 31)), *((step, "a") for step in range(1, 20))])

    assert found[30:] == [(2, step) for step in range(1, 20)]


def test_two_rows_that_go_back_at_the_end_are_no_restart():
    """They would take back what was found before them; that they are left out is said."""
    skips = Skips()

    assert len(given_out(training(*range(1, 9), 1, 2), skips)) == 8
    assert [(s.reason, s.count, s.lines) for s in skips.listed()] == [(TOO_FEW, 2, (8, 9))]


def test_rows_on_held_out_prompts_never_begin_an_attempt():
    """However many there are, and whatever counter they have."""
    validation: Stream = [(step, ["val/score"]) for step in range(1, 30)]
    found = given_out([*training(*range(1, 40)), *validation, *validation, *training(40)])

    assert {attempt for attempt, _, _ in found} == {1}
    assert len(found) == 40 + 58


def test_an_evaluation_ahead_of_the_counter_is_taken_where_it_was_printed():
    """The steps between would else be closed before the training came to them."""
    stream: Stream = []
    for step in range(1, 61):
        stream += training(step)
        stream += [(step + 50, ["eval_reward"])] if step % 20 == 0 else []
    found = given_out(stream)

    assert [step for _, step, names in found if names == "abc"] == list(range(1, 61))
    assert [step for _, step, names in found if names != "abc"] == [20, 40, 60]
    assert all(a[1] <= b[1] for a, b in pairwise(found))


def test_one_row_far_ahead_of_the_others_is_of_another_counter():
    """A sum at the end of a phase, say; where the counter goes on from there it has jumped."""
    skips = Skips()
    stray = given_out(training(1, 2, 3, 4, 5, 6, 7, 900, 8, 9), skips)

    assert [step for _, step, _ in stray] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [(s.reason, s.count) for s in skips.listed()] == [(OTHER_COUNTER, 1)]
    assert [step for _, step, _ in given_out(training(1, 2, 3, 4, 5, 6, 7, 900, 901))][-2:] == [900, 901]
    assert given_out(training(1, 2, 3, 4, 5, 6, 7, 900))[-1] == (1, 900, "abc")


def test_an_evaluation_before_the_first_step_does_not_hide_the_training():
    """A base model is measured at whatever step its script says."""
    found = given_out([(500, ["eval_reward"]), *training(1, 2, 3)])

    assert [(step, names) for _, step, names in found] == [(1, "eval_reward"), *((n, "abc") for n in (1, 2, 3))]


def test_a_step_back_with_other_metrics_is_a_late_record():
    """An evaluation that took its time."""
    assert attempts_of([(1, "a"), (2, "a"), (1, "b")]) == [(1, 1), (1, 2), (1, 1)]


def test_rows_that_lack_what_is_measured_now_and_then_go_on_with_the_counter():
    """Also where they are few, and the last."""
    stream = [(step, "abc") for step in range(1, 12)] + [(12, "a"), (13, "a")]

    assert attempts_of(stream) == [(1, step) for step in range(1, 14)]


def test_the_same_step_again_is_no_restart():
    """Several log calls, or several ranks, of one step."""
    assert attempts_of([(1, "a"), (1, "a"), (1, "ab")]) == [(1, 1)] * 3


def test_what_is_printed_again_as_it_was_counts_once():
    """Each rank prints it; NaN is itself."""
    order, skips = StepOrder(), Skips()
    row = ImportedRow(3, {"a": math.nan, "b": 0.5})
    found = [
        n
        for one in (row, ImportedRow(3, {"a": math.nan, "b": 0.5}), ImportedRow(3, {"a": 1.0}))
        for n in order.take(one, skips)
    ]

    assert [dict(one.metrics) for one, _ in found] == [{"a": found[0][0].metrics["a"], "b": 0.5}, {"a": 1.0}]
    assert [(s.reason, s.count) for s in skips.listed()] == [(COPY, 1)]


def test_a_second_restart_is_a_third_attempt():
    """Also to a step before the first one's."""
    found = attempts_of(training(5, 6, 7, 5, 6, 7, 8, 5, 6, 7))

    assert [attempt for attempt, _ in found] == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3]


def test_a_restart_that_is_told_begins_an_attempt_whatever_the_step():
    """The file was truncated: it is a new process, though it goes on where the old one ended."""
    order, skips = StepOrder(), Skips()
    order.restart(skips)
    found = order.take(ImportedRow(1, {"a": 1.0}), skips)
    order.restart(skips)
    found += order.take(ImportedRow(2, {"a": 1.0}), skips) + order.take(ImportedRow(3, {"a": 1.0}), skips)

    assert [attempt for _, attempt in found] == [1, 2, 2]


@given(rows)
def test_attempts_only_ever_go_up_by_one(stream):
    """From 1."""
    found = [attempt for attempt, _ in attempts_of(stream)]

    assert found[:1] in ([], [1])
    assert all(b - a in (0, 1) for a, b in pairwise(found))


@given(rows)
def test_what_was_given_out_is_never_taken_back(stream):
    """Reading on only adds."""
    whole = given_out(stream, ended=False)

    for cut in range(len(stream)):
        before = given_out(stream[:cut], ended=False)
        assert whole[: len(before)] == before


@given(rows)
def test_steps_that_never_go_back_are_one_attempt(stream):
    """However many metrics are repeated; and nothing of one kind is lost."""
    ordered = sorted(stream, key=lambda row: row[0])

    assert {attempt for attempt, _ in attempts_of(ordered)} <= {1}
    assert len(given_out([(step, "a") for step, _ in ordered])) == len(ordered)


# In a log, whole and as it grows


def collapsing(steps: int = 160, onset: int = 101) -> list[dict[str, object]]:
    """Reward falls to nothing, KL and entropy rise."""
    rows: list[dict[str, object]] = []
    for step in range(1, steps + 1):
        wiggle = 0.01 * math.sin(7.3 * step)
        bad = min(1.0, max(0.0, (step - onset + 1) / 12))
        reward = (0.3 + 0.004 * min(step, onset) + wiggle) * (1 - bad)
        rows.append(
            {
                "step": step,
                "reward": round(reward, 4),
                "kl": round(0.03 + 3 * bad + 0.1 * wiggle, 4),
                "entropy": round(0.6 + 2.4 * bad + wiggle, 4),
            }
        )
    return rows


def inserted(rows: list[dict[str, object]], at: int, *others: dict[str, object]) -> list[dict[str, object]]:
    return [*rows[:at], *others, *rows[at:]]


OTHERS = {
    "two small steps at the end": lambda rows: inserted(rows, 160, *({"step": s, "reward": 0.5} for s in (1, 2))),
    "the same names at the end": lambda rows: inserted(rows, 160, *(rows[s] for s in (0, 1))),
    "ten rows within": lambda rows: inserted(rows, 130, *({"step": s, "reward": 0.9} for s in range(1, 11))),
    "an evaluation far ahead": lambda rows: inserted(rows, 60, {"step": 110, "eval_reward": 0.3}),
    "a row far ahead": lambda rows: inserted(rows, 120, {**rows[0], "step": 4000}),
}


JUDGED = {"two small steps at the end", "an evaluation far ahead"}
"""Of the others it is enough that the rows are those of the collapse."""


@pytest.mark.parametrize("kind", OTHERS)
def test_a_few_rows_of_another_counter_take_no_collapse_back(tmp_path: Path, kind):
    """Whole, or row by row: what a watch saw is what was there."""
    lines = [json.dumps(row) + "\n" for row in OTHERS[kind](collapsing())]
    log = tmp_path / "run.jsonl"
    log.write_text("".join(lines))
    judged = scan(log).view.verdict.state.value if kind in JUDGED else "collapsed"
    [run] = read_log(log)
    log.write_text("")
    tail, found = LogTail(log), []
    for line in lines:
        with log.open("a") as file:
            file.write(line)
        found += tail.poll()
    assert {record.attempt for record in found} == {1}
    found += tail.close()

    assert judged == "collapsed"
    assert comparable(found) == comparable(run.records)
