"""Limits on connections that have proven nothing yet, and a log that such connections cannot fill.

Every server of rlwatch has the same limits: that of the ranks, the dashboard, ``rlwatch serve`` and ``rlwatch export
metrics``. A connection is *unproven* until it has shown a session, or a secret of the run. It has :data:`GREETING_S`
seconds for a whole request. If there are more than :data:`STRANGERS` of them, the one that has been silent for the
longest is closed.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

GREETING_S = 10.0
"""Seconds for which a connection may stay open without a whole request, or without proof that it belongs to the run."""
STRANGERS = 32
"""Largest number of unproven connections at a time."""
BACKLOG = 128
"""Number of connections that wait in the system's queue."""


class Strangers:
    """The open connections that have not proven yet who they are (no session, no secret), at most ``most`` of them.

    Used from one thread, or under a lock of the caller.
    """

    def __init__(self, most: int = STRANGERS) -> None:
        self._most = most
        self._there: dict[Hashable, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._there)

    def arrived(self, who: Hashable, close: Callable[[], object]) -> None:
        """Add an unproven connection ``who``, which ``close()`` closes.

        If there are too many now, the one that has been silent for the longest is closed.
        """
        self._there[who] = close
        while len(self._there) > self._most:
            self._there.pop(next(iter(self._there)))()

    def spoke(self, who: Hashable) -> None:
        """Note that a request came in on the connection ``who``, so that it counts as the last to be closed."""
        close = self._there.pop(who, None)
        if close is not None:
            self._there[who] = close

    def left(self, who: Hashable) -> None:
        """Remove the connection ``who`` from the unproven ones, because it was closed or has proven who it is."""
        self._there.pop(who, None)


def limited(protocol: type[Any], strangers: Strangers, *, greeting_s: float = GREETING_S) -> type[Any]:
    """Return a subclass of uvicorn's HTTP ``protocol`` class that limits unproven connections.

    A connection is closed if it sends no whole request within ``greeting_s`` seconds. ``strangers`` keeps the unproven
    connections by the address that an ASGI scope calls ``client``.
    """

    class Limited(protocol):  # type: ignore[misc]  # one of two of uvicorn
        """One connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            send_at_once(transport)
            self._greeting: asyncio.TimerHandle | None = None
            self._who = transport.get_extra_info("peername")[:2]
            strangers.arrived(self._who, transport.abort)
            self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._requested()
            strangers.left(self._who)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self._await_request()
            super().data_received(data)
            answered = self.cycle is None or self.cycle.response_complete
            if not answered or self.transport.get_protocol() is not self:  # whole, or a websocket from here on
                self._requested()
                strangers.spoke(self._who)

        def _await_request(self) -> None:
            if self._greeting is None:
                self._greeting = self.loop.call_later(greeting_s, self.transport.abort)

        def _requested(self) -> None:
            if self._greeting is not None:
                self._greeting.cancel()
                self._greeting = None

    return Limited


def send_at_once(transport: asyncio.BaseTransport) -> None:
    """Switch Nagle's algorithm off for a TCP connection: it delays the body of each response by up to 40 ms.

    asyncio does so itself, but not for a listening socket that was made without naming its protocol, as Streamlit's is.
    """
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family in {socket.AF_INET, socket.AF_INET6}:
        with suppress(OSError):  # closed already
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Quiet(logging.Filter):
    """Log filter that passes one record a minute of each message that unproven connections can cause, without its
    traceback.

    Parameters
    ----------
    starts
        Beginnings of such messages; all other records pass.
    every_s
        Seconds between two records that pass.
    clock
        Returns monotonic seconds.
    """

    def __init__(self, *starts: str, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._starts, self._every_s, self._clock = starts, every_s, clock
        self._due: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a log record passes; the first one after a pause also has the number of those left out."""
        message = record.getMessage()
        start = next((each for each in self._starts if message.startswith(each)), None)
        if start is None:
            return True
        now = self._clock()
        if now < self._due.get(start, 0.0):
            self._held[start] = self._held.get(start, 0) + 1
            return False
        self._due[start] = now + self._every_s
        held = self._held.pop(start, 0)
        more = f" ({held} more since the last time)" if held else ""
        record.msg, record.args = f"{message.splitlines()[0]}{more}", ()
        record.exc_info, record.exc_text = None, None
        return True


_CAUSED = (
    "socket.accept() out of system resource",
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
    "ASGI callable returned without completing handshake.",
)


def quiet_log() -> None:
    """Add filters to the loggers of uvicorn and asyncio, so that unproven connections cannot fill the log."""
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(Quiet(*_CAUSED))
