"""A batch's columns (spikes, completions) as one compressed blob, and its worst rows. No pickle anywhere.

Blob: zlib(level 1) of  u32 length of head | head | column bytes one after the other.  Head: JSON list of
``[name, dtype, bytes]``; dtype is numpy's little-endian code, or ``"text"`` for a JSON list of strings.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlwatch.records import JSON

if TYPE_CHECKING:  # imported where it is used: a trainer that logs numbers alone starts without it
    import numpy as np

Columns = Mapping[str, "np.ndarray | Sequence[str]"]
_NUMBERS = "biuf"
_MOST = 1 << 31  # bytes a blob may unfold to: a damaged or hostile file must not eat the memory


def pack(columns: Columns, level: int = 1) -> tuple[int, bytes]:
    """Number of rows and the blob, compressed at ``level`` of zlib. Raises ``ValueError`` for what are no columns."""
    rows: int | None = None
    head: list[tuple[str, str, int]] = []
    parts: list[bytes] = []
    for name, column in columns.items():
        kind, length, raw = _encode(name, column)
        if rows not in (None, length):
            raise ValueError(f"column {name!r} has {length} rows where the others have {rows}")
        rows = length
        head.append((name, kind, len(raw)))
        parts.append(raw)
    top = json.dumps(head).encode()
    return rows or 0, zlib.compress(b"".join((len(top).to_bytes(4, "little"), top, *parts)), level)


def unpack(blob: bytes) -> dict[str, np.ndarray | Sequence[str]]:
    """The columns again. Raises ``ValueError`` on damage."""
    try:
        unfolding = zlib.decompressobj()
        data = unfolding.decompress(blob, _MOST)
    except zlib.error as error:
        raise ValueError(f"batch: {error}") from error
    if not unfolding.eof:
        raise ValueError("batch is cut short or too large")
    at = 4 + int.from_bytes(data[:4], "little")
    columns: dict[str, np.ndarray | Sequence[str]] = {}
    for name, kind, size in json.loads(data[4:at]):
        columns[name] = _decode(kind, data[at : at + size])
        at += size
    return columns


def worst(columns: Columns, most: int) -> list[tuple[float, dict[str, JSON]]]:
    """The up to ``most`` worst rows, worst first, as (score, row); not-a-number scores count as infinite."""
    import numpy as np

    scores = _scores(columns)
    order = np.argsort(-scores, kind="stable")[:most]
    return [(float(scores[i]), {name: _cell(column, i) for name, column in columns.items()}) for i in order]


def _scores(columns: Columns) -> np.ndarray:
    """How far out each row is: size of its gradient contribution, else its screen, else its log-ratio (nats)."""
    import numpy as np

    for name, other in (
        ("contribution", ""),
        ("screen", ""),
        ("ratio", ""),
        ("logp", "old_logp"),
        ("logp", "rollout_logp"),
    ):
        if name not in columns or (other and other not in columns):
            continue
        values = np.asarray(columns[name], dtype=np.float64)
        with np.errstate(all="ignore"):
            if name == "ratio":
                values = np.log(values)
            elif other:
                values = values - np.asarray(columns[other], dtype=np.float64)
        return np.nan_to_num(np.abs(values), nan=np.inf, posinf=np.inf)
    return np.zeros(len(next(iter(columns.values()), ())))


def _cell(column: np.ndarray | Sequence[str], row: int) -> JSON:
    import numpy as np

    value = column[row]
    return value.item() if isinstance(value, np.generic) else value


def _encode(name: str, column: np.ndarray | Sequence[str]) -> tuple[str, int, bytes]:
    import numpy as np

    values = np.asarray(column)
    if values.dtype.kind in "UO" and all(isinstance(text, str) for text in column):
        texts = [str(text) for text in column]  # numpy's own text type would lose trailing NUL characters
        return "text", len(texts), json.dumps(texts).encode()
    if values.ndim != 1 or values.dtype.kind not in _NUMBERS:
        raise ValueError(
            f"column {name!r} must be a 1-d array of numbers or a list of str; "
            f"got dtype {values.dtype}, shape {values.shape}"
        )
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return little.dtype.str, len(little), little.tobytes()


def _decode(kind: str, raw: bytes) -> np.ndarray | Sequence[str]:
    import numpy as np

    if kind == "text":
        texts: list[str] = json.loads(raw)
        return texts
    dtype = np.dtype(kind)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"column of dtype {kind!r}")
    return np.frombuffer(raw, dtype=dtype).copy()
