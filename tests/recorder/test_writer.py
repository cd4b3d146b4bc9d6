"""The writer thread: order kept, failures counted, deadlines honoured."""

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.clock import ManualClock
from rlwatch.errors import StoreFullError
from rlwatch.layers import DerivedLayers
from rlwatch.recorder.intake import BoundedQueue, Intake, admit
from rlwatch.recorder.losses import MOST_SPANS, Counters
from rlwatch.recorder.writer import BATCH_LIMIT, FIRST_RETRY_S, FORECASTS_WAITING, FOUND_STORED_S, StoreSink, Writer
from rlwatch.records import SHED, Event, Finding, ForecastRecord, RunInfo, Severity, StepRecord
from rlwatch.store.sqlite.journal import SQLiteJournal, journals_in


class Collect:
    """A sink that keeps everything."""

    def __init__(self, fail=False):
        self.items, self.closed, self.ticks, self.fail = [], False, 0, fail

    def write(self, batch):
        if self.fail:
            raise RuntimeError("sink is broken")
        self.items.extend(batch)

    def tick(self):
        self.ticks += 1

    def close(self):
        self.closed = True


def recorder(*sinks, size=100, **kwargs):
    queue, counters = BoundedQueue(size), Counters()
    return queue, counters, Writer(queue, sinks, counters, interval=0.001, **kwargs)


def entry(step, **metrics):
    return admit(metrics or {"m": float(step)}, step, 0.0)


def test_order_is_kept_and_seq_continues():
    """Records and events share one sequence."""
    sink = Collect()
    queue, _, writer = recorder(sink, attempt=3, last_seq=41)
    for item in (entry(1), Event("note", 1), entry(0)):
        queue.offer(item)

    writer.start()
    assert writer.stop(5.0)

    assert [(type(i).__name__, i.seq, i.attempt) for i in sink.items] == [
        ("StepRecord", 42, 3),
        ("Event", 43, 3),
        ("StepRecord", 44, 3),
    ]
    assert sink.closed


def test_a_broken_sink_does_not_starve_the_others():
    """Counted once per failure, the thread lives."""
    broken, good = Collect(fail=True), Collect()
    queue, counters, writer = recorder(broken, good)
    queue.offer(entry(1))
    writer.start()
    writer.flush(5.0)
    queue.offer(entry(2))
    writer.stop(5.0)

    assert [r.step for r in good.items] == [1, 2]
    assert counters["errors"] == 2


def test_swallowed_errors_travel_with_the_next_record():
    """The error count is itself a metric of the run."""
    good = Collect()
    queue, _, writer = recorder(Collect(fail=True), good)
    queue.offer(entry(1))
    writer.start()
    writer.flush(5.0)
    queue.offer(entry(2))
    writer.stop(5.0)

    assert "rlwatch/errors" not in good.items[0].metrics
    assert good.items[1].metrics["rlwatch/errors"] == 1.0


def test_stopping_gives_up_at_the_deadline():
    """A sink that hangs costs the deadline, not the exit."""
    release = threading.Event()
    sink = Collect()
    sink.write = lambda batch: release.wait(30.0)
    queue, _, writer = recorder(sink)
    queue.offer(entry(1))
    writer.start()

    assert writer.stop(0.05) is False
    release.set()
    assert writer.stop(5.0)


def test_a_record_with_nothing_usable_vanishes():
    """Its bad values were counted; an empty record would mean nothing."""
    sink = Collect()
    queue, counters, writer = recorder(sink)
    queue.offer(entry(1, bad="text"))
    writer.start()
    writer.stop(5.0)

    assert sink.items == []
    assert counters["bad_values"] == 1


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 7))
def test_the_queue_never_holds_more_than_its_bound_and_loses_nothing_it_took(drains, size):
    """Offers and drains in any interleaving."""
    queue, taken, out = BoundedQueue(size), [], []
    for number, drain in enumerate(drains):
        if queue.offer(number):
            taken.append(number)
        assert len(queue) <= size
        out += queue.drain(drain)
    out += queue.drain(1000)

    assert taken == out


def test_a_queue_needs_room():
    """A bound below one is a mistake."""
    with pytest.raises(ValueError, match="got 0"):
        BoundedQueue(0)


class Lazy:
    """A judge with nothing to do, and who asked it what."""

    done = ended = True

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *_: self.asked.append(name)


def test_the_judge_is_told_to_hurry_as_soon_as_the_run_ends_and_not_when_the_queue_is_empty():
    """While the queue is still being drained it works, too."""
    judge = Lazy()
    _, _, writer = recorder(Collect(), judge=judge)
    writer.stop(0.0)  # before the thread was even started

    assert judge.asked == ["hurry"]


