"""A notification channel that runs a user's program: the message is JSON on its standard input."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlwatch.errors import ConfigError
from rlwatch.notify.payload import encode
from rlwatch.ports import Delivery
from rlwatch.records import OutboxMessage

PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER")
"""Environment variables that a program receives, in addition to ``pass_env``: others may hold keys."""


class CommandNotifier:
    """Notification channel that runs a program once for each message, without a shell, so that no text becomes a
    command.

    The program receives the payload on standard input (one line of JSON, with ``message_id``). Its environment has
    ``RLWATCH_DELIVERY`` (the message id, the same at every try) and ``RLWATCH_EVENT``. Exit code 0 means delivered; any
    other is tried again. Its output is not kept.

    Parameters
    ----------
    argv
        The program and its arguments.
    name
        Name of the channel.
    pass_env
        Names of further environment variables that the program receives.
    total_s
        Seconds after which the program and its children are killed.

    Raises
    ------
    ConfigError
        If there is no such program or the limit is not positive.
    """

    def __init__(
        self, argv: Sequence[str], *, name: str = "command", pass_env: Sequence[str] = (), total_s: float = 10.0
    ) -> None:
        if isinstance(argv, str) or not argv or not all(isinstance(word, str) and word for word in argv):
            raise ConfigError(f"notifier {name!r}: argv must be a list of words, as in ['/usr/local/bin/page', '-v']")
        if not total_s > 0:
            raise ConfigError(f"notifier {name!r}: time limits must be > 0 s, got {total_s!r}")
        if shutil.which(argv[0]) is None:
            raise ConfigError(f"notifier {name!r}: there is no program {Path(argv[0]).name!r} that can be run")
        self.name = name
        self._argv, self._passed, self._total_s = list(argv), (*PASSED, *pass_env), total_s

    def __repr__(self) -> str:
        return f"CommandNotifier(name={self.name!r}, program={Path(self._argv[0]).name!r})"

    def deliver(self, message: OutboxMessage) -> Delivery:
        """Run the program once with the message and return the outcome."""
        event = str(message.payload.get("event") or "").replace("\0", "")
        body = encode({**message.payload, "message_id": message.message_id}) + b"\n"
        try:
            program = self._started({"RLWATCH_DELIVERY": message.message_id, "RLWATCH_EVENT": event})
        except (OSError, ValueError) as error:
            return Delivery(ok=False, reason=f"the program could not be started: {type(error).__name__}")
        try:
            program.communicate(body, timeout=self._total_s)
        except subprocess.TimeoutExpired:
            _kill(program)
            return Delivery(ok=False, reason=f"the program did not end within {self._total_s:g} s")
        return _judged(program.returncode)

    def _started(self, delivery: Mapping[str, str]) -> subprocess.Popen[bytes]:
        seen = {name: os.environ[name] for name in self._passed if name in os.environ}
        nowhere = subprocess.DEVNULL
        return subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=nowhere,
            stderr=nowhere,
            env=seen | dict(delivery),
            start_new_session=True,
        )


def _judged(code: int) -> Delivery:
    if code == 0:
        return Delivery(ok=True, reason="exit code 0")
    return Delivery(ok=False, reason=f"exit code {code}" if code > 0 else f"ended by signal {-code}")


def _kill(program: subprocess.Popen[bytes]) -> None:
    """Kill the program with everything it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)
    with suppress(OSError, ValueError):
        if program.stdin is not None:
            program.stdin.close()
    program.wait()
