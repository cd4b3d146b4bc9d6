"""The recorder at its edges: large backlogs, stamps, counters that travel, one warning a name."""

import logging

import numpy as np
import pytest

from rlwatch.recorder.intake import BoundedQueue, admit, numbers
from rlwatch.recorder.losses import Counters
from rlwatch.recorder.writer import BATCH_LIMIT, Writer
from rlwatch.records import Event, SpikeBatch


class Batches:
    """Keeps what it is given, batch by batch."""

    def __init__(self):
        self.batches, self.closed = [], 0

    def write(self, batch):
        self.batches.append(list(batch))

    def tick(self):
        pass

    def close(self):
        self.closed += 1

    @property
    def items(self):
        return [item for batch in self.batches for item in batch]


def written(*queued, counters=None, **kwargs):
    """What a writer makes of what is in its queue."""
    sink, queue = Batches(), BoundedQueue(10_000)
    for item in queued:
        queue.offer(item)
    writer = Writer(queue, [sink], counters or Counters(), interval=0.001, **kwargs)
    writer.start()
    assert writer.stop(10.0)
    return sink


def entry(step, **metrics):
    return admit(metrics or {"m": 1.0}, step, 2.5)


def test_a_long_queue_is_written_in_batches_of_a_thousand_in_order():
    """And all of it before the end."""
    sink = written(*[entry(step) for step in range(2 * BATCH_LIMIT + 7)])

    assert [len(batch) for batch in sink.batches] == [BATCH_LIMIT, BATCH_LIMIT, 7]
    assert [item.step for item in sink.items] == list(range(2 * BATCH_LIMIT + 7))
    assert [item.seq for item in sink.items] == list(range(1, 2 * BATCH_LIMIT + 8))
    assert sink.closed == 1


def test_everything_is_stamped_with_its_attempt_and_only_the_stream_is_numbered():
    """Records and events count on; spikes have no number."""
    spikes = SpikeBatch(4, {"logp": np.zeros(1)}, attempt=9, rank=9)
    sink = written(entry(3), Event("note", attempt=9, seq=9), spikes, entry(4), attempt=2, rank=1, last_seq=40)

    record, event, batch, last = sink.items
    assert (record.attempt, record.rank, record.seq, record.ts) == (2, 1, 41, 2.5)
    assert (event.attempt, event.seq) == (2, 42)
    assert (batch.attempt, batch.rank, batch.step) == (2, 1, 4)
    assert last.seq == 43


def test_rank_0_records_tokens_for_other_ranks():
    """Of several ranks only it records: what it is given of another one keeps that rank."""
    sink = written(SpikeBatch(4, {"logp": np.zeros(1)}, rank=3), rank=0)

    assert [batch.rank for batch in sink.items] == [3]


def test_a_record_of_nothing_takes_no_number():
    """The stream has no gaps."""
    sink = written(entry(1), entry(2, text="high"), entry(3, nothing=None), entry(4))

    assert [(item.step, item.seq) for item in sink.items] == [(1, 1), (4, 2)]


def test_a_counter_travels_with_the_next_record_once_it_has_moved():
    """Whatever was lost or went wrong, and not again until it moves."""
    counters = Counters()
    counters.add("dropped", 3)
    counters.add("bad_values")
    sink = written(entry(1), entry(2), counters=counters)

    lost = {"rlwatch/dropped": 3.0, "rlwatch/bad_values": 1.0}
    assert [item.metrics for item in sink.items] == [{"m": 1.0, **lost}, {"m": 1.0}]


def test_each_counter_warns_once_and_counts_always(caplog):
    """A broken metric a step must not fill the log."""
    counters = Counters()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        for n in (1, 2, 3):
            counters.warn("bad_values", "not a number", n)
        counters.warn("errors", "disk")

    assert (counters["bad_values"], counters["errors"], counters["never"]) == (6, 1, 0)
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == ["not a number", "disk"]
    assert counters.snapshot() == {"bad_values": 6, "errors": 1}


def test_a_snapshot_of_counters_does_not_move():
    """Later counts are later."""
    counters = Counters()
    counters.add("dropped")
    before = counters.snapshot()
    counters.add("dropped")

    assert before == {"dropped": 1}


@pytest.mark.parametrize(("limit", "taken"), [(0, []), (2, [0, 1]), (9, [0, 1, 2])])
def test_a_drain_takes_the_oldest_up_to_its_limit(limit, taken):
    """The rest stays."""
    queue = BoundedQueue(3)
    offered = [queue.offer(i) for i in range(5)]

    assert offered == [True, True, True, False, False]
    assert queue.drain(limit) == taken
    assert len(queue) == 3 - len(taken)


@pytest.mark.parametrize("value", ["0.5", b"1", [1.0], {"a": 1}, np.zeros(2), object(), 1 + 2j])
def test_what_is_no_number_is_named_in_the_warning(value, caplog):
    """With its value cut short."""
    counters = Counters()

    assert numbers(entry(1, good=2, odd=value), counters) == {"good": 2.0}
    assert counters["bad_values"] == 1
    assert "metric 'odd' is not a number" in caplog.text


def test_what_is_logged_is_copied_at_once():
    """A loop may reuse its dictionary."""
    metrics = {"kl": 0.1}
    taken = admit(metrics, 1, 0.0)
    metrics["kl"], metrics["late"] = 9.0, 9.0

    assert numbers(taken, Counters()) == {"kl": 0.1}
