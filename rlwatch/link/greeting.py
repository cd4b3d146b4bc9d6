"""How rank 0 and another rank prove to each other that they belong to one run, without sending its secret.

A challenge and an answer each way, three messages in all (ISO/IEC 9798-4, three passes), of HMAC-SHA256 by the
standard library over what both said. ``multiprocessing.connection`` does the same over connections that block, and
with MD5 before Python 3.12, which machines in FIPS mode do not have.
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass

from rlwatch.link.frames import Frame, FrameError, Kind

STRANGERS_BYTES = 1024
"""Longest message from somebody who has proven nothing yet."""
ROLES = ("steps", "control")


def challenge() -> str:
    """What nobody said before."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who says that it calls, over what connection, and its own challenge."""

    rank: int
    role: str
    nonce: str

    def answer(self, asked: str, secret: str) -> Frame:
        """To the challenge ``asked`` of rank 0."""
        said = {
            "rank": self.rank,
            "role": self.role,
            "nonce": self.nonce,
            "proof": self.proof("caller", asked, secret),
        }
        return Frame(Kind.ANSWER, body=json.dumps(said).encode())

    def welcome(self, asked: str, secret: str, *, lap: int, orders: int) -> Frame:
        """Rank 0's answer in turn, and where it is."""
        said = {"proof": self.proof("rank 0", asked, secret), "lap": lap, "orders": orders}
        return Frame(Kind.WELCOME, body=json.dumps(said).encode())

    def welcomed(self, frame: Frame, asked: str, secret: str) -> tuple[int, int]:
        """(lap, orders) of rank 0. Raises ``FrameError`` if it has not proven that it knows the secret."""
        try:
            said = json.loads(frame.body)
            proof, lap, orders = str(said["proof"]), int(said["lap"]), int(said["orders"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise FrameError("no welcome of a rank 0 of rlwatch") from None
        if frame.kind is not Kind.WELCOME or not _same(proof, self.proof("rank 0", asked, secret)):
            raise FrameError("whoever listens there does not know the secret of this run")
        return lap, orders

    def proof(self, speaker: str, asked: str, secret: str) -> str:
        """That ``speaker`` knows the secret and has heard all of this."""
        said = json.dumps([speaker, self.rank, self.role, asked, self.nonce]).encode()
        return hmac.digest(secret.encode(), said, "sha256").hex()


def asking(frame: Frame) -> str:
    """The challenge of rank 0. Raises ``FrameError`` for anything else."""
    if frame.kind is not Kind.CHALLENGE or len(frame.body) != len(challenge()):
        raise FrameError("whoever listens there is no rank 0 of rlwatch")
    return frame.body.decode("ascii", "replace")


def identified(frame: Frame, asked: str, secret: str, world_size: int) -> Caller:
    """Who answered the challenge ``asked``. Raises ``FrameError`` for whoever is not of this run."""
    try:
        said = json.loads(frame.body)
        caller = Caller(int(said["rank"]), str(said["role"]), str(said["nonce"]))
        proof = str(said["proof"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise FrameError("no greeting") from None
    if frame.kind is not Kind.ANSWER or not _same(proof, caller.proof("caller", asked, secret)):
        raise FrameError("a stranger")
    if not 0 < caller.rank < world_size or caller.role not in ROLES:
        raise FrameError(f"there is no rank {caller.rank} for {caller.role}")
    return caller


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())
