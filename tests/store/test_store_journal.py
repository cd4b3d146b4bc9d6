"""The journal beside a run: what it keeps, what damage costs, and that it is drained once."""

import contextlib
import math
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.ports import Progress
from rlwatch.records import CompletionBatch, Event, PackedMetrics, RunInfo, RunState, SpikeBatch, StepRecord
from rlwatch.store.sqlite.journal import JournalPosition, SQLiteJournal, entries
from rlwatch.store.sqlite.layout import files_in
from rlwatch.store.sqlite.segments import HEADER_BYTES, SEGMENT_BYTES
from rlwatch.store.url import open_store

FLOATS = st.floats(width=64)
NAMES = st.text(max_size=20)


def bits(metrics):
    return {name: np.float64(value).tobytes() for name, value in metrics.items()}


def items_of(directory):
    """In order of their numbers: what is bulky has files of its own."""
    numbered = [(number, item) for file in files_in(directory) for number, item, _ in entries(file)[1]]
    return [item for _, item in sorted(numbered, key=itemgetter(0))]


def left_behind(root, *records, stored=0):
    """A run whose process died: ``records`` are in its journal, the first ``stored`` of them in its database, too."""
    store = open_store(root)
    writer = store.open_run(RunInfo("run"))
    numbers = [writer.journal.append_record(r.step, r.ts, r.metrics) for r in records]
    writer.write(records[:stored], Progress(journaled=numbers[:stored]))
    writer.db.close()  # as a death leaves it: no end of the journal, no release but the kernel's
    writer.lock.release()
    return store


@given(st.lists(st.tuples(st.integers(0, 2**62), st.dictionaries(NAMES, FLOATS, min_size=1, max_size=8)), max_size=6))
def test_records_come_back_bit_for_bit(tmp_path_factory, rows):
    """NaN with its payload, infinities, any name."""
    directory = tmp_path_factory.mktemp("journal")
    journal = SQLiteJournal(directory)
    numbers = [journal.append_record(step, 1.5, metrics) for step, metrics in rows]

    assert numbers == list(range(1, len(rows) + 1))
    assert [(r.step, r.ts, bits(r.metrics)) for r in items_of(directory)] == [(s, 1.5, bits(m)) for s, m in rows]


def test_everything_else_that_is_logged_comes_back(tmp_path):
    """Types of columns, text, bodies with NaN."""
    journal = SQLiteJournal(tmp_path)
    spikes = SpikeBatch(
        5, {"logp": np.array([-0.5, np.nan], np.float32), "text": ["a", "日本"]}, "culprits", 2.0, rank=3
    )
    texts = CompletionBatch(6, {"completion": ["x" * 5000, ""], "reward": np.array([1.0, np.inf])}, 3.0)
    for item in (spikes, texts, Event("note", None, {"x": [float("nan")], "y": {"z": -math.inf}}, 4.0)):
        assert journal.append(item)

    one, two, three = items_of(tmp_path)
    assert (one.step, one.reason, one.ts, one.rank, list(one.columns["text"])) == (5, "culprits", 2.0, 3, ["a", "日本"])
    assert one.columns["logp"].dtype == np.float32
    np.testing.assert_array_equal(one.columns["logp"], spikes.columns["logp"])
    np.testing.assert_array_equal(two.columns["reward"], texts.columns["reward"])
    assert (three.kind, three.step, three.ts) == ("note", None, 4.0)
    assert math.isnan(three.body["x"][0])
    assert three.body["y"] == {"z": -math.inf}


@given(cut=st.integers(0, 400), garbage=st.binary(max_size=12))
def test_a_frame_cut_short_costs_itself_only(tmp_path_factory, cut, garbage):
    """A kill in the middle of a write, a full disk, then room again: what is whole is found."""
    directory = tmp_path_factory.mktemp("journal")
    journal = SQLiteJournal(directory)
    for step in range(4):
        journal.append_record(step, 0.0, {"kl": float(step)})
    (file,) = files_in(directory)
    whole = file.read_bytes()
    at = max(HEADER_BYTES, len(whole) - cut)
    file.write_bytes(whole[:at] + garbage)
    kept = [record.step for record in items_of(directory)]

    assert kept == list(range(len(kept)))
    file.write_bytes(whole[:HEADER_BYTES] + garbage + whole[HEADER_BYTES:])
    assert [record.step for record in items_of(directory)] == [0, 1, 2, 3]


