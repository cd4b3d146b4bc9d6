"""Names of what cannot be read, and advice on what to give instead."""

from __future__ import annotations

import re
from pathlib import Path

from rlwatch.importers.lines import UTF16, shown

EXPORT = "export the metrics to a CSV 'run_id,step,metric,value' and give that"
_WRITE = 'log a row a step, as JSON lines {"step": 12, "reward": 0.5} or lines \'step: 12, reward: 0.5\', or ' + EXPORT
_UNPACK = "unpack it first"
_RUN_TABLE = re.compile(rb'(?:\xef\xbb\xbf)?"?Name"?,"?State"?,')
RUNS_NOT_STEPS = (
    "table of runs: one row a run, with its last values and none of its steps; give the history of one run instead "
    "(its .wandb file, or what run.scan_history() returns as a CSV with a column '_step')"
)
_BESIDE_WANDB = frozenset({"wandb-metadata.json", "wandb-summary.json"})
NO_LOG_OF_WANDB = (
    "is kept by wandb beside a run and holds none of its steps; give the run's directory, or its run-ID.wandb"
)
_ERROR = re.compile(rb"^[\w.]{1,200}(?:Error|Exception|Interrupt|Exit)\b[^\n]*", re.MULTILINE)
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89HDF", "an HDF5 file", EXPORT),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"%PDF", "a PDF", EXPORT),
)
_TEXT: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"<table[^>]{0,200}class=\\?[\"']dataframe|<th>Step</th>"), "a table of a notebook (HTML)"),
    (re.compile(rb"^\s*<(?:!doctype|html)", re.IGNORECASE), "a web page (HTML)"),
)


def named_binary(head: bytes) -> str | None:
    """Name of the known format of ``head`` that is not text and not supported, with advice; None otherwise."""
    for magic, name, advice in _MAGIC:
        if head.startswith(magic):
            return f"is {name}, which is not supported yet; {advice}"
    return None


def named_text(head: bytes) -> str | None:
    """The same for text that no importer recognised."""
    if _RUN_TABLE.match(head):
        return f"is a {RUNS_NOT_STEPS}"
    for pattern, name in _TEXT:
        if pattern.search(head):
            return f"looks like {name}, which is not supported yet; {EXPORT}"
    return None


def unknown_format(head: bytes, tried: str) -> str:
    """The problem with text that no importer recognised; ``tried``: what each was missing."""
    return named_text(head) or f"no known format; {_WRITE} (tried {tried})"


def is_binary(head: bytes) -> bool:
    """True if ``head`` is no text: it begins with NUL bytes among others and is not UTF-16 with a byte order mark.

    NUL bytes at the end are what a machine that lost power leaves in a text file.
    """
    return b"\x00" in head.rstrip(b"\x00")[:4096] and not head.startswith(UTF16)


def beside_wandb(path: Path) -> bool:
    """True for what wandb keeps beside its run."""
    return path.name in _BESIDE_WANDB or (path.name == "config.yaml" and path.parent.name == "files")


def died_early(end: bytes) -> str | None:
    r"""The problem with the output of a program that failed before it logged anything; None if it did not fail.

    >>> died_early(b"Loading...\nTraceback (most recent call last):\n  File \"x.py\"\nValueError: no GPU\n")
    'holds no step of a training: the program failed before it logged one, by ValueError: no GPU'
    """
    at = end.rfind(b"Traceback (most recent call last)")
    errors = _ERROR.findall(end, at) if at >= 0 else []
    if not errors:
        return None
    said = shown(errors[-1].decode("utf-8", "replace").strip())[1:-1]
    return f"holds no step of a training: the program failed before it logged one, by {said}"
