"""The tables of a corpus: one Parquet file a run while it is made, two when it is packed.

A run's file has one row a logged step: ``run``, ``recipe``, ``family``, ``step``, canonical metrics, hidden ``truth/``
columns. What was not measured is null, NaN is NaN, and the run's own record lies in the file's metadata.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlwatch.errors import RLWatchError

KEY = b"rlwatch.run"
TEXTS = ("run", "recipe", "family")
PACKAGES = ("rlwatch-monitor", "torch", "numpy", "trl", "transformers")
BITS, BITS_NEAR_ONE = 11, 15
"""Of a mantissa in a packed set: a relative error of at most 2.5e-4, and less than half the size of full numbers."""
NEAR_ONE = (
    *("ratio/mean", "ratio/ess", "ratio/seq_ess"),
    *("mismatch/ess", "mismatch/seq_ess", "mismatch/ppl_ratio", "mismatch/prob_corr"),
)
"""What lies near 1, where the distance from it counts: their error is at most 1.6e-5."""
LEVELS = {"zstd": 19, "brotli": 11}
"""Brotli takes minutes for a whole set, and makes it 7 % smaller."""
RUNS_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("run", "recipe", "family", "source")]
    + [("seed", pa.int64()), ("config", pa.string()), ("pair", pa.string())]
    + [("fault_step", pa.int64()), ("at_once", pa.bool_()), ("versions", pa.string())]
)


@dataclass(frozen=True)
class RunInfo:
    """Record of a run beside its rows.

    ``pair``: the run this one is the faultless twin of, or ""; ``fault_step``: the step at which its fault began.
    """

    run: str
    recipe: str
    family: str
    source: str
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    pair: str = ""
    fault_step: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """As in the ``runs`` table: ``config`` and ``versions`` are JSON."""
        plain = asdict(self)
        return plain | {name: json.dumps(plain[name], sort_keys=True) for name in ("config", "versions")}


def versions(**more: str) -> dict[str, str]:
    """Of Python and of each package here that decides numbers, and ``more``."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | more


def path_of(folder: Path, run: str) -> Path:
    """Path of the file of ``run``."""
    return folder / f"{run}.parquet"


def is_done(folder: Path, run: str) -> bool:
    """True where ``run`` has its file: a file is there whole or not at all."""
    return path_of(folder, run).exists()


def write_run(folder: Path, info: RunInfo, columns: Mapping[str, Sequence[float | None]]) -> Path:
    """One run's file; ``columns`` has ``step`` and the metrics, each with one entry a row, None where not measured.

    Written beside and then put in its place, so that a reader never meets half a file. Returns its path.
    """
    if "step" not in columns or len({len(values) for values in columns.values()}) != 1:
        sizes = {name: len(values) for name, values in columns.items()}
        raise RLWatchError(f"columns of {info.run} need 'step' and one length, got {sizes}")
    rows = len(columns["step"])
    data = {name: pa.array([getattr(info, name)] * rows, pa.string()) for name in TEXTS}
    data["step"] = pa.array(columns["step"], pa.int32())
    names = [name for name in columns if name != "step"]
    data |= {name: pa.array(columns[name], pa.float32()) for name in names}
    table = pa.table(data).replace_schema_metadata({KEY: json.dumps(info.row())})
    folder.mkdir(parents=True, exist_ok=True)
    return put(table, path_of(folder, info.run))


def read_info(path: Path) -> dict[str, Any]:
    """The record that :func:`write_run` put into a file, as a row of ``runs``."""
    kept = (pq.read_schema(path).metadata or {}).get(KEY)
    if kept is None:
        raise RLWatchError(f"{path} is not a run's file of this corpus: it has no record of its run")
    row: dict[str, Any] = json.loads(kept)
    return row


def pack(out: Path, *folders: Path, at_once: Collection[str] = ()) -> tuple[Path, Path]:
    """All runs of ``folders`` in ``out`` (rows, to three or four significant digits) and beside it ``-runs`` (records).

    ``at_once``: recipes whose faults do not come gradually; the records say so. Raises ``RLWatchError`` where ``out``
    is there already: shards are added, never written again.
    """
    if out.exists():
        raise RLWatchError(
            f"{out} is there already, and a shard is never written again: give new runs a shard of their own"
        )
    paths = [path for folder in folders for path in sorted(folder.glob("*.parquet"))]
    if not paths:
        where = ", ".join(map(str, folders))
        raise RLWatchError(f"no runs in {where}; make some with: python -m benchmarks.forecast generate --out FOLDER")
    rows = pa.concat_tables([pq.read_table(path) for path in paths], promote_options="default")
    short = {name: _rounded(x, name) for name in rows.column_names if (x := rows.column(name)).null_count < len(x)}
    known = [read_info(path) for path in paths]
    records = pa.Table.from_pylist([r | {"at_once": r["recipe"] in at_once} for r in known], schema=RUNS_SCHEMA)
    out.parent.mkdir(parents=True, exist_ok=True)
    return put(pa.table(short), out, "brotli"), put(records, out.with_name(f"{out.stem}-runs{out.suffix}"))


def _rounded(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray | pa.Array:
    """Floats to some bits of their mantissa, null and what is not finite as they were; anything else unchanged."""
    if column.type != pa.float32():
        return column
    values = column.to_numpy(zero_copy_only=False).astype(np.float32)
    drop = np.uint32(23 - (BITS_NEAR_ONE if name in NEAR_ONE else BITS))
    words = ((values.view(np.uint32) + (np.uint32(1) << (drop - 1))) >> drop) << drop
    short = np.where(np.isfinite(values) & np.isfinite(words.view(np.float32)), words.view(np.float32), values)
    return pa.array(short, pa.float32(), mask=column.is_null().to_numpy())


def put(table: pa.Table, path: Path, compression: str = "zstd") -> Path:
    """Write a table beside its place and then put it there: whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(
            table, beside, compression=compression, compression_level=LEVELS[compression], **_encoding(table)
        )
        os.replace(beside, path)  # noqa: PTH105  (atomic on one file system)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _encoding(table: pa.Table) -> dict[str, Any]:
    """Bytes of floats apart by their place: most of what makes them short."""
    floats = [field.name for field in table.schema if field.type == pa.float32()]
    texts = [field.name for field in table.schema if field.type != pa.float32()]
    return {"use_dictionary": texts, "column_encoding": dict.fromkeys(floats, "BYTE_STREAM_SPLIT")}
