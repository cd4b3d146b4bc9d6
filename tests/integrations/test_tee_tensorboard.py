"""Mirroring TensorBoard: what is recorded, under which run, and that the event files never notice."""

import json
import logging
import sys

import numpy as np
import pytest
import tensorboardX
import torch
from preloaded import run_program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils import tensorboard

import rlwatch
from rlwatch.errors import ConfigError, MissingExtraError, StoreError
from rlwatch.forecast import Forecast
from rlwatch.monitor import forecasting

pytestmark = pytest.mark.torch
WRITERS = {"torch": tensorboard.SummaryWriter, "tensorboardX": tensorboardX.SummaryWriter}


@pytest.fixture(params=sorted(WRITERS))
def writer(request, tmp_path):
    """Makes writers of either library under the test's directory."""
    return lambda name="run": WRITERS[request.param](str(tmp_path / name))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.delenv("RLWATCH_RUN_ID", raising=False)
    return str(tmp_path / "store")


@pytest.fixture
def tee(store):
    """Begins a mirror that ends with the test."""
    begun = []

    def begin(**kwargs):
        begun.append(rlwatch.tee_tensorboard(**{"store": store, **kwargs}))
        return begun[-1]

    yield begin
    for one in begun:
        one.untee()


@pytest.fixture
def records(store):
    """Of a run: its records, each a (step, metrics)."""

    def read(run):
        assert run.flush()
        return [(r.step, dict(r.metrics)) for r in rlwatch.open_store(store).records(run.info.run_id)]

    return read


def test_the_scalars_of_a_step_are_one_record(tee, writer, records):
    """Writers made before and after the mirror; the last step is recorded when the writer closes."""
    early = writer()
    mirror = tee()
    for step in (10, 20):
        early.add_scalar("train/loss", step / 10, step)
        early.add_scalar(tag="train/kl", scalar_value=np.float32(0.5), global_step=step)
    early.close()

    assert records(mirror.run) == [
        (10, {"train/loss": 1.0, "train/kl": 0.5}),
        (20, {"train/loss": 2.0, "train/kl": 0.5}),
    ]


def test_a_flush_records_what_was_gathered(tee, writer, records):
    """Hugging Face flushes after every log: a NaN is judged then, not a step later."""
    mirror, w = tee(), writer()
    w.add_scalar("loss", float("nan"), 3)
    before = records(mirror.run)
    w.flush()

    assert before == []
    ((step, row),) = records(mirror.run)
    assert step == 3
    assert np.isnan(row["loss"])


def test_scalars_of_one_chart_are_named_by_it(tee, writer, records):
    """add_scalars writes several lines into one chart."""
    mirror, w = tee(), writer()
    w.add_scalars("clip", {"low": 0.1, "high": 0.2}, 5)
    w.close()

    assert records(mirror.run) == [(5, {"clip/low": 0.1, "clip/high": 0.2})]


def test_a_tensor_is_recorded_as_it_was(tee, writer, records):
    """Overwritten before the record ends."""
    mirror, w, loss = tee(), writer(), torch.tensor(1.0)
    w.add_scalar("loss", loss, 1)
    loss.fill_(9.0)
    w.close()

    assert records(mirror.run) == [(1, {"loss": 1.0})]


def test_a_scalar_without_a_step_is_at_the_last_one_said(tee, writer, records):
    """Such as the learning rate a callback forgot to give a step."""
    mirror, w = tee(), writer()
    w.add_scalar("loss", 1.0, 7)
    w.add_scalar("lr", 0.1)
    w.close()

    assert records(mirror.run) == [(7, {"loss": 1.0, "lr": 0.1})]


def test_where_no_step_was_ever_said_they_are_counted(tee, writer, records):
    """TensorBoard would show all of them at step 0."""
    mirror, w = tee(), writer()
    for value in (1.0, 2.0):
        w.add_scalar("loss", value)
        w.add_scalar("kl", value)
    w.close()

    assert records(mirror.run) == [(0, {"loss": 1.0, "kl": 1.0}), (1, {"loss": 2.0, "kl": 2.0})]


