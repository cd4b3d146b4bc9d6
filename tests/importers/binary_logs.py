"""Files of TensorBoard and wandb, made with their own libraries' messages."""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

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
    """A LevelDB log of the records: 7 bytes of preamble, blocks of 32 KiB."""
    out = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        _append(out, record.SerializeToString())
    return bytes(out)


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
