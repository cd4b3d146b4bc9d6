"""Which run of the store a log becomes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from rlwatch.records import RunInfo

LONGEST_ID = 120


def plain_id(name: str) -> str:
    """``name`` with only what a run id may hold.

    >>> plain_id("train v2: seed/3")
    'train-v2-seed-3'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")[:LONGEST_ID] or "imported"


@dataclass(frozen=True, slots=True)
class Log:
    """A log and what its run shall be called; empty fields are filled from the log."""

    path: Path
    run: str | None = None
    read_as: str | None = None
    trainer: str = ""
    project: str = "default"
    name: str = ""
    run_id: str | None = None

    def info(self, name: str, source: str, now: float) -> RunInfo:
        """The run in the store; the same log has the same id whenever it is watched."""
        run_id = self.run_id or log_id(self.path, self.run or "")
        return RunInfo(
            run_id=run_id,
            project=self.project,
            name=self.name or name,
            source=self.trainer or source,
            created_at=now,
            tags=("watched",),
        )


def log_id(path: Path, run: str = "") -> str:
    """An id that tells the log: its file's name, and a trace of where it lies.

    >>> log_id(Path("/runs/a/train.log")) == log_id(Path("/runs/b/train.log"))
    False
    """
    trace = hashlib.sha256(f"{path.absolute()}\0{run}".encode(errors="surrogateescape")).hexdigest()[:8]
    return plain_id(f"{run or path.stem}-{trace}")
