"""Reads the files an offline wandb run leaves: its rows and alerts.

A ``.wandb`` file is a 7-byte header and records in blocks of 32 KiB framed as LevelDB frames its log, each a protobuf
``Record``: history is field 2 (items: key 1, nested_key 2, value_json 16; step 2), config 5, alert 10.
"""

import json
import struct
from pathlib import Path

import wandb

BLOCK = 32768


def frames(data):
    """The payloads of the log, put together again."""
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _crc, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece, at = data[at + 7 : at + 7 + length], at + 7 + length
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield whole


def varint(data, at):
    shift = value = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def fields(data):
    """(field number, value) of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
        else:
            size, at = varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            value, at = data[at : at + size], at + size
        yield number, value


def item(data):
    """(name, value) of a history item."""
    key, nested, value = "", [], None
    for number, x in fields(data):
        if number == 1:
            key = x.decode()
        elif number == 2:
            nested.append(x.decode())
        elif number == 16:
            value = json.loads(x)
    return key or ".".join(nested), value


OURS = ("_runtime", "_timestamp", "_wandb")


class OfflineRun:
    """What one offline run holds."""

    def __init__(self, directory):
        self.rows, self.alerts = [], []
        (path,) = Path(directory).glob("run-*.wandb")
        for record in frames(path.read_bytes()):
            for number, body in fields(record):
                if number == 2:
                    self.rows.append(dict(item(x) for n, x in fields(body) if n == 1))
                elif number == 10:
                    self.alerts.append(
                        {n: x.decode() for n, x in fields(body) if isinstance(x, bytes) and n in (1, 2, 3)}
                    )

    @property
    def plain(self):
        """The rows without what depends on the clock."""
        return [{k: v for k, v in row.items() if k not in OURS} for row in self.rows]


def offline_runs(root):
    """Every offline run under ``root``, oldest first, once wandb's service has written its files and ended."""
    wandb.teardown()
    return [OfflineRun(path) for path in sorted(Path(root).glob("wandb/offline-run-*"))]
