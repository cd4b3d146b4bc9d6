"""A ClickHouse of the tests' own: the real engine, embedded in a process of its own, behind its HTTP interface.

``TEST_CLICKHOUSE_URL`` (``clickhouse://user:password@host:8123/database``) names a real server for the contract's tests,
by a user who may create tables there; those that stop it have their own all the same.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rlwatch.store.clickhouse.address import read_place
from rlwatch.store.clickhouse.engine import ClickHouseClient

_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # many small parts: not on a disk


@dataclass
class ClickHouseServer:
    """One engine, started and stopped at will on the port it had."""

    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rlwch", dir=_MEMORY)))
    port: int = 0
    process: subprocess.Popen | None = None

    def start(self) -> None:
        """Returns once it answers."""
        front = Path(__file__).with_name("clickhouse_front.py")
        self.process = subprocess.Popen(
            [sys.executable, front, self.directory, str(self.port)], stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())

    def stop(self) -> None:
        """Kill it; what it answered for stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None

    def pause(self) -> None:
        """Stop it in its tracks: connections stay open, and nobody answers."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``pause``."""
        os.kill(self.process.pid, signal.SIGCONT)

    @property
    def url(self) -> str:
        """Of its one database."""
        return f"clickhouse://127.0.0.1:{self.port}/default"

    def remove(self) -> None:
        """All of it."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def engine(url: str) -> ClickHouseClient:
    """A connection past the store, to the same database."""
    return ClickHouseClient(read_place(url), patience_s=60.0, hurried=False)
