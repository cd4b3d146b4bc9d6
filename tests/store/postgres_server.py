"""A PostgreSQL server of the tests' own: Debian's, in a temporary directory, on a socket and a port of 127.0.0.1.

``TEST_DB_URL`` names another one for the contract's tests, by a role that may create schemas there; those that stop the
server, or make roles, have their own all the same. Where Debian's is missing they fail and say so.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg

ROLE = "rlw"
ADMITTED = """
host    all locked  127.0.0.1/32 scram-sha-256
host    all +asked  127.0.0.1/32 scram-sha-256
hostssl all tlsonly 127.0.0.1/32 trust
host    all tlsonly 127.0.0.1/32 reject
host    all all     127.0.0.1/32 trust
local   all all     trust
"""
_numbers = count()


def binaries() -> Path:
    """Where initdb and postgres are."""
    found = shutil.which("initdb")
    places = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if not places:
        raise AssertionError(
            "these tests need PostgreSQL: `make browser` installs it (as root), or install Debian's package postgresql"
        )
    return places[0]


def unprivileged() -> dict[str, object]:
    """The server refuses to run as root."""
    if os.getuid() != 0:
        return {}
    user = pwd.getpwnam("nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@dataclass
class PostgresServer:
    """One cluster, started and stopped at will. Writes survive its death, not the machine's: fsync is off.

    ``also``: settings besides the tests' own, or instead of them.
    """

    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rlwpg")))
    port: int = 0
    also: Mapping[str, object] = field(default_factory=dict)
    process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        self.bin = binaries()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        who = unprivileged()
        if who:
            os.chown(self.directory, who["user"], who["group"])
        self.data = self.directory / "data"
        make = [
            self.bin / "initdb",
            "--no-sync",
            "-U",
            ROLE,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "-D",
            self.data,
        ]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, cwd=self.directory, **who)
        (self.data / "pg_hba.conf").write_text(ADMITTED)

    def start(self) -> None:
        """Returns once it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.directory,
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": 60,
            "shared_buffers": "32MB",
            "max_wal_size": "256MB",
            **self.also,
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            command = [self.bin / "postgres", "-D", self.data, *flags]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.directory, start_new_session=True, **unprivileged()
            )
        end = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(host="127.0.0.1", port=self.port, user=ROLE, dbname="postgres").close()
            except psycopg.OperationalError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError((self.directory / "log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT is ``-m immediate``: no checkpoint, and whoever is connected is cut off."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(60)

    def pause(self) -> None:
        """Stop all of it in its tracks: connections stay open, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``pause``."""
        self._signal(signal.SIGCONT)

    def _signal(self, which: signal.Signals) -> None:
        main = self.process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        for pid in (main, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    def url(self, schema: str = "", *, user: str = ROLE, database: str = "postgres") -> str:
        """Of a store, by a schema of its own."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}?sslmode=disable&schema={schema or new_schema()}"

    def remove(self) -> None:
        """All of it."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)


def new_schema() -> str:
    """A name not given before by any worker."""
    return f"t{os.getpid()}_{next(_numbers)}"


def sql(url: str) -> psycopg.Connection:
    """A connection past the store, to the same database."""
    return psycopg.connect(re.sub(r"[?&](schema|series)=[^&]+", "", url), autocommit=True)


def dropped(url: str, schema: str) -> None:
    """Drop the schema."""
    with sql(url) as db:
        db.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


def emptied(url: str, schema: str) -> None:
    """Empty all tables but what says which they are."""
    with sql(url) as db:
        made = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
        kept = ("schema_version", "series_place")
        db.execute(";".join(f"DELETE FROM {schema}.{table}" for (table,) in made if table not in kept))
