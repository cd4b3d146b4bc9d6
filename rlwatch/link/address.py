"""Where rank 0 listens, and the secret that tells its own ranks from everybody else on the network."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass

from rlwatch.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """``hosts`` are names of one machine, ``here`` the name it calls itself; ``token`` opens the door."""

    here: str
    hosts: tuple[str, ...]
    port: int
    token: str

    @property
    def candidates(self) -> tuple[str, ...]:
        """Hosts to try in turn: on the same machine the loopback first."""
        near = (LOOPBACK,) if self.here == socket.gethostname() else ()
        return tuple(dict.fromkeys((*near, *self.hosts)))

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Address:
        """Raises ``ConfigError`` if ``text`` is not what :meth:`to_text` writes."""
        try:
            found = json.loads(text)
            return cls(str(found["here"]), tuple(map(str, found["hosts"])), int(found["port"]), str(found["token"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"not the address of rank 0: {text[:80]!r} ({error})") from None


def address_of(port: int, *, alone: bool) -> Address:
    """Of this machine. ``alone``: all ranks are on it, so that the loopback is enough."""
    here = socket.gethostname()
    hosts = (LOOPBACK,) if alone else tuple(filter(None, (os.environ.get("MASTER_ADDR"), _outward(), here)))
    return Address(here, hosts, port, secrets.token_hex(16))


def _outward() -> str:
    """The address others see; nothing is sent to find it. Empty if there is no way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): no host has it
            return str(probe.getsockname()[0])
        except OSError:
            return ""
