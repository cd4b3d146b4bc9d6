"""Messages between ranks: their encoding, the steps they refer to, the proof of identity, and the TCP connections."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from rlwatch.errors import ConfigError, RLWatchError


class StepKey(NamedTuple):
    """A visit of a training loop to a step; visits compare in the order in which they happen.

    ``lap``: number of times that steps went back before (training began anew). ``step``: the optimizer step. ``again``:
    number of earlier visits to the same step in a row.
    """

    lap: int
    step: int
    again: int


START = StepKey(0, 0, 0)


class StepKeyCounter:
    """Counter that turns the steps of one rank, in the order in which they come, into unique ordered keys.

    >>> pace = StepKeyCounter()
    >>> [tuple(pace.next(step)) for step in (1, 2, 2, 1)]
    [(0, 1, 0), (0, 2, 0), (0, 2, 1), (1, 1, 0)]
    """

    def __init__(self) -> None:
        self._last: StepKey | None = None
        self._lap = 0

    def next(self, step: int) -> StepKey:
        """Return the key of ``step`` (>= 0), which the training loop has just reached."""
        last = self._last
        if last is None or last.lap < self._lap or step > last.step:
            moment = StepKey(self._lap, step, 0)
        elif step == last.step:
            moment = last._replace(again=last.again + 1)
        else:
            self._lap += 1
            moment = StepKey(self._lap, step, 0)
        self._last = moment
        return moment

    @property
    def lap(self) -> int:
        """Number of times that steps went back so far."""
        return self._lap

    def join(self, lap: int) -> None:
        """Continue from ``lap``, the number of times that steps of the other ranks went back: this
        rank connects late.
        """
        self._lap = max(self._lap, lap)


# A frame: a kind, the number of a round, a moment and some bytes.

LARGEST = 256 * 2**20
"""Largest length of a message body, in bytes."""
SMALL = 2**20
"""Largest length of the body of a message about commands, in bytes."""
_HEAD = struct.Struct("!BIIQII")


class FrameKind(IntEnum):
    """Kinds of messages between rank 0 and the other ranks."""

    CHALLENGE = 1  # rank 0 to a new connection: prove that you know the secret
    ANSWER = 2  # the caller: who it is, its proof, and its own challenge
    WELCOME = 3  # rank 0: its proof, and where it is
    STEP = 4  # what a rank measured at a moment
    ASK = 5  # rank 0 has commands: at which boundary, at the earliest, can you still stop?
    PLACE = 6  # at the first one that is not before this moment; I wait at it until I hear where we meet
    MEET = 7  # all ranks meet at the first boundary that is not before this moment
    OFFER = 8  # the commands, at the boundary where all meet
    ORDER = 9  # what rank 0 decided at a place that every rank passes; empty if nothing
    VOTE = 10  # a rank's word on a command
    PASSED = 11  # a rank had gone on already
    VERDICT = 12  # rank 0's last word on a command
    OVER = 13  # rank 0 asks nothing more in this round
    END = 14  # the sender leaves in good order
    NOTE = 15  # a note of a rank, sent whatever its training thread does


_KINDS = frozenset(map(int, FrameKind))


class FrameError(RLWatchError):
    """Bytes that came over a connection and are no message of rlwatch."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between ranks.

    ``kind``: its kind. ``moment``: the step it refers to. ``body``: its content as bytes. ``turn``: number of the round
    of votes it belongs to, 0 for none.
    """

    kind: FrameKind
    moment: StepKey = START
    body: bytes = b""
    turn: int = 0

    def packed(self, largest: int = LARGEST) -> bytes:
        """Encode the message as bytes. Raises ``FrameError`` for a body of more than ``largest`` bytes, which no rank
        accepts.
        """
        if len(self.body) > largest:
            raise FrameError(f"a message of {len(self.body)} bytes is too long; at most {largest} can be sent")
        return _HEAD.pack(self.kind, self.turn, *self.moment, len(self.body)) + self.body


class FrameDecoder:
    """Decoder that assembles the bytes of one connection into messages between ranks.

    ``largest``: largest accepted length of a message body, in bytes.
    """

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes and yield the messages that they complete. Raises ``FrameError`` for invalid data."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            kind, turn, lap, step, again, length = _HEAD.unpack_from(self._bytes)
            if length > self.largest or kind not in _KINDS:
                raise FrameError(f"not a message of rlwatch: kind {kind}, {length} bytes")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield Frame(FrameKind(kind), StepKey(lap, step, again), body, turn)


# Ballots: the words of a round of commands that both ends speak.

PATIENCE_S = 60.0
"""Seconds for which a rank waits for other ranks to come to the boundary where all meet."""
NEW = b"new"
"""Position of a rank that has not reached any boundary yet."""


def after(moment: StepKey) -> StepKey:
    """Return the key of the next visit of the training loop to the step of the key ``moment``."""
    return moment._replace(again=moment.again + 1)


def ballot_body(ballot: int, refusal: str | None) -> bytes:
    """Encode a vote or a verdict on a command as bytes.

    ``ballot``: number of the question within the round of votes. ``refusal``: the reason for a refusal; None: agreed.
    """
    return json.dumps([ballot, refusal]).encode()


def read_ballot(body: bytes) -> tuple[int, str | None]:
    """Decode a vote or a verdict on a command: return the number of the question, and the reason for a refusal or None.

    Returns (0, None), which is no valid number, for any other content.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return 0, None
    match found:
        case [int(ballot), str() | None as refusal] if not isinstance(ballot, bool):
            return ballot, refusal
    return 0, None


