"""Limits on those who connect and have proven nothing yet: the same for every listener of rlwatch, that of the ranks,
the dashboard, ``rlwatch serve`` and ``rlwatch export metrics``; and a log that they cannot fill.

A connection is a stranger's until it has shown a session, or a secret of the run. It has :data:`GREETING_S` seconds for
a whole request; when more than :data:`STRANGERS` are there, the one goes that has been silent for the longest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

GREETING_S = 10.0
"""Longest a connection may stay open without a whole request, or without proof that it is of the run, in seconds."""
STRANGERS = 32
"""Number of strangers who may be connected at a time."""
BACKLOG = 128
"""Connections that wait in the system's queue."""


class Strangers:
    """Connections that have proven nothing yet. Used from one thread, or under a lock of the caller.

    Parameters
    ----------
    most
        Number of them that may stay.
    """

    def __init__(self, most: int = STRANGERS) -> None:
        self._most = most
        self._there: dict[Hashable, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._there)

    def arrived(self, who: Hashable, close: Callable[[], object]) -> None:
        """Add a connection; if there are too many now, the one that has been silent for the longest is closed."""
        self._there[who] = close
        while len(self._there) > self._most:
            self._there.pop(next(iter(self._there)))()

    def spoke(self, who: Hashable) -> None:
        """A request of theirs came in."""
        close = self._there.pop(who, None)
        if close is not None:
            self._there[who] = close

    def left(self, who: Hashable) -> None:
        """They are gone, or no stranger any more."""
        self._there.pop(who, None)


def limited(protocol: type[Any], strangers: Strangers, *, greeting_s: float = GREETING_S) -> type[Any]:
    """The HTTP protocol class of uvicorn, with these limits. Strangers are known by the address that a scope calls
    ``client``.
    """

    class Limited(protocol):  # type: ignore[misc]  # one of two of uvicorn
        """One connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
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


class Quiet(logging.Filter):
    """Lets one record a minute through of each message that a stranger can cause, without its traceback."""

    def __init__(self, *starts: str, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._starts, self._every_s, self._clock = starts, every_s, clock
        self._due: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Judge one record."""
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
    """Keep the loggers of the server from being filled by strangers."""
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(Quiet(*_CAUSED))
