"""Where rank 0 listens, and connections that notice when the other side is gone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from rlwatch.errors import ConfigError, RLWatchError

LOOPBACK = "127.0.0.1"
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 35_000))
"""A machine that vanishes without a word is noticed after 35 seconds (where the system can do that)."""
CONNECT_S = 5.0
BACKLOG = 1024
HOST, PORT, SECRET = "RLWATCH_LINK_HOST", "RLWATCH_LINK_PORT", "RLWATCH_LINK_SECRET"
LEAST_SECRET = 16


class LinkError(RLWatchError):
    """Two ranks cannot reach each other."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where rank 0 should listen: on which interface (empty: on the loopback, until a rank of another machine asks for
    more), and on which port (0: any that is free).
    """

    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, link: str | None) -> Place:
        """As a caller says it (``HOST:PORT``, ``HOST`` or ``:PORT``), else as the environment does
        (``RLWATCH_LINK_HOST``, ``RLWATCH_LINK_PORT``). Raises ``ConfigError``.
        """
        if link is None:
            host, port, name = os.environ.get(HOST, ""), os.environ.get(PORT, ""), PORT
        else:
            host, _, port = link.rpartition(":") if ":" in link else (link, "", "")
            name = "the port in link="
        if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"{name} must be a port between 1 and 65535, got {port!r}")
        return cls(host.strip("[] "), int(port or 0))


@dataclass(frozen=True, slots=True)
class Address:
    """``hosts`` are names of one machine; ``machine`` tells its own processes; ``token`` is the run's secret, empty
    where every rank has it from its environment.
    """

    machine: str
    hosts: tuple[str, ...]
    port: int
    token: str

    @property
    def near(self) -> bool:
        """Whether the loopback leads there."""
        return self.machine == this_machine()

    @property
    def within_reach(self) -> bool:
        """Whether rank 0 listens where this process could connect."""
        return self.near or self.hosts != (LOOPBACK,)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Hosts to try in turn: on the same machine the loopback first."""
        return tuple(dict.fromkeys(((LOOPBACK,) if self.near else ()) + self.hosts))

    @property
    def secret(self) -> str:
        """Raises ``LinkError`` where only the environment could have told it, and did not."""
        found = self.token or own_secret()
        if not found:
            raise LinkError(f"rank 0 has its secret from {SECRET}, which is not set here: set it on every rank")
        return found

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps({"machine": self.machine, "hosts": self.hosts, "port": self.port, "token": self.token})

    @classmethod
    def from_text(cls, text: str) -> Address:
        """Raises ``ConfigError`` if ``text`` is not what :meth:`to_text` writes."""
        try:
            found = json.loads(text)
            hosts = tuple(map(str, found["hosts"]))
            return cls(str(found["machine"]), hosts, int(found["port"]), str(found["token"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"not the address of rank 0: {text[:80]!r} ({error})") from None


def own_secret() -> str:
    """What ``RLWATCH_LINK_SECRET`` says; empty if nothing. Raises ``ConfigError`` for one that could be guessed."""
    found = os.environ.get(SECRET, "")
    if found and len(found) < LEAST_SECRET:
        raise ConfigError(f"{SECRET} must have at least {LEAST_SECRET} characters, got {len(found)}")
    return found


def this_machine() -> str:
    """The same for processes that share a loopback and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"  # a container has a network of its own
    except OSError:
        return socket.gethostname()


def listen(place: Place, *, everywhere: bool = False) -> socket.socket:
    """A listening socket at ``place``, or on every interface. Raises ``LinkError``."""
    host = place.host or ("" if everywhere else LOOPBACK)
    try:
        if not host and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # known to the system, but switched off
                return socket.create_server(
                    ("", place.port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
                )
        family, _, _, _, where = socket.getaddrinfo(host or "0.0.0.0", place.port, type=socket.SOCK_STREAM)[0]  # noqa: S104
        return socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise LinkError(
            f"rank 0 cannot listen for the other ranks at {host or '*'}:{place.port or '*'}: {error}"
        ) from None


def names_of(place: Place, listener: socket.socket) -> tuple[str, ...]:
    """The hosts under which others reach ``listener``."""
    bound = str(listener.getsockname()[0])
    if bound == LOOPBACK:
        return (LOOPBACK,)
    if place.host and bound not in ("0.0.0.0", "::"):  # noqa: S104
        return tuple(dict.fromkeys((place.host, bound)))
    return tuple(dict.fromkeys(filter(None, (os.environ.get("MASTER_ADDR"), _outward(), socket.gethostname()))))


def connect(address: Address) -> socket.socket:
    """A connection to the first candidate that answers. Raises ``LinkError`` naming what was tried."""
    failures = []
    for host in address.candidates:
        try:
            connection = socket.create_connection((host, address.port), timeout=CONNECT_S)
        except (OSError, UnicodeError) as error:
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
            view = view[connection.send(view, socket.MSG_DONTWAIT) :]
        except (BlockingIOError, TimeoutError):
            if time.monotonic() >= end:
                raise TimeoutError("the other side does not read") from None
            _wait_writable(connection, end - time.monotonic())


def _wait_writable(connection: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    poll.poll(max(0.0, seconds) * 1000)


def _outward() -> str:
    """The address others see; nothing is sent to find it. Empty if there is no way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): no host has it
            return str(probe.getsockname()[0])
        except OSError:
            return ""
