"""Receive notifications of what other processes write, by LISTEN and NOTIFY; a process without any keeps polling."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import ExitStack, suppress

import psycopg

from rlwatch.errors import StoreError
from rlwatch.ports import Topic
from rlwatch.store.postgres.address import PostgresAddress
from rlwatch.store.postgres.connection import Connection, explained
from rlwatch.store.postgres.server import Server

AGAIN_S, ECHO_S, ECHO_EVERY_S = 10.0, 5.0, 30.0


def channel(address: PostgresAddress, topic: Topic) -> str:
    """Return the name of the NOTIFY channel of a topic.

    Each schema has one channel, and another for pages, which are also notified of new rows. Those come often and would
    wake every trainer.
    """
    return f"rlwatch_{address.schema}{'_pages' if topic == 'pages' else ''}"


def tell(db: Connection, address: PostgresAddress, topic: Topic, run_id: str) -> None:
    """Notify listeners about a run once the transaction is committed; equal notifications of one transaction are sent
    once.

    The server commits transactions that notify one after another: frequent notifications are sent in a transaction that
    writes nothing.
    """
    db.execute("SELECT pg_notify(%s, %s)", (channel(address, topic), f"{topic} {run_id}"))


class PostgresNews:
    """Notifications of one topic, about one run (``run_id``) or all (None); implements :class:`rlwatch.ports.News`.

    Parameters
    ----------
    again_s
        Seconds between attempts to connect, after a connection failed or was cut.
    echo_s
        Seconds that pages, which rely on notifications, wait for one of their own. A pool that shares its connections
        accepts LISTEN and delivers nothing, and a connection that was cut on the way gives no error.
    """

    def __init__(
        self, server: Server, topic: Topic, run_id: str | None, *, again_s: float = AGAIN_S, echo_s: float = ECHO_S
    ) -> None:
        self._server, self._again_s, self._echo_s = server, again_s, echo_s
        self._topic, self._run_id = topic, run_id
        self._db: Connection | None = None
        self._again_at = self._echo_at = 0.0
        self._meanwhile: list[str] = []
        self._closing = threading.Event()

    @property
    def deaf(self) -> bool:
        """True while it has no connection on which notifications arrive, so that its user must poll."""
        return self._db is None

    def arrived(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` seconds for the next notification; return True if there was one.

        While there is no connection, return False after that time.
        """
        return bool(self.heard(timeout_s))

    def heard(self, timeout_s: float = 0.0) -> frozenset[str]:
        """Wait up to ``timeout_s`` seconds for the next notification; return the ids of the runs that it is about.

        The id ``""`` means the whole store. Empty if none came. Never raises.
        """
        until = time.monotonic() + timeout_s
        try:
            db = self._listening()
            if db is not None:
                with explained(self._server.address):
                    return self._heard(db, until)
        except StoreError:
            self._drop()
        self._closing.wait(max(0.0, until - time.monotonic()))
        return frozenset()

    def close(self) -> None:
        """Stop listening and close the connection; idempotent."""
        self._closing.set()
        self._drop()

    def _heard(self, db: Connection, until: float) -> frozenset[str]:
        while True:
            left = max(0.0, until - time.monotonic())
            words, self._meanwhile = self._meanwhile, []
            words = words or [note.payload for note in db.notifies(timeout=left, stop_after=1)]
            runs = frozenset(run for word in words if (run := self._mine(word)) is not None)
            if runs or not words or time.monotonic() >= until:
                return runs

    def _mine(self, word: str) -> str | None:
        """Return the run of a notice, if it is one we wait for; ``""`` for a notice of the whole store."""
        topic, _, run_id = word.partition(" ")
        return run_id if topic == self._topic and (not run_id or self._run_id in (None, run_id)) else None

    def _listening(self) -> Connection | None:
        """Return the connection, made if there is none; for pages, check it now and then by a notice of its own."""
        if self._db is None and time.monotonic() >= self._again_at and not self._closing.is_set():
            self._again_at = time.monotonic() + self._again_s
            with ExitStack() as undo:
                db = self._server.connect()
                undo.callback(db.close)
                self._listen(db)
                undo.pop_all()
            self._db = db
        elif self._db is not None and self._topic == "pages" and time.monotonic() >= self._echo_at:
            self._look_for_echo(self._db)
        return self._db

    def _listen(self, db: Connection) -> None:
        with explained(self._server.address):
            db.execute(f"LISTEN {channel(self._server.address, self._topic)}")
        if self._topic == "pages":
            self._look_for_echo(db)

    def _look_for_echo(self, db: Connection) -> None:
        """Raise ``StoreError`` unless this connection receives a notice that another connection sends.

        Other notices received meanwhile are kept for the next call.
        """
        address, word = self._server.address, f"echo {secrets.token_hex(8)}"
        with self._server.connection() as other:
            other.execute("SELECT pg_notify(%s, %s)", (channel(address, "pages"), word))
        until = time.monotonic() + self._echo_s
        with explained(address):
            while (left := until - time.monotonic()) > 0:
                for note in db.notifies(timeout=left, stop_after=1):
                    if note.payload == word:
                        self._echo_at = time.monotonic() + ECHO_EVERY_S
                        return
                    self._meanwhile.append(note.payload)
        raise StoreError(f"{address.where} does not deliver what it is told: is there a pool before it?")

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(psycopg.Error):
                db.close()