class Stuck(Collect):
    """A sink that writes nothing before its gate opens."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def write(self, batch):
        self.gate.wait(120.0)


def test_the_judge_waits_for_its_findings_to_be_stored_and_not_for_each_batch_of_forecasts():
    """Alerts are told of what is stored; forecasts tell nobody."""
    sink = Stuck()
    queue, _, writer = recorder(sink)
    queue.offer(entry(1))
    writer.start()

    def kept(*batches):
        keeping = threading.Thread(target=lambda: [writer.keep(batch) for batch in batches], daemon=True)
        keeping.start()
        return keeping

    forecasts = kept(*([ForecastRecord(step, {"forecast/p50": 0.1}, {})] for step in range(FORECASTS_WAITING)))
    forecasts.join(0.8 * FOUND_STORED_S * FORECASTS_WAITING)
    assert not forecasts.is_alive()
    finding = kept([Finding("kl", "kl_drift", Severity.WARNING, 3, 3, "it drifts")])
    finding.join(0.1)
    assert finding.is_alive()
    sink.gate.set()
    finding.join(60.0)
    assert writer.stop(60.0)


class FullDisk:
    """A run writer on a disk that is full until told otherwise."""

    def __init__(self):
        self.run, self.last_seq, self.full, self.items, self.beats = RunInfo("r"), 0, True, [], 0
        self.journal = None

    def write(self, items):
        if self.full:
            raise StoreFullError("the disk is full")
        self.items.extend(items)

    def heartbeat(self, now, stage="", since=None):
        self.beats += 1


def records(*steps):
    return [StepRecord(step, {"m": 1.0}, seq=step) for step in steps]


def test_a_full_disk_is_waited_out():
    """What could not be written is kept and written first when there is room again."""
    disk, counters, clock = FullDisk(), Counters(), ManualClock()
    sink = StoreSink(disk, counters, clock)
    sink.write(records(1, 2))
    disk.full = False
    clock.advance(FIRST_RETRY_S)
    sink.write(records(3))

    assert [r.step for r in disk.items] == [1, 2, 3]
    assert counters["errors"] == 1
    assert counters["dropped"] == 0


def test_the_backlog_is_bounded_and_its_drops_are_counted():
    """A disk that stays full must not become memory."""
    disk, counters = FullDisk(), Counters()
    sink = StoreSink(disk, counters, ManualClock(), max_backlog=3)
    sink.write(records(1, 2))
    sink.write(records(3, 4, 5))
    disk.full = False
    sink.close()

    assert [r.step for r in disk.items] == [1, 2, 3]
    assert counters["dropped"] == 2


class CountedJournal(SQLiteJournal):
    """Counts how often it is read."""

    readings = 0

    def missing(self, *given):
        self.readings += 1
        return super().missing(*given)


class Disk(FullDisk):
    """A run writer that notes with its journal what it stored."""

    def __init__(self, journal):
        super().__init__()
        self.full, self.journal = False, journal

    def write(self, items, progress=None):
        super().write(items)
        if progress is not None:
            self.journal.stored(self.journal.mark.after(progress.journaled))

    def close(self):
        pass


def test_what_did_not_fit_into_the_queue_is_read_of_the_journal_a_few_times_only(tmp_path):
    """Each reading begins with a file's first row: one a round would read a fast run's rows again and again."""
    journal, counters = CountedJournal(tmp_path), Counters()
    intake, disk = Intake(BoundedQueue(5), journal, counters), Disk(journal)
    for step in range(4 * BATCH_LIMIT):
        intake.put(entry(step))
    writer = Writer(intake, [StoreSink(disk, counters, ManualClock())], counters, interval=0.001)
    writer.start()

    assert writer.stop(60.0)
    assert [record.step for record in disk.items] == list(range(4 * BATCH_LIMIT))
    assert journal.readings <= 3  # all of it, and twice that there is nothing more


def test_what_the_journal_has_at_the_end_is_no_loss(tmp_path):
    """Whoever opens the run next brings it into the store; what was not journaled is counted."""
    disk, counters = FullDisk(), Counters()
    disk.journal = SQLiteJournal(tmp_path)
    numbers = [disk.journal.append_record(step, 0.0, {"m": 1.0}) for step in (1, 2)]
    sink = StoreSink(disk, counters, ManualClock())
    sink.write(records(1, 2, 3), numbers=numbers)
    sink.close()

    assert counters["dropped"] == 1


def test_a_journal_that_was_removed_has_nothing(tmp_path):
    """It is gone with the run's directory."""
    disk, counters = FullDisk(), Counters()
    disk.journal = SQLiteJournal(tmp_path)
    numbers = [disk.journal.append_record(step, 0.0, {"m": 1.0}) for step in (1, 2)]
    sink = StoreSink(disk, counters, ManualClock())
    sink.write(records(1, 2), numbers=numbers)
    for file in tmp_path.iterdir():
        file.unlink()
    sink.close()

    assert counters["dropped"] == 2