@given(st.permutations(range(1, 12)), st.integers(1, 5))
def test_a_mark_knows_exactly_what_is_stored(order, size):
    """Threads are overtaken by each other between their number and the queue."""
    mark, stored = JournalPosition("x"), set()
    for at in range(0, len(order), size):
        mark = mark.after(order[at : at + size])
        stored.update(order[at : at + size])
        assert {number for number in range(1, 15) if mark.holds(number)} == stored
    assert (mark.upto, mark.above) == (11, frozenset())


@pytest.mark.parametrize("stored", [0, 1, 3])
def test_what_a_dead_process_left_is_stored_once_by_whoever_looks(tmp_path, stored):
    """In order, numbered on, of the attempt that logged it; the files are gone afterwards."""
    rows = [StepRecord(step, {"kl": step / 3}, 10.0 + step, attempt=1) for step in range(3)]
    store = left_behind(tmp_path, *rows, stored=stored)

    found = store.records("run")
    assert [(r.step, r.metrics, r.ts, r.attempt, r.seq) for r in found] == [
        (r.step, r.metrics, r.ts, 1, k) for k, r in enumerate(rows, start=1)
    ]
    assert [path for path in files_in(tmp_path / "run") if path.stat().st_size > HEADER_BYTES] == []
    writer = store.open_run(RunInfo("run"))
    assert (writer.run.attempt, writer.last_seq, store.records("run")) == (2, 3, found)
    writer.close()


def test_the_next_attempt_drains_before_it_begins(tmp_path):
    """Its rows come after."""
    store = left_behind(tmp_path, StepRecord(7, {"kl": 1.0}))
    writer = store.open_run(RunInfo("run"))
    writer.write([StepRecord(8, {"kl": 2.0}, attempt=2)])
    writer.close()

    assert [(r.step, r.attempt, r.seq) for r in store.records("run")] == [(7, 1, 1), (8, 2, 2)]


def test_an_end_that_was_noted_is_that_of_a_run_whose_process_is_gone(tmp_path):
    """Also beside rows; a run that was resumed since has another end."""
    store = left_behind(tmp_path, StepRecord(7, {"kl": 1.0}))
    (file,) = files_in(tmp_path / "run")
    kept = file.read_bytes()
    journal = SQLiteJournal(tmp_path)
    journal.append_record(8, 0.0, {"kl": 2.0})
    journal.note_end(RunState.FINISHED, "all steps done", 50.0)
    (noted,) = files_in(tmp_path)
    file.write_bytes(kept + noted.read_bytes()[HEADER_BYTES:])
    found = store.run("run")

    assert (found.state, found.state_reason, found.heartbeat_at) == (RunState.FINISHED, "all steps done", 50.0)
    assert len(store.records("run")) == 2
    store.open_run(RunInfo("run")).close()
    assert store.run("run").state is RunState.RUNNING


def test_a_drain_that_was_killed_is_finished_by_the_next(tmp_path):
    """Rows and mark are one transaction; the files go after it."""
    store = left_behind(tmp_path, *(StepRecord(step, {"kl": 0.5}) for step in range(3)))
    (file,) = files_in(tmp_path / "run")
    copy = file.read_bytes()
    assert len(store.records("run")) == 3
    file.write_bytes(copy)  # as if the drain had died before it removed it

    assert len(store.records("run")) == 3


