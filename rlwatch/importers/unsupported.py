"""Formats that are recognised only to say that they cannot be read yet, and what to do instead."""

from __future__ import annotations

import re
from pathlib import Path

from rlwatch.importers.lines import UTF16

_EXPORT = "export the metrics to a CSV 'run_id,step,metric,value' and give that"
_UNPACK = "unpack it first"
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b":SWL", "a SwanLab run (.swanlab)", _EXPORT),
    (b"SQLite format 3\x00", "an SQLite database (trackio, MLflow, or a run of rlwatch: see `rlwatch runs`)", _EXPORT),
    (b"PAR1", "a Parquet file", _EXPORT),
    (b"\x89HDF", "an HDF5 file", _EXPORT),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"BZh", "a bzip2 archive", _UNPACK),
    (b"\xfd7zXZ", "an xz archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", _UNPACK),
    (b"%PDF", "a PDF", _EXPORT),
)
_NOTEBOOK = re.compile(rb'\s*\{\s*"(?:cells|metadata|nbformat)"')
_TEXT: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"<table[^>]{0,200}class=\\?[\"']dataframe|<th>Step</th>"), "a table of a notebook (HTML)"),
    (re.compile(rb"^\s*<(?:!doctype|html)", re.IGNORECASE), "a web page (HTML)"),
    (re.compile(rb"iteration {1,20}\d{1,15}/ {0,20}\d{1,15} \|"), "Megatron's console output"),
    (re.compile(rb"^\|? ?Step \|", re.MULTILINE), "a Markdown table"),
    (re.compile(rb"=== \[.{0,200}\] - METRICS STEP \d+ ==="), "torchforge's console output"),
    (re.compile(rb"Step \d{1,15} {1,20}\|.{0,200}\| {1,20}Loss"), "prime-rl's console output"),
)


def named_binary(head: bytes, path: Path) -> str | None:
    """What ``head`` is, if it is a known format that is not text and not supported: name and advice."""
    for magic, name, advice in _MAGIC:
        if head.startswith(magic):
            return f"is {name}, which is not supported yet; {advice}"
    if _NOTEBOOK.match(head) and (b'"cell_type"' in head or ".ipynb" in path.name):
        return f"is a Jupyter notebook, which is not supported yet; {_EXPORT}"
    return None


def named_text(head: bytes) -> str | None:
    """The same for text that no importer recognised."""
    for pattern, name in _TEXT:
        if pattern.search(head):
            return f"looks like {name}, which is not supported yet; {_EXPORT}"
    return None


def is_binary(head: bytes) -> bool:
    """Whether ``head`` is no text: it begins with NUL bytes among others and is not UTF-16 with a byte order mark.

    NUL bytes at the end are what a machine that lost power leaves in a text file.
    """
    return b"\x00" in head.rstrip(b"\x00")[:4096] and not head.startswith(UTF16)