# The greeting: two ranks prove to each other that they belong to one run, without sending its secret.
#
# A challenge and an answer each way, three messages in all (ISO/IEC 9798-4, three passes), of HMAC-SHA256 by the
# standard library over what both sent. ``multiprocessing.connection`` does the same over connections that block, and
# with MD5 before Python 3.12, which machines in FIPS mode do not have.

STRANGERS_BYTES = 1024
"""Largest length, in bytes, of a message from a connection that has proven nothing yet."""
ROLES = ("steps", "control")


def challenge() -> str:
    """Return a random text that was never used before, from which the other end must compute a proof of identity."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity of a rank that connects to rank 0.

    ``rank``: the rank. ``role``: purpose of the connection, ``"steps"`` or ``"control"``. ``nonce``: random text from
    which rank 0 must compute its own proof.
    """

    rank: int
    role: str
    nonce: str

    def answer(self, asked: str, secret: str) -> Frame:
        """Return the answer to rank 0's challenge (random text) ``asked``.

        It proves that this rank knows ``secret``, and contains a challenge to rank 0.
        """
        words = {
            "rank": self.rank,
            "role": self.role,
            "nonce": self.nonce,
            "proof": self.proof("caller", asked, secret),
        }
        return Frame(FrameKind.ANSWER, body=json.dumps(words).encode())

    def welcome(self, asked: str, secret: str, *, lap: int, orders: int) -> Frame:
        """Return rank 0's answer to the rank's challenge (random text): a proof that rank 0 knows ``secret``, and its
        position in training.

        ``asked``: rank 0's own challenge. ``lap``: number of times that its steps went back. ``orders``: number of
        times that it has sent commands to all ranks.
        """
        words = {"proof": self.proof("rank 0", asked, secret), "lap": lap, "orders": orders}
        return Frame(FrameKind.WELCOME, body=json.dumps(words).encode())

    def welcomed(self, frame: Frame, asked: str, secret: str) -> tuple[int, int]:
        """Check rank 0's answer ``frame``; return the number of times that its steps went back, and that it has sent
        commands to all ranks.

        ``asked``: rank 0's challenge (random text). Raises ``FrameError`` if rank 0 has not proven that it knows
        ``secret``.
        """
        try:
            words = json.loads(frame.body)
            proof, lap, orders = str(words["proof"]), int(words["lap"]), int(words["orders"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise FrameError("no welcome of a rank 0 of rlwatch") from None
        if frame.kind is not FrameKind.WELCOME or not _same(proof, self.proof("rank 0", asked, secret)):
            raise FrameError("whoever listens there does not know the secret of this run")
        return lap, orders

    def proof(self, speaker: str, asked: str, secret: str) -> str:
        """Return the proof that ``speaker`` (``"caller"`` or ``"rank 0"``) knows the secret: an HMAC-SHA256 over both
        challenges and this identity, in hex.

        ``asked``: rank 0's challenge, a random text.
        """
        words = json.dumps([speaker, self.rank, self.role, asked, self.nonce]).encode()
        return hmac.digest(secret.encode(), words, "sha256").hex()


def asking(frame: Frame) -> str:
    """Return the challenge (random text) in a message of rank 0. Raises ``FrameError`` for any other message."""
    if frame.kind is not FrameKind.CHALLENGE or len(frame.body) != len(challenge()):
        raise FrameError("whoever listens there is no rank 0 of rlwatch")
    return frame.body.decode("ascii", "replace")


def identified(frame: Frame, asked: str, secret: str, world_size: int) -> Caller:
    """Return the identity of the rank that answered the challenge ``asked``.

    ``frame``: its answer. ``secret``: secret of the run. ``world_size``: number of ranks. Raises ``FrameError`` if it
    does not belong to the run.
    """
    try:
        words = json.loads(frame.body)
        caller = Caller(int(words["rank"]), str(words["role"]), str(words["nonce"]))
        proof = str(words["proof"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise FrameError("no greeting") from None
    if frame.kind is not FrameKind.ANSWER or not _same(proof, caller.proof("caller", asked, secret)):
        raise FrameError("a stranger")
    if not 0 < caller.rank < world_size or caller.role not in ROLES:
        raise FrameError(f"there is no rank {caller.rank} for {caller.role}")
    return caller


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


# Sockets: where rank 0 listens, and connections that notice when the other side is gone.

LOOPBACK = "127.0.0.1"
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 35_000))
"""A machine that disappears without closing its connections is noticed after 35 seconds (where the
system supports it).
"""
CONNECT_S = 5.0
BACKLOG = 1024
HOST_VARIABLE, PORT_VARIABLE, SECRET_VARIABLE = "RLWATCH_LINK_HOST", "RLWATCH_LINK_PORT", "RLWATCH_LINK_SECRET"
LEAST_SECRET = 16


class LinkError(RLWatchError):
    """Two ranks cannot reach each other over the network."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Address on which rank 0 listens for the other ranks.

    ``host``: interface; empty: the loopback, until a rank on another machine needs more. ``port``: 0: any free port.
    """

    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, link: str | None) -> ListenAddress:
        """Parse the setting ``link`` (``HOST:PORT``, ``HOST`` or ``:PORT``); by default read the environment.

        The variables are ``RLWATCH_LINK_HOST`` and ``RLWATCH_LINK_PORT``. Raises ``ConfigError`` for an invalid port.
        """
        if link is None:
            host, port, name = os.environ.get(HOST_VARIABLE, ""), os.environ.get(PORT_VARIABLE, ""), PORT_VARIABLE
        else:
            host, _, port = link.rpartition(":") if ":" in link else (link, "", "")
            name = "the port in link="
        if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"{name} must be a port between 1 and 65535, got {port!r}")
        return cls(host.strip("[] "), int(port or 0))


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Address at which the other ranks reach rank 0.

    ``hosts``: names of rank 0's machine. ``port``: its TCP port. ``machine``: identifier shared by processes on that
    machine. ``token``: the run's secret, empty if every rank has it from its environment.
    """

    machine: str
    hosts: tuple[str, ...]
    port: int
    token: str

    @property
    def near(self) -> bool:
        """Return whether rank 0 is on this machine, so that the loopback reaches it."""
        return self.machine == this_machine()

    @property
    def within_reach(self) -> bool:
        """Return whether rank 0 listens on an interface that this process could connect to."""
        return self.near or self.hosts != (LOOPBACK,)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Hosts to try in turn; if rank 0 is on this machine, the loopback first."""
        return tuple(dict.fromkeys(((LOOPBACK,) if self.near else ()) + self.hosts))

    @property
    def secret(self) -> str:
        """Secret of the run. Raises ``LinkError`` if it should be in the environment and is not."""
        found = self.token or own_secret()
        if not found:
            raise LinkError(
                f"rank 0 has its secret from {SECRET_VARIABLE}, which is not set here: set it on every rank"
            )
        return found

    def to_text(self) -> str:
        """Return the address as JSON text, which :meth:`from_text` reads."""
        return json.dumps({"machine": self.machine, "hosts": self.hosts, "port": self.port, "token": self.token})

    @classmethod
    def from_text(cls, text: str) -> HubAddress:
        """Parse an address that :meth:`to_text` wrote. Raises ``ConfigError`` for any other text."""
        try:
            found = json.loads(text)
            hosts = tuple(map(str, found["hosts"]))
            return cls(str(found["machine"]), hosts, int(found["port"]), str(found["token"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"not the address of rank 0: {text[:80]!r} ({error})") from None


def own_secret() -> str:
    """Return the secret in ``RLWATCH_LINK_SECRET``, or an empty text. Raises ``ConfigError`` for one that could be
    guessed.
    """
    found = os.environ.get(SECRET_VARIABLE, "")
    if found and len(found) < LEAST_SECRET:
        raise ConfigError(f"{SECRET_VARIABLE} must have at least {LEAST_SECRET} characters, got {len(found)}")
    return found


def this_machine() -> str:
    """Return an identifier that is the same for processes that share a loopback, and different for all others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"  # a container has a network of its own
    except OSError:
        return socket.gethostname()


def listen(place: ListenAddress, *, everywhere: bool = False) -> socket.socket:
    """Return a socket that listens at ``place``, or on every interface. Raises ``LinkError``."""
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


def names_of(place: ListenAddress, listener: socket.socket) -> tuple[str, ...]:
    """Return the hosts under which other machines reach the socket ``listener``, which was bound to ``place``."""
    bound = str(listener.getsockname()[0])
    if bound == LOOPBACK:
        return (LOOPBACK,)
    if place.host and bound not in ("0.0.0.0", "::"):  # noqa: S104
        return tuple(dict.fromkeys((place.host, bound)))
    return tuple(dict.fromkeys(filter(None, (os.environ.get("MASTER_ADDR"), _outward(), socket.gethostname()))))


def connect(address: HubAddress) -> socket.socket:
    """Return a connection to the first host of ``address`` that answers. Raises ``LinkError`` with the hosts tried."""
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
    """Return the connection with its options set: no delay for small messages, and the system's keep-alive."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def send_all(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    """Send all of ``data`` within ``deadline_s`` seconds, whether the socket blocks or not. Raises ``OSError``."""
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
    """Return the address that other machines see, without sending anything. Empty if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): no host has it
            return str(probe.getsockname()[0])
        except OSError:
            return ""