def test_a_live_run_is_left_alone_by_readers(tmp_path):
    """Its own thread stores what is in its journal."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    number = writer.journal.append_record(1, 0.0, {"kl": 0.1})

    assert store.records("run") == []
    writer.write([StepRecord(1, {"kl": 0.1})], Progress(journaled=[number]))
    assert len(store.records("run")) == 1
    writer.close()
    assert len(store.records("run")) == 1
    assert files_in(tmp_path / "run") == []


def test_files_are_followed_by_others_and_go_when_all_of_them_is_stored(tmp_path):
    """However long the run, its journal stays small; what is not stored stays."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    metrics = {f"m{k}": float(k) for k in range(200)}
    for step in range(3 * SEGMENT_BYTES // 1600):
        number = writer.journal.append_record(step, 0.0, metrics)
        if step % 100 == 0:
            writer.write([], Progress(journaled=range(1, number)))
    sizes = [path.stat().st_size for path in files_in(tmp_path / "run")]

    assert len(sizes) <= 3
    assert sum(sizes) < 3 * SEGMENT_BYTES
    assert files_in(tmp_path / "run")[0].name != "run.journal-1"
    assert [record.step for _, record in writer.journal.missing()][-1] == step
    writer.close()


def test_threads_lose_nothing_to_each_other(tmp_path):
    """Sets of names, numbers, files: none is shared by a lock."""
    journal = SQLiteJournal(tmp_path)

    def log(who):
        for step in range(2000):
            journal.append_record(step, float(who), {f"of-{who}-{step % 3}": float(step), "x": 1.0})

    threads = [threading.Thread(target=log, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        journal.stored(journal.mark)  # makes the next file when one is half full
    found = items_of(tmp_path)

    assert sorted((r.ts, r.step) for r in found) == [(float(who), step) for who in range(4) for step in range(2000)]
    assert all(r.metrics[f"of-{int(r.ts)}-{r.step % 3}"] == r.step for r in found)


FULL = """
import resource, signal, sys
from pathlib import Path
from rlwatch.store.sqlite.journal import SQLiteJournal
journal = SQLiteJournal(Path(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print([bool(journal.append_record(step, 0.0, {"kl": 1.0})) for step in range(40)])
"""


def test_a_disk_without_room_is_a_number_that_is_not_given(tmp_path):
    """Nothing is raised; what was written before is there."""
    out = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)

    kept = eval(out.stdout)
    assert kept == sorted(kept, reverse=True)
    assert {True, False} == set(kept)
    assert len(items_of(tmp_path)) == sum(kept)


def test_what_is_no_journal_is_passed_over(tmp_path):
    """Anybody may put a file there."""
    store = left_behind(tmp_path, StepRecord(1, {"kl": 0.1}))
    for name, data in (
        ("run.journal-7", b"x" * 5000),
        ("run.journal-x", b""),
        ("run.journal-8", b"rlwatch1" + bytes(8)),
    ):
        (tmp_path / "run" / name).write_bytes(data)
    (tmp_path / "run" / "run.journal-9").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "run" / "run.journal-10")  # reading it would wait for ever

    assert [record.step for record in store.records("run")] == [1]
    assert Path("/etc/passwd").exists()
    store.open_run(RunInfo("run")).close()


def test_a_handed_on_limit_is_a_limit(tmp_path):
    """The writer thread takes what did not fit into its queue a lot at a time."""
    journal = SQLiteJournal(tmp_path)
    for step in range(10):
        journal.append_record(step, 0.0, {"kl": 1.0}, whole=step != 2)

    assert [number for number, _ in journal.missing({1}, 3)] == [2, 4, 5]  # the part of the third is not to be had
    assert [path.name for path in files_in(tmp_path)] == ["run.journal-1"]


class SlowDisk:
    """A clock that runs on by ``step`` seconds whenever it is looked at: so long does each write take."""

    def __init__(self) -> None:
        self.now, self.step = 1000.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_journal_on_a_slow_disk_is_left_alone_for_longer_each_time(tmp_path, monkeypatch):
    """A minute, two, four... an hour at most; the write that waited is kept, and a quick one is no reason to rest."""
    disk = SlowDisk()
    monkeypatch.setattr(time, "monotonic", disk)
    journal = SQLiteJournal(tmp_path)
    event = Event("note", 1, {}, 1.0)

    def rests() -> float:
        """Seconds until it writes again."""
        disk.step = 0.5
        assert journal.append_record(1, 1.0, {"kl": 1.0})
        disk.step, begun = 0.0, disk.now
        while not journal.append(event):
            assert not journal.append_record(1, 1.0, {"kl": 1.0})
            disk.now += 30.0
        return disk.now - begun

    assert [rests() for _ in range(8)] == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    disk.step = 0.25  # as long as a busy machine may take
    assert all(journal.append_record(step, 1.0, {"kl": 1.0}) for step in range(9))


def test_what_is_bulky_is_not_overtaken_by_thousands_of_rows(tmp_path, monkeypatch):
    """Rows and tokens lie in files of their own; whoever stores what a dead process left takes them in their order, or
    the mark would take the tokens for lost.
    """
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    steps = 6000
    with monkeypatch.context() as quick:
        quick.setattr(time, "monotonic", SlowDisk())  # on which nothing waits, however busy this machine is
        for step in range(steps):
            writer.journal.append_record(step, 0.0, {"kl": 1.0})
            if step % 1000 == 0:
                writer.journal.append(SpikeBatch(step, {"logp": np.array([1.0])}, "culprits"))
                writer.journal.tend()
    writer.db.close()
    writer.lock.release()

    assert len(store.records("run")) == steps
    assert [batch.step for batch in store.spikes("run")] == list(range(0, steps, 1000))


def begun(directory, names=("kl", "loss")):
    """A journal that has had a row of these names the long way."""
    journal = SQLiteJournal(directory)
    assert journal.keep(0, dict.fromkeys(names, 0.0)) is None
    assert journal.append_record(0, 1.5, dict.fromkeys(names, 0.0))
    return journal


NUMBERS = st.one_of(FLOATS, st.integers(-(2**70), 2**70), st.booleans(), FLOATS.map(np.float64))


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), NUMBERS, NUMBERS), min_size=1, max_size=6))
def test_a_row_that_goes_the_quick_way_is_the_same_row(tmp_path_factory, rows):
    """Bit for bit, in the file and as it was handed on, beside the same row that goes the long way."""
    directory = tmp_path_factory.mktemp("journal")
    journal = begun(directory)
    handed = []
    for step, kl, loss in rows:
        frame, shape = journal.keep(step, {"kl": kl, "loss": loss})
        handed.append(shape.opened(frame))
        journal.append_record(step, 1.5, {"kl": float(kl), "loss": float(loss)})
    (_, *items) = items_of(directory)
    quick, long = items[::2], items[1::2]

    assert [(r.step, bits(r.metrics)) for r in quick] == [(r.step, bits(r.metrics)) for r in long]
    assert [(step, bits(metrics)) for _, step, _, metrics in handed] == [(r.step, bits(r.metrics)) for r in long]
    assert [number for number, *_ in handed] == list(range(2, 2 * len(rows) + 1, 2))
    assert [ts for _, _, ts, _ in handed] == [r.ts for r in quick]