def test_steps_may_go_back(tee, writer, records):
    """An evaluation of an earlier checkpoint is recorded where it belongs."""
    mirror, w = tee(), writer()
    for step in (1, 2, 1):
        w.add_scalar(f"x{step}", 1.0, step)
    w.close()

    assert [step for step, _ in records(mirror.run)] == [1, 2, 1]


def test_each_directory_is_a_run_remembered_beside_its_files(tee, writer, store, tmp_path):
    """As TensorBoard sees it; a writer opened there again continues it."""
    mirror = tee(project="p")
    for name in ("a", "b", "a"):
        w = writer(name)
        w.add_scalar("loss", 1.0, 1)
        w.close()
    first, second, third = (run.info for run in mirror.runs)

    assert (first.name, first.project, second.name) == ("a", "p", "b")
    assert (third.run_id, third.attempt) == (first.run_id, 2)
    assert second.run_id != first.run_id
    assert json.loads((tmp_path / "a" / "rlwatch.json").read_text()) == {"run_id": first.run_id}
    assert {run.state for run in rlwatch.open_store(store).runs()} == {"finished"}


def test_an_identity_from_outside_is_that_of_the_first_directory(tee, writer, monkeypatch):
    """The next ones are numbered: two runs cannot be one."""
    monkeypatch.setenv("RLWATCH_RUN_ID", "job7")
    mirror = tee()
    for name in ("a", "b", "a"):
        w = writer(name)
        w.add_scalar("loss", 1.0, 1)
        w.close()

    assert [run.info.run_id for run in mirror.runs] == ["job7", "job7-2", "job7"]


def test_a_given_run_takes_all_and_is_left_open(writer, store, records):
    """Beside a watched trainer."""
    with rlwatch.init(store=store) as run:
        with rlwatch.tee_tensorboard(run=run):
            for name in ("a", "b"):
                w = writer(name)
                w.add_scalar(name, 1.0, 1)
                w.close()

        assert run.active
        assert records(run) == [(1, {"a": 1.0}), (1, {"b": 1.0})]


def events(directory):
    """What TensorBoard reads from the event files."""
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_event_files_are_the_same_with_and_without(tee, writer, tmp_path):
    """Scalars, text and histograms, return values, and no file of TensorBoard's more or fewer."""
    seen = []
    for name in ("plain", "mirrored"):
        if name == "mirrored":
            tee()
        w = writer(name)
        returned = [w.add_scalar("loss", step / 3, step) for step in range(5)]
        returned += [w.add_scalars("c", {"a": 1.0}, 2), w.add_text("note", "x", 3), w.flush()]
        w.add_histogram("h", np.arange(5.0), 4)
        returned.append(w.close())
        files = sorted(p.relative_to(tmp_path / name).parts[:-1] for p in (tmp_path / name).rglob("events*"))
        seen.append((events(tmp_path / name), returned, files))

    assert seen[0] == seen[1]
    assert seen[0][0]["loss"][4] == (4, pytest.approx(4 / 3))


def test_after_untee_writers_are_as_they_were(tee, writer, records):
    """Functions restored, and what was gathered is recorded."""
    methods = [(kind, name) for kind in WRITERS.values() for name in ("add_scalar", "add_scalars", "flush", "close")]
    before = [getattr(kind, name) for kind, name in methods]
    mirror, w = tee(), writer()
    w.add_scalar("loss", 1.0, 1)
    mirror.untee()
    w.add_scalar("loss", 2.0, 2)

    assert [getattr(kind, name) for kind, name in methods] == before
    assert records(mirror.run) == [(1, {"loss": 1.0})]


def test_what_the_writer_refuses_is_raised_and_not_recorded(tee, writer, records):
    """The user's error is the user's."""
    mirror, w = tee(), writer()
    w.add_scalar("loss", 1.0, 1)
    with pytest.raises(Exception):  # noqa: B017  (each library has its own)
        w.add_scalar("loss", [1.0, 2.0], 2)
    w.close()

    assert records(mirror.run) == [(1, {"loss": 1.0})]