def test_a_disk_still_full_at_the_end_is_counted_as_a_loss():
    """Nothing is lost silently."""
    disk, counters = FullDisk(), Counters()
    sink = StoreSink(disk, counters, ManualClock())
    sink.write(records(1, 2))
    sink.close()

    assert counters["dropped"] == 2


class NearlyFullDisk(FullDisk):
    """A disk that holds three items once what was reserved is given up."""

    def __init__(self, *, journal):
        super().__init__()
        self.journal, journal.make_room = journal, self.give_up
        self.room = 0

    def give_up(self):
        self.room = 3

    def write(self, items, progress=None):
        if len(items) > self.room:
            raise StoreFullError("the disk is full")
        self.items.extend(items)


def test_what_was_found_and_which_rows_are_lost_go_into_the_room_that_was_kept_for_the_end():
    """Findings, and one event; the counters know the steps, too."""
    kept = SimpleNamespace(missing=list, note_lost=pytest.fail, on_disk=lambda: True)
    disk, counters = NearlyFullDisk(journal=kept), Counters()
    sink = StoreSink(disk, counters, ManualClock())
    sink.write(records(5, 6, 7, 20))
    found = Finding("kl", "kl_drift", Severity.WARNING, 6, 5, "it drifts", seq=2)
    sink.found([found])
    sink.close()

    assert disk.items[0] is found
    (told,) = disk.items[1:]
    assert (told.kind, told.step, told.body["n"], told.body["first_step"], told.body["last_step"]) == (
        SHED,
        20,
        4,
        5,
        20,
    )
    assert "the disk is full" in told.body["why"]
    assert [(span.first, span.last, span.rows) for span in counters.lost()] == [(5, 7, 3), (20, 20, 1)]


def test_rows_of_a_journal_that_its_disk_refuses_are_counted_as_lost(tmp_path):
    """The kernel still shows them, and drops them with the disk: a file that is gone stands for that disk here."""
    disk, journal, counters = FullDisk(), SQLiteJournal(tmp_path), Counters()
    disk.journal = journal
    numbers = [journal.append_record(step, 0.0, {"m": 1.0}) for step in (1, 2)]
    assert journal.on_disk()
    sink = StoreSink(disk, counters, ManualClock())
    sink.write(records(1, 2), numbers=numbers)
    for path in tmp_path.glob("run.journal-*"):
        path.unlink()

    assert not journal.on_disk()
    sink.close()
    assert [(span.first, span.last, span.rows) for span in counters.lost()] == [(1, 2, 2)]


def test_where_the_store_takes_nothing_at_all_the_journal_tells_what_is_lost(tmp_path):
    """Into room that it took when it was begun: the next writer brings it into the store."""
    disk, journal = FullDisk(), SQLiteJournal(tmp_path)
    disk.journal = journal
    numbers = [journal.append_record(step, 0.0, {"m": 1.0}) for step in (1, 2)]
    sink = StoreSink(disk, Counters(), ManualClock())
    sink.write(records(1, 2, 3, 4), numbers=numbers)
    sink.close()

    (told,) = [item for journaled in journals_in(tmp_path).values() for _, item in journaled if isinstance(item, Event)]
    assert (told.kind, told.body["n"], told.body["first_step"], told.body["last_step"]) == (SHED, 2, 3, 4)


@given(st.lists(st.integers(0, 40), max_size=60))
def test_lost_rows_are_told_by_few_spans_that_hold_them_all(steps):
    """However many and in whatever order."""
    counters = Counters()
    for step in steps:
        counters.lose(step)
    spans = counters.lost()

    assert sum(span.rows for span in spans) == len(steps)
    assert all(any(span.first <= step <= span.last for span in spans) for step in steps)
    assert len(spans) <= MOST_SPANS


