"""Checkpoints of the Monitor: its state as bytes, stored with the run, so that a resume need not replay all rows.

A checkpoint is only a shortcut: if it is missing, damaged, or written by another version or user, it is skipped and the
rows are replayed. Store directories are copied between machines, and unpickling runs code. So a checkpoint is signed
(HMAC-SHA256) with a key in the user's state directory and opened only if the signature is valid. Even then, unpickling
resolves only the classes and functions that rlwatch judges with, and plain containers.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import io
import os
import pickle
import secrets
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from rlwatch.error_boundary import raised_by
from rlwatch.ports import Checkpoint
from rlwatch.version import __version__

if TYPE_CHECKING:
    from rlwatch.monitor.engine import Monitor

_PACKAGES = (
    "detectors",
    "layers",
    "stats",
    "forecast",
    "alerts",
    "monitor",
    "metrics",
    "records",
    "catalogue",
    "diagnosis",
)
"""Packages whose classes a monitor's state contains, and whose code and data decide what it reports."""
_OUTSIDE = {
    ("collections", "deque"): collections.deque,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "Counter"): collections.Counter,
}
_NUMPY = {"numpy", "numpy._core.numeric", "numpy._core.multiarray", "numpy.core.numeric", "numpy.core.multiarray"}
_NUMPY_NAMES = {"dtype", "ndarray", "_frombuffer", "_reconstruct", "scalar"}
_SEAL = hashlib.sha256().digest_size


def made_by(monitor: Monitor) -> str:
    """Return a digest of the program and settings with which ``monitor`` judges; empty if its state must not be stored.

    A monitor with detectors or forecasters of plugins is not stored: their state cannot be pickled safely.
    """
    if not monitor.is_default or own_key() is None:
        return ""
    settings = repr((monitor.run_id, monitor.source, monitor.rules, monitor.forecasts, sorted(_environment().items())))
    return hashlib.sha256((_program() + settings).encode()).hexdigest()


def sealed(monitor: Monitor, by: str, *, seq: int, attempt: int, step: int) -> Checkpoint:
    """Return a signed checkpoint of ``monitor`` after the item at position ``seq`` of the run's stream.

    ``by``: result of :func:`made_by`. ``attempt``, ``step``: process of the run, and its highest step so far. Raises
    the errors of pickling.
    """
    to = io.BytesIO()
    _Pickler(to, monitor).dump(monitor.memory())
    bare = Checkpoint(seq, attempt, step, by, zlib.compress(to.getvalue(), 1))
    return replace(bare, body=seal(own_key() or b"", bare) + bare.body)


def opened(kept: Checkpoint, monitor: Monitor) -> bool:
    """Load the monitor's state in the checkpoint ``kept`` into a fresh ``monitor``; return whether its signature was
    valid and it could be read.
    """
    key, bare = own_key(), replace(kept, body=kept.body[_SEAL:])
    if key is None or not hmac.compare_digest(seal(key, bare), kept.body[:_SEAL]):
        return False

    def remember() -> None:
        monitor.remember(_Unpickler(io.BytesIO(zlib.decompress(bare.body)), monitor).load())

    return raised_by(remember) is None  # whatever the error: replaying the rows gives the same state


def seal(key: bytes, bare: Checkpoint) -> bytes:
    """Return the signature of the checkpoint ``bare`` under ``key``; it covers the body, the program and the position
    in the run.
    """
    where = f"{bare.made_by}/{bare.attempt}/{bare.seq}/{bare.step}/".encode()
    return hmac.digest(key, where + bare.body, "sha256")


class _Pickler(pickle.Pickler):
    def __init__(self, to: io.BytesIO, monitor: Monitor) -> None:
        super().__init__(to, protocol=5)
        self._monitor = monitor

    def persistent_id(self, obj: Any) -> Any:
        """Return a reference to an object that the fresh monitor already has: itself, its methods, the model."""
        from rlwatch.forecast.model import Outline

        if obj is self._monitor:
            return ("monitor",)
        if isinstance(obj, MethodType) and obj.__self__ is self._monitor:
            return ("method", obj.__name__)
        return ("model",) if isinstance(obj, Outline) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, monitor: Monitor) -> None:
        super().__init__(source)
        self._monitor = monitor

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "monitor":
            return self._monitor
        if pid[0] == "method":
            return getattr(self._monitor, pid[1])
        from rlwatch.forecast.forecaster import default_forecaster

        return default_forecaster().outline

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OUTSIDE:
            return _OUTSIDE[module, name]
        if module in _NUMPY and name in _NUMPY_NAMES:
            return super().find_class(module, name)
        if module.split(".", maxsplit=1)[0] == "rlwatch" and module.split(".")[1] in _PACKAGES:
            found = super().find_class(module, name)
            if getattr(found, "__module__", None) == module:  # not a name that the module imports, such as os.system
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def _environment() -> dict[str, str]:
    """Return the settings of the forecaster, and a digest of the model file that they name."""
    found = {name: value for name, value in os.environ.items() if name.startswith("RLWATCH_FORECAST_")}
    with suppress(OSError):
        model = Path(found.get("RLWATCH_FORECAST_MODEL", ""))
        found["model"] = hashlib.sha256(model.read_bytes()).hexdigest()
    return found


@cache
def _program() -> str:
    """Return a digest of the code and data that judge: the state of another version may differ in meaning."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256(__version__.encode())
    for package in _PACKAGES:
        code, data = (root / package).rglob("*.py"), (root / package).rglob("*.toml")
        index = (root / package).glob("*.json")
        for file in sorted([*code, *data, *index, *(root / package).glob("shipped/*"), root / f"{package}.py"]):
            with suppress(OSError):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def own_key() -> bytes | None:
    """Return the user's key for signing checkpoints, created on first use; None if no file can be kept private to the
    user.
    """
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    with suppress(OSError, RuntimeError):
        file = Path(base).expanduser() / "rlwatch" / "checkpoint.key"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            made = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
            fd = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            os.write(fd, secrets.token_bytes(32))
            os.close(fd)
            with suppress(FileExistsError):
                os.link(made, file)
            made.unlink()
        found = file.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o077:
            key = file.read_bytes()
            return key if len(key) == 32 else None
    return None