class Waits:
    """A number for which a device is waited for."""

    def __float__(self):
        raise AssertionError("somebody waited")


@pytest.mark.parametrize(
    "metrics",
    [
        {"kl": 1.0},
        {"loss": 1.0, "kl": 1.0},
        {"kl": 1.0, "loss": 1.0, "new": 1.0},
        {"kl": 1.0, "loss": None},
        {"kl": 1.0, "loss": "0.5"},
        {"kl": 1.0, "loss": Waits()},
        {"kl": 1.0, "loss": np.zeros(1)},
        {"kl": 1.0, "loss": np.complex128(1j)},
        {"kl": 1.0, 7: 1.0},
        {},
    ],
)
def test_a_row_unlike_the_last_one_goes_the_long_way(tmp_path, metrics):
    """Nothing is written of it, and none of its values is asked."""
    journal = begun(tmp_path)

    assert journal.keep(1, metrics) is None
    assert [item.step for item in items_of(tmp_path)] == [0]


def test_an_integer_that_is_no_float_is_for_the_long_way_to_explain(tmp_path):
    """As the caller documents: what packing raises is raised."""
    journal = begun(tmp_path)
    with pytest.raises((OverflowError, struct.error)):
        journal.keep(1, {"kl": 10**400, "loss": 1.0})
    assert [item.step for item in items_of(tmp_path)] == [0]


def test_rows_of_two_kinds_in_turn_go_the_quick_way(tmp_path):
    """Training and evaluation, say."""
    journal = begun(tmp_path)
    assert journal.append_record(1, 0.0, {"eval/kl": 1.0})
    for step in range(2, 8):
        assert journal.keep(step, {"eval/kl": 2.0} if step % 2 else {"kl": 3, "loss": True})

    assert [tuple(item.metrics.values()) for item in items_of(tmp_path)[2:]] == [(3.0, 1.0), (2.0,)] * 3


def test_the_quick_way_ends_where_there_may_be_no_room(tmp_path):
    """From half of the budget on every row is asked for; where a file is full the next is begun by the long way."""
    journal, wide = SQLiteJournal(tmp_path, budget_bytes=1 << 20), {f"m{k}": float(k) for k in range(500)}
    ways = []
    for step in range(400):
        kept = journal.keep(step, wide)
        ways.append(kept is not None)
        assert kept or journal.append_record(step, 0.0, wide) or journal.filled >= 1.0
        journal.tend()
    few = ways.index(True)

    assert (few, ways[-100:]) == (1, [False] * 100)
    assert 0.3 < sum(ways) / (0.5 * (1 << 20) / 4041) <= 1.0
    assert [item.step for item in items_of(tmp_path)] == list(range(len(items_of(tmp_path))))


