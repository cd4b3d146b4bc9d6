"""Tools beside which rlwatch is measured: a class each, run by the Python that has the tool, without anything of ours.

``begin`` a run in a directory, ``log`` a row, ``end`` it: what was logged is then stored. ``read`` gives series, of all
names or of some, as the tool itself reads them; ``runs`` lists what there is. Settings are the tool's own defaults but
for what watches console and machine, which is no part of logging.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

Row = Mapping[str, float]
Series = dict[str, Sequence[tuple[int, float]]]


class Tool:
    """One tool. Its import is part of ``load``, so that it can be timed."""

    package: ClassVar[str] = ""
    """What pip installs; empty for what is there already."""
    environment: ClassVar[Mapping[str, str]] = {}
    copies: ClassVar[str] = ""
    """Where a run lies, if a thousand are made by copying one: each would take a process or seconds."""
    readers: ClassVar[Sequence[str]] = ()
    """Modules that reading takes, besides what ``load`` imports."""

    def load(self) -> None:
        """Import it."""

    def begin(self, place: str, run: str) -> None:
        """Begin a run."""
        raise NotImplementedError

    def log(self, row: Row, step: int) -> None:
        """Log one row."""
        raise NotImplementedError

    def end(self) -> None:
        """End the run."""
        raise NotImplementedError

    def settle(self, place: str) -> None:
        """What has to be done before a run can be read."""

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        """Series of the run called ``run``."""
        raise NotImplementedError

    def runs(self, place: str) -> Sequence[object]:
        """List what there is."""
        raise NotImplementedError


class Rlwatch(Tool):
    """rlwatch as it comes: what is logged is judged and forecast as well, in the same process."""

    readers = ("numpy", "rlwatch.store.url", "rlwatch.store.sqlite.filestore", "rlwatch.store.sqlite.shared")

    def load(self) -> None:
        global rlwatch
        import rlwatch

    def begin(self, place: str, run: str) -> None:
        self.run = rlwatch.init(store=place, project="bench", run_id=run, source="verl", system=False)

    def log(self, row: Row, step: int) -> None:
        self.run.log(row, step=step)

    def end(self) -> None:
        self.run.finish()

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        from rlwatch.store.url import open_store

        store = open_store(Path(place))
        found = store.series("run", names or store.metric_names("run"))
        return {name: _Points(series.steps, series.values) for name, series in found.items()}

    def runs(self, place: str) -> Sequence[object]:
        from rlwatch.store.url import open_store

        return open_store(Path(place)).runs()


class _Points(Sequence[tuple[int, float]]):
    """Steps and values as two arrays, which is how rlwatch gives a series."""

    def __init__(self, steps: Any, values: Any) -> None:
        self._steps, self._values = steps, values

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, at: Any) -> Any:
        return int(self._steps[at]), float(self._values[at])


class Recording(Rlwatch):
    """rlwatch without detectors, which nobody else has; its forecast cannot be left out."""

    def begin(self, place: str, run: str) -> None:
        self.run = rlwatch.init(store=place, project="bench", run_id=run, source="verl", system=False, detectors=list)


class Floor(Tool):
    """The least that can be done: rows of float64 appended to a file, a write each, names once at its head."""

    def begin(self, place: str, run: str) -> None:
        self._file = open(f"{place}/{run}.bin", "ab", buffering=0)  # noqa: SIM115, PTH123
        self._pack: Any = None

    def log(self, row: Row, step: int) -> None:
        if self._pack is None:
            self._file.write(json.dumps(list(row)).encode() + b"\n")
            self._pack = struct.Struct(f"<q{len(row)}d").pack
        self._file.write(self._pack(step, *row.values()))

    def end(self) -> None:
        self._file.close()

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        data = Path(place, "run.bin").read_bytes()
        head, _, rows = data.partition(b"\n")
        there = json.loads(head)
        unpacked = struct.iter_unpack(
            f"<q{len(there)}d", rows[: len(rows) // (8 * len(there) + 8) * (8 * len(there) + 8)]
        )
        return _by_name(((step, dict(zip(there, values, strict=True))) for step, *values in unpacked), names)

    def runs(self, place: str) -> Sequence[object]:
        return list(Path(place).glob("*.bin"))


class TensorBoard(Tool):
    """TensorBoard's own event writer, one event a row."""

    package = "tensorboard==2.21.0"
    readers = ("tensorboard.backend.event_processing.event_accumulator",)

    def load(self) -> None:
        global Event, Summary, EventFileWriter
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def begin(self, place: str, run: str) -> None:
        self._writer = EventFileWriter(f"{place}/{run}")

    def log(self, row: Row, step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._writer.add_event(Event(step=step, summary=Summary(value=values)))

    def end(self) -> None:
        self._writer.close()

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(f"{place}/run", size_guidance={"scalars": 0})
        events.Reload()
        return {n: [(e.step, e.value) for e in events.Scalars(n)] for n in names or events.Tags()["scalars"]}

    def runs(self, place: str) -> Sequence[object]:
        return [path for path in Path(place).iterdir() if any(path.glob("events.*"))]


class Wandb(Tool):
    """wandb, offline: a run's own file, written by a process of its own."""

    package = "wandb==0.31.0"
    environment: ClassVar[Mapping[str, str]] = {
        "WANDB_SILENT": "true",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
    }
    copies = "wandb/offline-run-*"

    def load(self) -> None:
        global wandb
        import wandb

    def begin(self, place: str, run: str) -> None:
        settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
        self._run = wandb.init(project="bench", dir=place, mode="offline", id=run, settings=settings)

    def log(self, row: Row, step: int) -> None:
        self._run.log(row, step=step)

    def end(self) -> None:
        self._run.finish()

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        return _by_name(self._rows(place), names)

    def _rows(self, place: str) -> Iterator[tuple[int, Row]]:
        """With its own program: wandb has no reader of its files in Python."""
        import subprocess

        file = next(Path(place).glob("wandb/offline-run-*/*.wandb"))
        command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as reading:
            assert reading.stdout is not None
            for line in reading.stdout:
                if b'"type":"history"' in line[:60]:
                    with contextlib.suppress(ValueError):
                        row = json.loads(line)["history"]["item"]
                        step = row.pop("_step")
                        yield step, {name: _number(value) for name, value in row.items() if name[0] != "_"}

    def runs(self, place: str) -> Sequence[object]:
        return list(Path(place).glob("wandb/*run-*/*.wandb"))


class Trackio(Tool):
    """trackio, into its SQLite."""

    package = "trackio==0.43.0"
    readers = ("trackio.sqlite_storage",)

    def load(self) -> None:
        global trackio
        import trackio

    def begin(self, place: str, run: str) -> None:
        assert os.environ["TRACKIO_DIR"] == place
        trackio.init(project="bench", name=run, embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def log(self, row: Row, step: int) -> None:
        trackio.log(row, step=step)

    def end(self) -> None:
        trackio.finish()

    def read(self, place: str, names: Sequence[str] | None) -> Series:  # noqa: ARG002 - TRACKIO_DIR
        from trackio.sqlite_storage import SQLiteStorage

        if names is not None:
            kept = {name: SQLiteStorage.get_metric_values("bench", "run", name) for name in names}
            return {name: [(row["step"], row["value"]) for row in rows] for name, rows in kept.items()}
        rows = SQLiteStorage.get_logs("bench", "run")
        return _by_name(((row.pop("step"), row) for row in rows), names)

    def runs(self, place: str) -> Sequence[object]:  # noqa: ARG002
        return list(trackio.Api().runs("bench"))


class Swanlab(Tool):
    """swanlab, offline."""

    package = "swanlab==0.10.3"
    copies = "run-*"
    readers = ("swanlab.proto.swanlab.record.v1.record_pb2", "swanlab.sdk.internal.core_python.store")

    def load(self) -> None:
        global swanlab
        import swanlab

    def begin(self, place: str, run: str) -> None:
        swanlab.init(project="bench", log_dir=place, mode="offline", name=run)

    def log(self, row: Row, step: int) -> None:
        swanlab.log(row, step=step)

    def end(self) -> None:
        swanlab.finish()

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        reader, found = DataStoreReader(), dict[str, list[tuple[int, float]]]()
        reader.open(str(next(Path(place).glob("run-*/*.swanlab"))))
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar") and (names is None or record.scalar.key in names):
                found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
        return dict(found)

    def runs(self, place: str) -> Sequence[object]:
        return list(Path(place).glob("run-*/*.swanlab"))


class Aim(Tool):
    """aim, into its RocksDB; before a run can be read it has to be indexed."""

    package = "aim==3.29.1"
    readers = ("aim.storage.context",)

    def load(self) -> None:
        global aim
        import aim

    def begin(self, place: str, run: str) -> None:
        options = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        self._run = aim.Run(repo=place, experiment="bench", **options)
        self._run.name = run

    def log(self, row: Row, step: int) -> None:
        self._run.track(row, step=step)

    def end(self) -> None:
        self._run.close()

    def settle(self, place: str) -> None:
        import subprocess

        command = [str(Path(sys.executable).with_name("aim")), "storage", "--repo", place, "reindex"]
        subprocess.run(command, input=b"y\n", capture_output=True, check=False)

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        from aim import Repo, Run
        from aim.storage.context import Context

        repo = Repo.from_path(place)
        run = Run(repo.list_all_runs()[0], repo=repo, read_only=True)
        kept = run.metrics() if names is None else [run.get_metric(name, Context({})) for name in names]
        return {metric.name: self._points(metric) for metric in kept if metric is not None}

    def _points(self, metric: Any) -> list[tuple[int, float]]:
        steps, values = metric.values.sparse_numpy()
        return list(zip(map(int, steps), map(float, values), strict=True))

    def runs(self, place: str) -> Sequence[object]:
        from aim import Repo

        return [(run.hash, run.name) for run in Repo.from_path(place).iter_runs()]


class Mlflow(Tool):
    """mlflow, into SQLite, a call a row."""

    package = "mlflow==3.17.2"
    environment: ClassVar[Mapping[str, str]] = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

    def load(self) -> None:
        global mlflow
        import logging

        import mlflow

        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def begin(self, place: str, run: str) -> None:
        mlflow.set_tracking_uri(f"sqlite:///{place}/mlflow.db")
        mlflow.set_experiment("bench")
        mlflow.start_run(run_name=run)

    def log(self, row: Row, step: int) -> None:
        mlflow.log_metrics(dict(row), step=step)

    def end(self) -> None:
        mlflow.end_run()

    def _listed(self, place: str) -> tuple[Any, Any]:
        mlflow.set_tracking_uri(f"sqlite:///{place}/mlflow.db")
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name("bench")
        return client, client.search_runs([experiment.experiment_id], max_results=2000)

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        client, runs = self._listed(place)
        run = next(run for run in runs if run.info.run_name == "run")
        history = client.get_metric_history
        return {n: [(m.step, m.value) for m in history(run.info.run_id, n)] for n in names or run.data.metrics}

    def runs(self, place: str) -> Sequence[object]:
        return list(self._listed(place)[1])


class Rlprobe(Tool):
    """rlprobe's recorder, into Parquet; what it has no column for goes to its ``extra``."""

    package = "rlprobe==0.1.0"
    readers = ("rlprobe.storage",)

    def load(self) -> None:
        global rlprobe
        import rlprobe

    def begin(self, place: str, run: str) -> None:
        self._recorder = rlprobe.Recorder(f"{place}/{run}", run_id=run)

    def log(self, row: Row, step: int) -> None:
        self._recorder.log_step(step, **row)

    def end(self) -> None:
        self._recorder.close()

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        from rlprobe.storage import RunReader

        return _by_name(((step.step, step.extra) for step in RunReader(f"{place}/run").steps()), names)

    def runs(self, place: str) -> Sequence[object]:
        from rlprobe.storage import list_runs, load_manifest

        return [load_manifest(run) for run in list_runs(place)]


class Namesake(Tool):
    """PyPI's ``rlwatch`` 0.5.1, another project of this name: a commit and its detectors at every row."""

    package = "rlwatch==0.5.1"
    readers = ("rlwatch.storage",)

    def load(self) -> None:
        global namesake
        import rlwatch as namesake

    def begin(self, place: str, run: str) -> None:
        self._run = namesake.attach(framework="manual", run_id=run, storage={"log_dir": place})

    def log(self, row: Row, step: int) -> None:
        self._run.log_step(step, **row)

    def end(self) -> None:
        self._run.stop()

    def _rows(self, place: str, query: str) -> list[Any]:
        from rlwatch.storage import open_store  # theirs

        return list(open_store(place).execute(query).fetchall())

    def read(self, place: str, names: Sequence[str] | None) -> Series:
        rows = self._rows(place, "select step, extra_json from metrics where run_id='run' order by step")
        return _by_name(((row["step"], json.loads(row["extra_json"] or "{}")) for row in rows), names)

    def runs(self, place: str) -> Sequence[object]:
        return self._rows(place, "select * from runs")


TOOLS: dict[str, type[Tool]] = {
    "rlwatch": Rlwatch,
    "rlwatch, no detectors": Recording,
    "append to a file": Floor,
    "TensorBoard": TensorBoard,
    "wandb, offline": Wandb,
    "trackio": Trackio,
    "swanlab, offline": Swanlab,
    "aim": Aim,
    "mlflow, SQLite": Mlflow,
    "rlprobe": Rlprobe,
    "rlwatch of PyPI": Namesake,
}


def _by_name(rows: Iterable[tuple[int, Mapping[str, Any]]], names: Sequence[str] | None) -> Series:
    wanted, found = None if names is None else set(names), dict[str, list[tuple[int, float]]]()
    for step, row in rows:
        for name, value in row.items():
            if wanted is None or name in wanted:
                found.setdefault(name, []).append((step, value))
    return dict(found)


def _number(value: Any) -> float:
    """wandb writes what is not finite as words."""
    return float(value)


def as_process(tool: Tool, place: str) -> dict[str, str]:
    """The environment of a process that uses it."""
    home = Path(place).parent / "home"
    home.mkdir(exist_ok=True)
    named = {"HOME": str(home), "TRACKIO_DIR": place, "WANDB_DIR": place, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH"}}
    return {**kept, **named, **tool.environment}