def test_an_item_no_store_can_take_does_not_block_those_behind_it():
    """Only trouble that may pass is worth trying again; the loss is counted."""
    disk, counters = FullDisk(), Counters()
    disk.full = False
    sink = StoreSink(disk, counters, ManualClock())
    taken = disk.items.extend
    disk.write = lambda items: (_ for _ in ()).throw(ValueError("poison"))
    sink.write(records(1))
    disk.write = taken
    sink.write(records(2))

    assert [r.step for r in disk.items] == [2]
    assert counters["dropped"] == 1


def test_the_heartbeat_goes_on_without_records():
    """A slow step is not a dead trainer."""
    disk, clock = FullDisk(), ManualClock()
    sink = StoreSink(disk, Counters(), clock)
    for _ in range(10):
        sink.tick()
        clock.advance(1.0)

    assert disk.beats == 2


def test_a_flush_waits_for_more_than_one_batch():
    """Thousands of records that were queued before it."""
    sink = Collect()
    queue, _, writer = recorder(sink, size=10_000)
    for step in range(5_500):
        queue.offer(entry(step))
    writer.start()

    assert writer.flush(30.0)
    assert len(sink.items) == 5_500
    assert writer.stop(5.0)


def quickly(tmp_path, rows, size=1000, **kwargs):
    """What a sink is given of ``rows``, (step, metrics), that go the quick way where they may; the ways; the journal."""
    journal, counters, sink = SQLiteJournal(tmp_path), Counters(), Collect()
    intake, disk = Intake(BoundedQueue(size), journal, counters), Disk(journal)
    ways = []
    for step, metrics in rows:
        ways.append(intake.quick(metrics, step))
        if not ways[-1]:
            intake.put(admit(metrics, step, 0.0))
    writer = Writer(intake, [StoreSink(disk, counters, ManualClock()), sink], counters, interval=0.001, **kwargs)
    writer.start()
    assert writer.stop(60.0)
    assert counters.snapshot() == {}
    return sink.items, ways, journal


ROWS = [(step, {"kl": step / 7, "loss": float("nan") if step % 5 == 0 else -step}) for step in range(50)]


@pytest.mark.parametrize("size", [1000, 7])
def test_rows_of_the_quick_way_are_stored_as_any_others(tmp_path, size):
    """Same steps, numbers and order, each once, also where the queue is too short and the journal is read."""
    given, ways, journal = quickly(tmp_path, ROWS, size=size, attempt=3, rank=2, last_seq=41)

    assert ways == [False] + [True] * 49
    assert [(r.step, r.attempt, r.rank, r.seq) for r in given] == [(k, 3, 2, 42 + k) for k in range(50)]
    assert [repr(dict(r.metrics)) for r in given] == [
        repr({name: float(value) for name, value in metrics.items()}) for _, metrics in ROWS
    ]
    assert journal.missing() == []


def test_what_is_known_beside_goes_with_the_next_row_of_the_quick_way(tmp_path):
    """Once, and under names that the row has not."""
    beside = iter([{"system/cpu": 0.5}])
    given, ways, _ = quickly(tmp_path, ROWS, other_metrics=lambda: next(beside, {}))

    assert all(ways[1:])
    assert [dict(r.metrics).get("system/cpu") for r in given] == [0.5] + [None] * 49


def test_layers_are_derived_of_rows_of_the_quick_way(tmp_path):
    """As of any other row: none is passed by."""
    rows = [(k, {f"grad_layer/{layer}": 1.0 + 0.1 * ((k * layer) % 3) for layer in range(4)}) for k in range(40)]
    given, ways, _ = quickly(tmp_path, rows)
    expected = [record.metrics for record in DerivedLayers().added(StepRecord(k, metrics) for k, metrics in rows)]

    assert all(ways[1:])
    assert [dict(r.metrics) for r in given] == expected
    assert any(len(metrics) > 4 for metrics in expected)


def test_rows_that_were_read_of_the_journal_are_not_taken_once_more(tmp_path):
    """A thread may queue its row after others made the queue spill."""
    journal, counters, sink = SQLiteJournal(tmp_path), Counters(), Collect()
    intake = Intake(BoundedQueue(100), journal, counters)
    intake.put(entry(0))
    assert intake.quick({"m": 1.0}, 1)
    intake.spilling = True
    assert intake.quick({"m": 2.0}, 2)
    late = journal.keep(3, {"m": 3.0})
    writer = Writer(intake, [StoreSink(Disk(journal), counters, ManualClock()), sink], counters, interval=0.001)
    writer.start()
    assert writer.flush(30.0)
    intake.queue.offer(late)
    assert writer.stop(30.0)

    assert [record.step for record in sink.items] == [0, 1, 2, 3]