def test_what_the_disk_takes_no_more_of_is_not_kept_the_quick_way(tmp_path):
    """It goes the long way, which says why, and so do the next rows until there is room again."""
    code = FULL.replace("journal.append_record(step, 0.0, {'kl': 1.0})", "0").replace(
        "print([bool(",
        "print([bool(journal.keep(step, {'kl': 1.0}) or ",
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)

    kept = eval(out.stdout)
    assert kept == sorted(kept, reverse=True)
    assert {True, False} == set(kept)
    assert len(items_of(tmp_path)) == sum(kept)


def test_threads_that_go_the_quick_way_lose_nothing_to_each_other(tmp_path):
    """Nor to the thread that makes and removes files."""
    store = open_store(tmp_path)
    writer = store.open_run(RunInfo("run"))
    journal, handed = writer.journal, []
    stop = threading.Event()

    def log(who):
        for step in range(4000):
            metrics = {f"of-{who}-{step % 3}": float(step), "x": 1.0}
            kept = journal.keep(step, metrics)
            handed.append(kept[1].opened(kept[0])[0] if kept else journal.append_record(step, 0.0, metrics))

    def tend():
        while not stop.is_set():
            writer.write([], Progress(journaled=[n for n in list(handed) if n < len(handed) // 2]))

    threads = [threading.Thread(target=log, args=(who,)) for who in range(4)]
    tending = threading.Thread(target=tend)
    for thread in (*threads, tending):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    tending.join()
    left = {number for number, _ in journal.missing()}

    assert len(set(handed)) == len(handed) == 16000
    assert {number for number in handed if not journal.mark.holds(number)} <= left
    writer.close()


def test_a_disk_that_makes_the_quick_way_wait_is_left_alone(tmp_path, monkeypatch):
    """As the long way does; the row that waited is kept."""
    disk = SlowDisk()
    monkeypatch.setattr(time, "monotonic", disk)
    journal = begun(tmp_path)
    disk.step = 0.5
    assert journal.keep(1, {"kl": 1.0, "loss": 1.0})
    disk.step = 0.0

    assert journal.keep(2, {"kl": 1.0, "loss": 1.0}) is None
    assert not journal.append_record(2, 0.0, {"kl": 1.0, "loss": 1.0})
    disk.now += 60.0
    assert journal.append_record(3, 0.0, {"kl": 1.0, "loss": 1.0})
    assert [item.step for item in items_of(tmp_path)] == [0, 1, 3]


TABLES = ("metric_set", "record", "block", "chunk", "level", "event")


def tables_of(path):
    """Contents of the run's tables, value by value."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return {table: db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in TABLES}


@pytest.mark.parametrize("at_once", [1, 100, 1000])
def test_rows_as_a_journal_packed_them_are_stored_to_the_same_bytes(tmp_path, at_once):
    """Blocks, chunks and the rows that stay rows; other rows and events between them."""
    values = np.random.default_rng(0).normal(size=(1700, 3))
    values[5::7, 1] = np.nan
    packed, plain = [], []
    for k, row in enumerate(values):
        of = (k * 3, 1.5 * k, 1, 0, k + 1)
        if k % 400 == 399:
            for each in (packed, plain):
                each.append(Event("note", k * 3, {}, 1.0, 1, k + 1))
        elif k % 50 == 49:
            for each in (packed, plain):
                each.append(StepRecord(of[0], {"kl": float(row[0]), "other": 1.0}, *of[1:]))
        else:
            metrics = dict(zip(("kl", "loss", "reward"), map(float, row), strict=True))
            plain.append(StepRecord(of[0], metrics, *of[1:]))
            packed.append(StepRecord(of[0], PackedMetrics(tuple(metrics), row.tobytes()), *of[1:]))
    found = []
    for name, items in (("packed", packed), ("plain", plain)):
        store = open_store(tmp_path / name)
        writer = store.open_run(RunInfo("run"))
        for begin in range(0, len(items), at_once):
            writer.write(items[begin : begin + at_once])
        found.append((tables_of(tmp_path / name / "run" / "run.db"), repr(store.records("run"))))
        writer.close()

    assert found[0] == found[1]


def test_packed_metrics_are_a_mapping_like_any_other():
    """As a dictionary of the same numbers in the same order."""
    plain = {"kl": 0.5, "loss": -0.0}
    packed = PackedMetrics(tuple(plain), struct.pack("<2d", *plain.values()))

    assert (dict(packed), packed == plain, plain == packed, len(packed), list(packed)) == (
        plain,
        True,
        True,
        2,
        [*plain],
    )
    assert (repr(packed), packed.get("none"), "kl" in packed, math.copysign(1.0, packed["loss"])) == (
        repr(plain),
        None,
        True,
        -1.0,
    )
