"""Writing down what a person wants of a live run."""

from __future__ import annotations

import os
import pwd
import socket
import uuid
from collections.abc import Mapping

from rlwatch.clock import Clock, SystemClock
from rlwatch.control.kinds import kind_of
from rlwatch.ports import CommandStore
from rlwatch.records import JSON, Command
from rlwatch.redaction import redacted

EXPIRES_S = 600.0


def request(
    store: CommandStore,
    run_id: str,
    kind: str,
    *,
    args: Mapping[str, JSON] | None = None,
    why: str = "",
    by: str | None = None,
    force: bool = False,
    expires_s: float = EXPIRES_S,
    idempotency_key: str | None = None,
    clock: Clock | None = None,
) -> Command:
    """Queue a command for the live run and return it as stored.

    A command that no trainer begins within ``expires_s`` seconds expires: a restarted trainer must not
    obey last night's click. The same ``idempotency_key`` twice gives the same command.

    Raises
    ------
    ConfigError
        For an unknown kind or argument, or a value that is not allowed, naming what is.
    ControlUnavailableError
        Where the store cannot carry commands (a network file system).
    """
    now = (clock or SystemClock()).now()
    command = Command(
        command_id=uuid.uuid4().hex[:16],
        run_id=run_id,
        kind=kind,
        args=kind_of(kind).read(args or {}),
        force=force,
        requested_by=by or whoami(),
        why=redacted(why),
        idempotency_key=idempotency_key or uuid.uuid4().hex,
        created_at=now,
        expires_at=now + expires_s,
    )
    return store.submit(command)


def cancel(
    store: CommandStore,
    run_id: str,
    command_id: str,
    *,
    why: str = "",
    by: str | None = None,
    clock: Clock | None = None,
) -> Command:
    """Take a command back, unless it was begun; returns it as it then stands.

    ``cancelled``: nobody will carry it out. ``cancelling``: a trainer holds it, and lets it go at once unless it is
    carrying it out; ask for it again. Anything else: it was answered before.

    Raises ``StoreError`` if the run has no such command, ``ControlUnavailableError`` as :func:`request` does.
    """
    result = f"cancelled by {by or whoami()}{f': {why}' if why else ''}"
    return store.cancel(run_id, command_id, (clock or SystemClock()).now(), result=result)


def whoami() -> str:
    """``user@host`` of this process: the account it runs under, whatever ``$USER`` says."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a passwd entry
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
