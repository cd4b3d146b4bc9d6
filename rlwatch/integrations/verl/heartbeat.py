"""Files that report, one for each process, whether rlwatch's plugin for verl was loaded, and the state of its hooks.

verl logs errors of a plugin at DEBUG only, so they are easily missed; ``rlwatch doctor`` reads these files. They lie in
``$RLWATCH_STATE_DIR``, else ``$XDG_STATE_HOME/rlwatch``, else ``~/.local/state/rlwatch``, under ``verl/``. Writing
never raises.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

IN_PLACE, WAITING = "in place", "waiting"
"""States of a hook that is not in error: installed, or waiting for the import of verl's module."""
KEPT = 64
"""Number of files that are kept; older ones are removed."""


@dataclass(slots=True)
class Heartbeat:
    """State of the plugin in one process: versions, hooks, role and last error, written to a small file.

    ``loaded_at`` is a Unix time in seconds. ``hooks`` maps verl's module to the state of the hook on it.
    """

    pid: int
    host: str
    python: str
    rlwatch: str
    verl: str
    loaded_at: float
    hooks: dict[str, str] = field(default_factory=dict)
    role: str = ""
    error: str = ""

    def note(self, hook: str, how: str) -> None:
        """Record the state ``how`` of ``hook``: in place, waiting for its module, or an error message."""
        self.hooks[hook] = how
        self.write()

    def act(self, role: str) -> None:
        """Record that this process is watched now, as ``driver`` or ``worker``."""
        self.role = role
        self.write()

    def fail(self, error: str) -> None:
        """Record ``error`` as the last error of this process."""
        self.error = error
        self.write()

    def write(self) -> None:
        """Write the state to its file, completely or not at all. An ``OSError`` is ignored."""
        with suppress(OSError):
            place = directory()
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = place / f"{self.host}-{self.pid}.json"
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(asdict(self)) + "\n")
            temporary.replace(path)


current: Heartbeat | None = None
"""State of the plugin in this process; None if the plugin was not loaded."""


def acting(role: str) -> None:
    """Record that this process is watched from now on, as ``driver`` or ``worker``."""
    if current is not None:
        current.act(role)


def failing(error: str) -> None:
    """Record ``error`` as the last error of this process."""
    if current is not None:
        current.fail(error)


def hooked(module: str, how: str) -> None:
    """Record the state ``how`` of rlwatch's hook on verl's ``module``."""
    if current is not None:
        current.note(module, how)


def hook(module: str) -> str | None:
    """Return the state of rlwatch's hook on verl's ``module``; None if the plugin was not loaded."""
    return None if current is None else current.hooks.get(module)


def begin(rlwatch: str, verl: str, *, most: int = KEPT) -> Heartbeat:
    """Create and write the state of this process, with the versions of rlwatch and verl.

    Remove the oldest files beyond ``most``.
    """
    beat = Heartbeat(os.getpid(), socket.gethostname(), sys.executable, rlwatch, verl, time.time())
    beat.write()
    with suppress(OSError):
        for path in sorted(directory().glob("*.json"), key=lambda p: p.stat().st_mtime)[:-most]:
            path.unlink(missing_ok=True)
    return beat


def directory() -> Path:
    """Return the directory in which the state files lie."""
    return state_home() / "verl"


def state_home(env: Mapping[str, str] | None = None) -> Path:
    """Return rlwatch's directory for per-user state, by the environment variables ``env`` (default: this process's)."""
    env = os.environ if env is None else env
    chosen = env.get("RLWATCH_STATE_DIR")
    if chosen:
        return Path(chosen)
    base = env.get("XDG_STATE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError:  # no home directory
        home = Path(tempfile.gettempdir())
    return home / "rlwatch"


def latest(limit: int = KEPT) -> list[Heartbeat]:
    """Return the newest states, newest first, at most ``limit``; files that cannot be read are left out."""
    beats = []
    with suppress(OSError):
        for path in directory().glob("*.json"):
            with suppress(OSError, ValueError, TypeError):
                beats.append(Heartbeat(**json.loads(path.read_text())))
    return sorted(beats, key=lambda beat: -beat.loaded_at)[:limit]
