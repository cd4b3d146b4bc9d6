"""Files of TensorBoard, wandb, Parquet and databases of trackers, made with their own libraries or tables."""

from __future__ import annotations

import io
import json
import math
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from wandb.proto import wandb_internal_pb2 as wandb

Rows = Sequence[tuple[int, Mapping[str, float]]]
BLOCK = 32768
START = 1_750_000_000.0


def event_file(rows: Rows) -> bytes:
    """As ``SummaryWriter.add_scalar`` writes it: an event a scalar, float32."""
    return events(Event(wall_time=START, file_version="brain.Event:2"), *(event for row in rows for event in _of(*row)))


def _of(step: int, metrics: Mapping[str, float]) -> Iterable[Event]:
    for name, value in metrics.items():
        event = Event(wall_time=START + step, step=step)
        event.summary.value.add(tag=name, simple_value=value)
        yield event


def events(*given: Event) -> bytes:
    """An event file of these events."""
    file = io.BytesIO()
    writer = RecordWriter(file)
    for event in given:
        writer.write(event.SerializeToString())
    writer.flush()
    return file.getvalue()


def wandb_file(rows: Rows) -> bytes:
    """As wandb writes a run of Hugging Face's trainer: JSON values, ``train/global_step`` beside wandb's own step."""
    records = [wandb.Record(run=wandb.RunRecord(run_id="1jfgog54", display_name="seed3"))]
    for own, (step, metrics) in enumerate(rows):
        records.append(history({**metrics, "train/global_step": step, "_step": own, "_timestamp": START + own}))
    return log(records)


def history(items: Mapping[str, object], *, nested: bool = True) -> wandb.Record:
    """One row; ``nested``: names as wandb 0.31 gives them, else as older ones do."""
    record = wandb.Record()
    for name, value in items.items():
        item = record.history.item.add(value_json=json.dumps(value))
        if nested:
            item.nested_key.append(name)
        else:
            item.key = name
    return record


def log(records: Iterable[wandb.Record]) -> bytes:
    """wandb's log of the records."""
    return leveldb_log(b":W&B" + struct.pack("<HB", 0xBEE1, 0), (record.SerializeToString() for record in records))


def leveldb_log(preamble: bytes, records: Iterable[bytes]) -> bytes:
    """A LevelDB log of the records: 7 bytes of preamble, blocks of 32 KiB."""
    out = bytearray(preamble)
    for record in records:
        _append(out, record)
    return bytes(out)


def swanlab_file(rows: Rows) -> bytes:
    """As SwanLab 0.8 and later write a run: a ``Record`` (field 13: a ``ScalarRecord``) a scalar."""
    scalars = [_scalar(step, name, value) for step, metrics in rows for name, value in metrics.items()]
    return leveldb_log(b":SWL" + struct.pack("<HB", 0xE1D6, 2), [_field(13, scalar) for scalar in scalars])


def _scalar(step: int, name: str, value: float) -> bytes:
    number = b"\x09" + struct.pack("<d", value) if value else b""  # Protocol Buffers leave out a 0
    return _field(1, name.encode()) + b"\x10" + _varint(step) + _field(4, b"\x08" + _varint(step)) + _field(5, number)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _append(out: bytearray, data: bytes) -> None:
    first = True
    while first or data:
        left = BLOCK - len(out) % BLOCK
        if left < 7:
            out += bytes(left)
            left = BLOCK
        piece, data = data[: left - 7], data[left - 7 :]
        kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not data]
        out += struct.pack("<IHB", zlib.crc32(piece, zlib.crc32(bytes([kind]))), len(piece), kind) + piece
        first = False


def nonfinite(step: int) -> float:
    """NaN, Inf and -Inf in turn."""
    return (math.nan, math.inf, -math.inf)[step % 3]


def parquet(rows: Rows, names: Sequence[str]) -> bytes:
    """A table with a column for each metric, null where it was not measured."""
    columns = {"step": [step for step, _ in rows]}
    columns |= {name: [metrics.get(name) for _, metrics in rows] for name in names}
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def trackio(rows: Rows) -> bytes:
    """The database of a project, as trackio 0.43 makes it: JSON in a text, what is not finite as a word."""
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,"
            " run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT)"
        )
        for step, metrics in rows:
            plain = {name: words.get(repr(float(value)), value) for name, value in metrics.items()}
            at = datetime.fromtimestamp(START + step, UTC).isoformat()
            said = json.dumps(plain).encode()  # a BLOB, as trackio's orjson gives it
            database.execute(
                "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES ('bb8998', ?, 'r1', ?, ?)",
                (at, step, said),
            )
        database.commit()
        return database.serialize()


def mlflow(runs: Mapping[str, Rows], params: Mapping[str, str]) -> bytes:
    """The tables of MLflow 3 that hold metrics: NaN as a flag, infinities as the largest float."""
    largest = {math.inf: sys.float_info.max, -math.inf: -sys.float_info.max}
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(
            "CREATE TABLE runs (run_uuid VARCHAR(32) NOT NULL, name VARCHAR(250), start_time BIGINT,"
            " lifecycle_stage VARCHAR(20));"
            "CREATE TABLE metrics (key VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL,"
            " run_uuid VARCHAR(32) NOT NULL, step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL);"
            "CREATE TABLE params (key VARCHAR(250) NOT NULL, value VARCHAR(8000) NOT NULL, run_uuid VARCHAR(32));"
        )
        for number, (name, rows) in enumerate(runs.items()):
            run = f"{number:08d}"
            database.execute("INSERT INTO runs VALUES (?, ?, ?, 'active')", (run, name.rstrip("*"), number))
            database.executemany("INSERT INTO params VALUES (?, ?, ?)", [(k, v, run) for k, v in params.items()])
            database.executemany(
                "INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (
                        key,
                        0.0 if math.isnan(value) else largest.get(value, value),
                        step * 1000,
                        run,
                        step,
                        value != value,
                    )
                    for step, metrics in rows
                    for key, value in metrics.items()
                ],
            )
        database.commit()
        return database.serialize()
