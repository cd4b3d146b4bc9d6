"""Shedding while a store takes nothing: in order, counted to the last token, told by the run, and within the budget."""

import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rlwatch.clock import SystemClock
from rlwatch.errors import ConfigError, StoreError
from rlwatch.recorder.intake import BoundedQueue, Intake, admit
from rlwatch.recorder.losses import Counters, Shedding, ShedKind
from rlwatch.recorder.writer import StoreSink, Writer
from rlwatch.records import SHED, CompletionBatch, Event, RunInfo, SpikeBatch, StepRecord
from rlwatch.store.sqlite.journal import SQLiteJournal, budget_bytes
from rlwatch.store.sqlite.layout import files_in
from rlwatch.store.url import open_store
from rlwatch.view import shed_lines, view_of_run

TOKENS, TEXTS, MACHINE = 50, 4, 12


def size(path: Path) -> int:
    """Of a file that the writer's thread may have done with by now."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Away:
    """A run's writer whose store is away until told otherwise."""

    def __init__(self, writer):
        self.writer, self.away = writer, True
        self.run, self.journal, self.last_seq = writer.run, writer.journal, writer.last_seq

    def write(self, items, progress=None):
        if self.away:
            raise StoreError("the server is away")
        self.writer.write(items, progress)

    def heartbeat(self, now, stage="", since=None):
        """Nobody would hear it."""


def spikes(step):
    return SpikeBatch(step, {"logp": np.linspace(-9.0, -1.0, TOKENS), "token_id": np.arange(TOKENS)}, "far-out tokens")


def texts(step):
    return CompletionBatch(step, {"completion": [f"answer {step} " * 20] * TEXTS})


def row(step):
    metrics = {"kl": float(step), "reward": math.nan if step % 97 == 0 else 1.0, **{f"m{k}": 0.5 for k in range(16)}}
    return metrics | {f"system/gpu.{k}.util": 0.5 for k in range(MACHINE)}


@pytest.fixture
def budget(monkeypatch):
    """One megabyte, which is the least."""
    monkeypatch.setenv("RLWATCH_JOURNAL_MB", "1")


def test_what_is_missed_least_goes_first_and_all_of_it_is_accounted_for(tmp_path: Path, budget):
    """Thousands of steps while the store is away, then it is back: every token, text, value and row that was logged is
    stored or counted as shed; events and rows with NaN are all there; the files never took much more than they may.
    """
    store = open_store(tmp_path)
    writer = Away(store.open_run(RunInfo("run")))
    counters = Counters()
    intake = Intake(BoundedQueue(100), writer.journal, counters)
    sink = StoreSink(writer, counters, SystemClock(), max_backlog=100)
    recorder = Writer(intake, [sink], counters, interval=0.001)
    recorder.start()
    steps, first, largest = 6_000, {}, 0
    for step in range(steps):
        for kind, item in ((ShedKind.TOKENS, spikes(step)), (ShedKind.COMPLETIONS, texts(step))):
            if step % 2 == 0:
                if not intake.takes(item):
                    first.setdefault(kind, step)
                    continue
                intake.put(item)
        intake.put(admit(row(step), step, 1.0))
        if step % 500 == 0:
            intake.put(Event("note", step))
            largest = max(largest, sum(map(size, files_in(tmp_path / "run"))))
    writer.away = False
    assert recorder.stop(60.0)
    writer.writer.close()

    told = [event for event in store.events("run") if event.kind == SHED]
    sums = {kind: sum(event.body["n"] for event in told if event.body["what"] == kind) for kind in ShedKind}
    stored = store.records("run")
    assert sum(map(len, store.spikes("run"))) + sums[ShedKind.TOKENS] == TOKENS * steps // 2
    assert sum(map(len, store.completions("run"))) + sums[ShedKind.COMPLETIONS] == TEXTS * steps // 2
    assert len(stored) + sums[ShedKind.ROWS] + counters["dropped"] == steps
    assert (
        sum(name.startswith("system/") for r in stored for name in r.metrics) + sums[ShedKind.SYSTEM] == MACHINE * steps
    )
    assert counters["dropped"] == 0
    assert sum(sums.values()) == counters["shed"]
    assert all(sums.values())
    assert {r.step for r in stored} >= set(range(0, steps, 97))
    assert [event.step for event in store.events("run") if event.kind == "note"] == list(range(0, steps, 500))
    begun = {kind: min(event.body["first_step"] for event in told if event.body["what"] == kind) for kind in ShedKind}
    assert begun[ShedKind.SYSTEM] < begun[ShedKind.ROWS]
    assert first[ShedKind.TOKENS] <= first[ShedKind.COMPLETIONS] < begun[ShedKind.SYSTEM]
    assert largest < 1.2 * budget_bytes()
    lines = view_of_run(store, store.run("run")).shed
    assert len(lines) == len(ShedKind)
    assert "because the store took nothing (the server is away), and its journal may take 1 MB" in lines[0]
    assert [int(line.split()[0].replace(",", "")) for line in lines] == [sums[kind] for kind in sums]


