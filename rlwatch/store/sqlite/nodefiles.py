"""Exchange records between nodes through a directory on a network file system: people's requests and the trainer's
answers.

SQLite's locks do not work there, and two nodes that write one file overwrite each other's records. So each node writes
a file of its own, always whole and by way of a rename, and reads the files of all nodes:

* ``RUN/.people/NODE.json``: commands, cancellations and acknowledgements of a run; the trainer's answers and alerts;
* ``.people/NODE.json`` in the root: silences and the audit.

If several files have records about one thing, only the trainer's node answers, so that nodes never have to agree.
Processes of one node take turns by a lock on the node's own disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rlwatch import codec
from rlwatch.records import JSON
from rlwatch.store.fields import dumps
from rlwatch.store.sqlite.layout import make_private, writing_to

_T = TypeVar("_T")
DIRECTORY = ".people"
MOST_BYTES = 16 << 20
"""Largest file that is read; no node writes that much."""
Words = dict[str, dict[str, Any]]
"""Contents of a node's file: kind (``commands``, ``alerts``...) -> key -> record, as JSON values."""


class NodeFiles:
    """The JSON files of all nodes in one directory, of which this node writes only its own.

    ``directory``: the run's directory, or the store's root. ``local``: a directory on this node's own disk, for its
    name and lock.
    """

    def __init__(self, directory: Path, local: Path) -> None:
        self._directory = directory / DIRECTORY
        self._local = local

    def all(self) -> list[Words]:
        """Return the contents of each node's file, ordered by file name; unreadable files count as empty."""
        return [_words_in(path) for path in self._files()]

    @contextmanager
    def change(self) -> Iterator[Words]:
        """Give this node's records for changes in place; they are written when the block is left.

        The file is on the server before it gets its name, so that a reader has the old file or the new one. Raises
        ``StoreError`` if it cannot be written.
        """
        make_private(self._local)
        with writing_to(self._local), (self._local / "people.lock").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            mine = self._directory / f"{node_name(self._local)}.json"
            words = _words_in(mine)
            before = dumps(words)
            yield words
            after = dumps(words)
            if after != before:
                self._put(mine, after)

    def _put(self, mine: Path, text: str) -> None:
        make_private(self._directory)
        arriving = mine.with_name(f".{mine.name}.{os.getpid()}")
        with writing_to(mine):
            try:
                # Users who may read the run's directory may read this.
                mode = 0o600 | self._directory.parent.stat().st_mode & 0o044
                fd = os.open(arriving, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                arriving.replace(mine)
            except OSError:
                with contextlib.suppress(OSError):
                    arriving.unlink(missing_ok=True)
                raise

    def _files(self) -> list[Path]:
        try:
            with os.scandir(self._directory) as listing:  # opened anew: so the server is asked what there is
                names = [e.name for e in listing if e.name.endswith(".json") and not e.name.startswith(".")]
        except OSError:
            return []
        return [self._directory / name for name in sorted(names)]


def node_name(local: Path) -> str:
    """Return this node's name, which is drawn once and kept in its ``local`` directory, so that all its processes share
    it.
    """
    path = local / "node-name"
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
        with os.fdopen(fd, "w") as file:
            file.write(f"{host}-{secrets.token_hex(4)}")
    return path.read_text()


def _words_in(path: Path) -> Words:
    for _ in range(2):  # ESTALE: it was replaced between its name and its opening
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe: no wait
            with os.fdopen(fd, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError:
            continue
        try:
            words = json.loads(data) if len(data) <= MOST_BYTES else {}
        except (ValueError, RecursionError):
            return {}
        whole = isinstance(words, dict) and all(isinstance(records, dict) for records in words.values())
        return words if whole else {}
    return {}


# The contents as records. Entries of other programs that are not such records are skipped.


def gathered(nodes: list[Words], kind: str) -> list[tuple[str, JSON]]:
    """Return key and record (JSON) of all records of one ``kind``, such as ``commands``, over all nodes."""
    return [record for words in nodes for record in words.get(kind, {}).items()]


def records_of(found: list[tuple[str, JSON]], kind: type[_T]) -> list[_T]:
    """Return the ``found`` (key, JSON) pairs decoded as records of the dataclass ``kind``; undecodable entries are
    skipped.
    """
    out = []
    for _, words in found:
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            out.append(codec.decoded(kind, words))
    return out


def words_of(record: object) -> JSON:
    """Return the ``record``, an instance of a dataclass, as JSON values."""
    return codec.encoded(record)