def test_an_error_of_rlwatch_never_reaches_the_loop(tee, writer, monkeypatch, caplog):
    """Counted, said once, switched off after some."""
    mirror, w = tee(), writer()
    w.add_scalar("loss", 1.0, 1)
    monkeypatch.setattr("rlwatch.integrations.tensorboard.scalars", lambda row: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        for step in range(6):
            w.add_scalar("loss", 1.0, step)

    assert mirror.run.counters["errors"] == 3
    assert len(caplog.records) == 2


def test_what_was_gathered_survives_the_end_of_the_process(tmp_path):
    """A script that neither flushes nor closes: its last step is recorded at exit."""
    code = (
        "import rlwatch\n"
        "from tensorboardX import SummaryWriter\n"
        f"rlwatch.tee_tensorboard(store={str(tmp_path / 'store')!r})\n"
        f"w = SummaryWriter({str(tmp_path / 'run')!r})\n"
        "w.add_scalar('loss', 1.0, 1)\n"
        "w.add_scalar('loss', 2.0, 2)\n"
    )
    run_program(code, check=True)
    store = rlwatch.open_store(str(tmp_path / "store"))
    (run,) = store.runs()

    assert [(r.step, dict(r.metrics)) for r in store.records(run.run_id)] == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert run.state == "finished"


def test_tensorboard_is_mirrored_once(tee):
    """Twice would record everything twice."""
    tee()
    with pytest.raises(ConfigError, match="mirrored already; call untee"):
        tee()


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [({"projct": "x"}, ConfigError, "no argument 'projct'"), ({"store": "nosuch://x"}, StoreError, "nosuch")],
)
def test_wrong_settings_are_raised_at_once_and_change_nothing(kwargs, error, words):
    """Not at the first scalar."""
    before = tensorboard.SummaryWriter.add_scalar
    with pytest.raises(error, match=words):
        rlwatch.tee_tensorboard(**kwargs)

    assert tensorboard.SummaryWriter.add_scalar is before


def test_one_library_is_enough(tee, monkeypatch, writer):
    """Whichever is installed."""
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            mirror = tee()
            mirror.untee()


def test_without_either_the_message_says_what_to_install(monkeypatch):
    """The one import error a user can meet."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=r"tee_tensorboard\(\) needs .*rlwatch-monitor\[tensorboard\]"):
        rlwatch.tee_tensorboard()


def test_a_remote_directory_is_named_by_its_url(tee):
    """Nothing is remembered where no file can be written."""
    from rlwatch.integrations.tensorboard import described, directory_of

    class Remote:
        log_dir = "gs://bucket/run1"

    assert directory_of(Remote()) == "gs://bucket/run1"
    assert described("gs://bucket/run1") == {"name": "gs://bucket/run1"}


class Foretells:
    """Forecasts that a failure is as likely as the loss is high."""

    def update(self, step):
        return Forecast(step.step, p50=step.get("loss/policy"))

    def notice(self, event):
        """Nothing to learn."""


@pytest.mark.parametrize("send_back", [True, False])
def test_the_forecast_is_written_at_its_step_if_wanted(tee, writer, tmp_path, monkeypatch, records, send_back):
    """By the writer that logs, on its own thread, and not mirrored in turn."""
    monkeypatch.setattr(forecasting, "default_forecasts", Foretells)
    mirror, w = tee(send_back=send_back), writer()
    for step in range(1, 6):
        w.add_scalar("loss/policy", step / 10, step)
        w.flush()
        if mirror.run is not None:
            mirror.run.flush()
    w.close()

    events = EventAccumulator(str(tmp_path / "run")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == {"loss/policy", *(["forecast/p50"] if send_back else [])}
    if send_back:
        assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("forecast/p50")] == [
            (1, 0.1),
            (2, 0.2),
            (3, 0.3),
        ]
    assert {name for _, row in records(mirror.run) for name in row} == {"loss/policy"}
