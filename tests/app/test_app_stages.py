"""The page of a run that hangs, and the bars of its stages."""

from __future__ import annotations

import time

import numpy as np
from app_world import WEIRD, html, no_traceback, run_page, write_run

from rlwatch.records import STAGES, STALLED, Event, RunState, SpikeBatch
from rlwatch.store.url import open_store


def add(store_dir, *items, beat=()):
    """More of a run that was written; its process lives in the stage of ``beat``."""
    writer = open_store(str(store_dir)).amend_run("run-1")
    writer.write(items)
    if beat:
        writer.heartbeat(*beat)
    writer.close()


def spans(step, *rows, rank=0):
    columns = {
        "stage": [name for name, _ in rows],
        "begin": np.arange(len(rows), dtype=float),
        "seconds": np.array([seconds for _, seconds in rows]),
    }
    return SpikeBatch(step, columns, STAGES, rank=rank)


def stall(**body):
    says = f"rank 0 is in stage reward since 10:00:00 UTC, starved; at {WEIRD}"
    threads = [{"name": "MainThread", "stack": ["train (loop.py:3)", "judge_that_never_answers (judge.py:31)"]}]
    kept = {"rank": 0, "stage": "reward", "says": says, "threads": threads, **body}
    return Event(STALLED, 30, kept, time.time() + 5.0, attempt=1, seq=1000)


def test_a_run_that_hangs_shows_its_stage_and_its_stack(store_dir):
    """What a process says is text, never markup."""
    write_run(store_dir)
    add(store_dir, stall(), beat=(time.time(), "reward", time.time() - 4500.0))
    page = run_page()

    assert no_traceback(page)
    assert "Stalled" in html(page)
    assert "rank 0 is in stage reward" in html(page)
    assert "<script>alert" not in html(page)
    assert "reward for 1" in html(page)
    assert "MainThread" not in html(page)
    assert "judge_that_never_answers (judge.py:31)" in "".join(code.value for code in page.code)


def test_a_run_that_goes_on_or_has_ended_shows_no_stall(store_dir):
    """A row after the stall, or the end of the run, is the end of it."""
    write_run(store_dir, state=RunState.FINISHED)
    add(store_dir, stall())
    page = run_page()

    assert no_traceback(page)
    assert "Stalled" not in html(page)


def test_the_newest_steps_are_bars_of_their_stages(store_dir):
    """As wide as they took, by rank; without stages there are none."""
    write_run(store_dir)
    assert "rl-layers" not in html(run_page())

    rows = [("sampling", 3.0), ("reward", 1.0), ("update", 4.0)]
    add(store_dir, *(spans(step, *rows) for step in range(10, 31)), spans(30, (WEIRD, 2.0), rank=1))
    page = run_page()
    text = html(page)

    assert no_traceback(page)
    assert (text.count("width:37.50%"), text.count("width:12.50%"), text.count("width:50.00%")) == (12, 12, 12)
    assert text.count("width:25.00%") == 1
    assert "rank 1" in text
    assert "<script>alert" not in text
