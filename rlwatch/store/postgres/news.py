"""Hear at once of what others write: LISTEN and NOTIFY. Who is told nothing, for whatever reason, goes on polling."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import psycopg

from rlwatch.errors import StoreError
from rlwatch.ports import Topic
from rlwatch.store.postgres.address import Address
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.failures import explained
from rlwatch.store.postgres.server import Server

AGAIN_S = 10.0
"""Seconds after which a connection that could not be had, or was cut, is tried again."""


def channel(address: Address) -> str:
    """The channel of the store: one for each schema of a database."""
    return f"rlwatch_{address.schema}"


def tell(db: Connection, address: Address, topic: Topic, run_id: str) -> None:
    """Tell who listens, once the transaction is committed; of equal words of one transaction the first alone."""
    db.execute("SELECT pg_notify(%s, %s)", (channel(address), f"{topic} {run_id}"))


class PostgresNews:
    """News of one topic, of one run or of all; see :class:`rlwatch.ports.News`."""

    def __init__(self, server: Server, topic: Topic, run_id: str | None) -> None:
        self._server = server
        self._topic, self._run_id = topic, run_id
        self._db: Connection | None = None
        self._again_at = 0.0
        self._closing = threading.Event()

    def arrived(self, timeout_s: float = 0.0) -> bool:
        """Wait for the next, at most so long; whether there was any. While it cannot listen: False, in time."""
        until = time.monotonic() + timeout_s
        try:
            db = self._listening()
            if db is not None:
                with explained(self._server.address):
                    return self._heard(db, timeout_s)
        except StoreError:
            self._drop()
        self._closing.wait(max(0.0, until - time.monotonic()))
        return False

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._closing.set()
        self._drop()

    def _heard(self, db: Connection, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            left = max(0.0, until - time.monotonic())
            words = [note.payload for note in db.notifies(timeout=left, stop_after=1)]
            if any(self._is_mine(word) for word in words):
                return True
            if not words or time.monotonic() >= until:
                return False

    def _is_mine(self, word: str) -> bool:
        topic, _, run_id = word.partition(" ")
        return topic == self._topic and self._run_id in (None, run_id)

    def _listening(self) -> Connection | None:
        if self._db is None and time.monotonic() >= self._again_at and not self._closing.is_set():
            self._again_at = time.monotonic() + AGAIN_S
            db = self._server.connect()
            with explained(self._server.address):
                db.execute(f"LISTEN {channel(self._server.address)}")
            self._db = db
        return self._db

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(psycopg.Error):
                db.close()
