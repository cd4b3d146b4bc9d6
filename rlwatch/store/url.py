"""Open the store that a URL names.

=====================  ==========================================================
``./rlwatch-runs``     a directory, one sub-directory per run (SQLite)
``sqlite:///a/path``   the same, always absolute; ``%20`` and the like are decoded
``memory://name``      this process only
``postgresql://...``   a PostgreSQL database, :mod:`rlwatch.store.postgres`; with
                       ``?series=clickhouse://...`` its bulk in ClickHouse
=====================  ==========================================================
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import cast
from urllib.parse import unquote

from rlwatch.clock import Clock
from rlwatch.error_boundary import call_or
from rlwatch.errors import RLWatchError, StoreError, StoreURLError
from rlwatch.plugins import usable
from rlwatch.ports import Store
from rlwatch.trust import FILE_NAME, why_not_obeyed

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?(.*)", re.DOTALL)
DOOR = "rlwatch.stores"
SHARED_VARIABLE = "RLWATCH_SHARED_STORE"
"""Environment variable that, if set and not 0, makes a store directory count as a network file system, even where that
cannot be detected.
"""
OWN = ("sqlite", "memory", "postgresql", "postgres")
"""URL schemes of rlwatch's own stores, which no plugin can claim."""
_FORMS = "a directory, sqlite:///absolute/path, postgresql://user@host/database or memory://name"


def default_store_url() -> str:
    """Return the URL of the store that is used if none is given.

    It is ``RLWATCH_STORE`` if set and not empty, else ``url`` in the section ``[store]`` of ``./rlwatch.toml``, else
    ``./rlwatch-runs``.
    """
    return os.environ.get("RLWATCH_STORE") or _of_file(Path(FILE_NAME)) or "./rlwatch-runs"


def absolute_url(url: str | None) -> str:
    """Return the store's ``url`` in a form that stays valid after a change of the working directory.

    A path becomes absolute; a URL with a scheme is returned as it is. None means :func:`default_store_url`.
    """
    text = url or default_store_url()
    match = _SCHEME.fullmatch(text)
    return text if match else os.path.abspath(Path(text).expanduser())  # noqa: PTH100  (``..`` as the shell has it)


def _of_file(file: Path) -> str:
    """Return the store's URL from the settings file, or "" if it names none. Errors of the file are reported elsewhere.

    A file that does not belong to the user may only name a local store, so that it cannot send the runs elsewhere.
    """
    try:
        store = tomllib.loads(file.read_text(encoding="utf-8")).get("store")
    except (OSError, ValueError, RecursionError):
        return ""
    url = store.get("url") if isinstance(store, dict) else None
    if not isinstance(url, str):
        return ""
    led_away = "://" in url or os.path.realpath(Path(url).expanduser()) != os.path.realpath(file.parent)
    return "" if led_away and why_not_obeyed(file) else url


def open_store(
    url: str | os.PathLike[str] | None = None, *, control_timeout_s: float = 2.0, clock: Clock | None = None
) -> Store:
    """Return the store at ``url`` without reading or creating anything yet.

    Parameters
    ----------
    url
        A directory, ``sqlite:///absolute/path``, ``postgresql://user@host/database``, ``memory://name``, or a URL whose
        scheme a plugin provides. None: :func:`default_store_url`.
    control_timeout_s
        Seconds that calls about commands, alerts and outgoing messages wait for another process before they raise
        ``StoreBusyError``; a trainer passes 0 and asks again later.
    clock
        Source of creation times; the machine's clock by default.

    Raises
    ------
    StoreURLError
        If no store has such a URL. The message never repeats what follows the scheme, which may hold a password.
    StoreError
        If the directory cannot be accessed, or a plugin's store cannot be opened.
    """
    text = os.fspath(url) if url is not None else default_store_url()
    match = _SCHEME.fullmatch(text)
    scheme, slashes, rest = match.groups() if match else ("", None, text)
    if scheme == "memory" and slashes:
        from rlwatch.store.memory import MemoryStore

        return MemoryStore(rest, clock=clock)
    if scheme in ("postgresql", "postgres") and slashes:
        from rlwatch.store.postgres.address import known_driver

        known_driver()
        from rlwatch.store.postgres.store import PostgresStore

        return PostgresStore(text, control_timeout_s=control_timeout_s, clock=clock)
    others = usable(DOOR, OWN) if slashes else {}
    if scheme in others:
        made = others[scheme]
        return call_or(lambda: cast("Store", made(text, control_timeout_s=control_timeout_s, clock=clock)), _refused)
    return _open_directory(_directory(scheme, slashes, rest), control_timeout_s, clock)


def _refused(error: Exception) -> Store:
    """Raise ``StoreError`` for any error of a plugin; never with the URL, which may hold a password."""
    if isinstance(error, RLWatchError):
        raise error
    raise StoreError(f"the plugin's store could not be opened ({type(error).__name__})") from None


def _directory(scheme: str, slashes: str | None, rest: str) -> Path:
    if not scheme:
        if not rest.strip():
            raise StoreURLError(f"the store URL is empty; give {_FORMS}")
        return Path(rest).expanduser()
    if scheme != "sqlite":
        raise StoreURLError(f"no store for {scheme}:...; give {_FORMS}")
    if not slashes or not rest.startswith("/"):
        raise StoreURLError("a sqlite: store has three slashes and an absolute path, as in sqlite:///home/me/runs")
    return Path(unquote(rest))


def _open_directory(path: Path, control_timeout_s: float, clock: Clock | None) -> Store:
    from rlwatch.store.sqlite.filestore import FileStore
    from rlwatch.store.sqlite.layout import network_file_system
    from rlwatch.store.sqlite.shared import SharedStore

    try:
        is_file, is_run = path.exists() and not path.is_dir(), (path / "run.db").exists()
    except OSError as error:
        raise StoreError(
            f"cannot look into {path} ({error.strerror}); check its permissions, or choose another store"
        ) from error
    if is_file:
        raise StoreURLError(f"{path} is a file; a store is a directory with one sub-directory per run")
    if is_run:
        raise StoreURLError(
            f"{path} is the directory of one run; the store is the one above it: {path.absolute().parent}"
        )
    shared = os.environ.get(SHARED_VARIABLE, "")
    kind = network_file_system(path) or (f"shared, as {SHARED_VARIABLE} says" if shared not in ("", "0") else None)
    if kind is not None:
        return SharedStore(path, kind, timeout_s=control_timeout_s, clock=clock)
    return FileStore(path, control_timeout_s=control_timeout_s, clock=clock)