def test_thinned_rows_are_evenly_spread_and_whole_steps(budget):
    """Of a step either all rows or none; fewer, the less room there is; never one that is not finite."""
    counters = Counters()
    kept = {}
    for filled in (0.79, 0.81, 0.9, 0.999):
        door = Shedding(counters)
        came = [(s, part) for s in range(0, 12_800, 10) for part in "ab" if door.cut(s, {part: 1.0}, filled)]
        kept[filled] = len(came)
        both = {s for s, _ in came}
        assert came == [(s, part) for s in sorted(both) for part in "ab"]
        assert door.cut(5, {"kl": math.inf}, filled)
    assert kept == {0.79: 2560, 0.81: 1280, 0.9: 160, 0.999: 40}


def test_a_full_disk_makes_room_for_rows_by_giving_up_tokens(tmp_path: Path):
    """A tmpfs of two megabytes: tokens fill it; once they are given up, rows fit in again and are found by the next."""
    if os.getuid() != 0:
        pytest.skip("THE FULL DISK WAS NOT TRIED: a tmpfs is mounted by root only")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("THE FULL DISK WAS NOT TRIED: no tmpfs can be mounted here")
    try:
        journal = SQLiteJournal(disk)
        steps = iter(range(10**6))
        while journal.append(spikes(next(steps))):
            pass
        assert journal.cramped
        refused = journal.refusals
        while journal.append_record(1, 0.0, {"kl": 1.0}):  # the rest of what was set aside for rows
            pass
        lost = journal.give_up(SpikeBatch)
        number = journal.append_record(2, 0.0, {"kl": 2.0})
        found = dict(journal.missing())
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

    assert [item.step for _, item in lost] == list(range(len(lost)))
    assert number
    assert not journal.cramped
    assert journal.refusals > refused
    assert (found[number].step, found[number].metrics) == (2, {"kl": 2.0})
    assert not any(isinstance(item, SpikeBatch) for item in found.values())


@pytest.mark.parametrize("said", ["0.5", "-1", "lots", "nan", "inf"])
def test_a_budget_that_is_none_is_refused_before_training(tmp_path: Path, said, monkeypatch):
    """With the value, and what it should be."""
    monkeypatch.setenv("RLWATCH_JOURNAL_MB", said)
    with pytest.raises(ConfigError, match=rf"RLWATCH_JOURNAL_MB .* got '{said}'"):
        open_store(tmp_path).open_run(RunInfo("run"))


def test_events_of_what_was_shed_are_one_sentence_a_kind():
    """Sums, the widest range, the newest reason; damage in a body costs its numbers only."""
    said = {"what": "completions", "n": 3, "first_step": 5, "last_step": 9, "why": "a"}
    events = [
        Event(SHED, 9, said),
        Event("note", 1),
        Event(SHED, 20, said | {"n": 1000, "first_step": 12, "last_step": 20, "why": "b"}),
        Event(SHED, 3, {}),
    ]

    assert shed_lines(events) == (
        "1,003 completions were shed between step 5 and 20, because b",
        "0 records were shed between step 0 and 0, because there was no room",
    )


def test_a_record_that_is_cut_is_a_record_still(tmp_path: Path):
    """Values of the machine go, the others stay as they were."""
    metrics = {"kl": math.nan, "vllm/queue": 3.0, "grad_norm": 2.0}
    assert Shedding(Counters()).cut(3, metrics, 0.76)
    assert list(metrics) == ["kl", "grad_norm"]
    assert not Shedding(Counters()).cut(3, {"gpu/0": 1.0}, 0.76)
    assert StepRecord(3, metrics).metrics is metrics
