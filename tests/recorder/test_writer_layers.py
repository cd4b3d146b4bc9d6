"""Layer metrics reach the store with the layer norms they are computed of, whoever logged those."""

import math

import pytest

from rlwatch.recorder.intake import BoundedQueue, admit
from rlwatch.recorder.losses import Counters
from rlwatch.recorder.writer import Writer


class Collect:
    """A sink that keeps everything."""

    def __init__(self):
        self.records = []

    def write(self, batch):
        self.records.extend(batch)

    def tick(self):
        """Nothing to do."""

    def close(self):
        """Nothing to do."""


def recorded(*entries):
    """What the writer makes of (step, metrics) pairs."""
    queue, sink, counters = BoundedQueue(1000), Collect(), Counters()
    writer = Writer(queue, [sink], counters, interval=0.001)
    for step, metrics in entries:
        queue.offer(admit(metrics, step, 0.0))
    writer.start()
    assert writer.stop(5.0)
    assert counters["errors"] == 0
    return sink.records


def norms(step, times=1.0):
    return {f"grad_layer/layers.{i}": (1.0 + i) * (2.0 + step % 3) * (times if i == 2 else 1.0) for i in range(5)}


def test_layer_norms_bring_layer_metrics_with_them():
    """One record, as logged and with what follows; a spike of one layer is in it at its step."""
    records = recorded(*((step, norms(step, 50.0 if step == 30 else 1.0)) for step in range(32)))

    assert records[0].metrics["layers/max_share"] == pytest.approx(25 / 55)
    assert "layers/rise" not in records[0].metrics
    assert records[30].metrics["layers/rise"] == pytest.approx(50.0)
    assert [r.metrics["layers/spiking"] for r in records[29:]] == [0.0, 1.0, 0.0]
    assert records[29].metrics["layers/heterogeneity"] == pytest.approx(0.0, abs=1e-9)
    assert records[30].metrics.items() >= norms(30, 50.0).items()


def test_other_records_are_left_alone():
    """Before, between and after."""
    entries = [(0, {"m": 1.0}), (0, norms(0)), (0, {"m": 2.0}), (1, {"m": 3.0})]

    assert [set(r.metrics) for r in recorded(*entries)][::2] == [{"m"}, {"m"}]


def test_layers_logged_in_pieces_are_put_together():
    """The last record of a step holds the metrics of all its layers: later values of a name win."""
    whole = norms(0)
    pieces = [(0, {name: value}) for name, value in whole.items()]

    assert recorded(*pieces)[-1].metrics["layers/participation"] == pytest.approx(
        recorded((0, whole))[0].metrics["layers/participation"]
    )


def test_broken_layers_are_stored_as_they_are_and_say_nothing():
    """NaN stays NaN; there are no layer metrics of a step that has only such."""
    [record] = recorded((0, {"grad_layer/a": math.nan, "grad_layer/b": math.inf}))

    assert math.isnan(record.metrics["grad_layer/a"])
    assert set(record.metrics) == {"grad_layer/a", "grad_layer/b"}
