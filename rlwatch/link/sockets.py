"""Opening connections that notice when the other side is gone."""

from __future__ import annotations

import contextlib
import select
import socket
import time

from rlwatch.errors import RLWatchError
from rlwatch.link.address import LOOPBACK, Address

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 35_000))
"""A machine that vanishes without a word is noticed after 35 seconds (where the system can do that)."""
CONNECT_S = 5.0
BACKLOG = 1024


class LinkError(RLWatchError):
    """Two ranks cannot reach each other."""


def listen(*, alone: bool) -> socket.socket:
    """A listening socket on a free port. ``alone``: for this machine only. Raises ``LinkError``."""
    try:
        if not alone and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # known to the system, but switched off
                return socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        return socket.create_server((LOOPBACK if alone else "", 0), backlog=BACKLOG)
    except OSError as error:
        raise LinkError(f"rank 0 cannot listen for the other ranks: {error}") from None


def connect(address: Address) -> socket.socket:
    """A connection to the first candidate that answers. Raises ``LinkError`` naming what was tried."""
    failures = []
    for host in address.candidates:
        try:
            connection = socket.create_connection((host, address.port), timeout=CONNECT_S)
        except OSError as error:
            failures.append(f"{host}: {error}")
        else:
            return tuned(connection)
    raise LinkError(f"rank 0 cannot be reached at port {address.port} ({'; '.join(failures)})")


def tuned(connection: socket.socket) -> socket.socket:
    """Without delay for small messages, with a heartbeat of the system's own."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def send_all(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    """Send everything within ``deadline_s`` seconds, whether the socket blocks or not. Raises ``OSError``."""
    end, view = time.monotonic() + deadline_s, memoryview(data)
    while view:
        try:
            view = view[connection.send(view) :]
        except (BlockingIOError, TimeoutError):
            if time.monotonic() >= end:
                raise TimeoutError("the other side does not read") from None
            _wait_writable(connection, end - time.monotonic())


def _wait_writable(connection: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    poll.poll(max(0.0, seconds) * 1000)
