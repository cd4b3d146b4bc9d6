"""Words between nodes through a directory on a network file system: what people ask, and what the trainer answers.

SQLite's locks are not to be had there, and two nodes that write one file lose each other's words. So each node writes
a file of its own, whole, by way of a rename, and reads those of all:

* ``RUN/.people/NODE.json``: commands, cancellations and acknowledgements of a run; the trainer's answers and alerts;
* ``.people/NODE.json`` in the root: silences and the audit.

Of a thing that several files speak of, the trainer's node alone answers, so that nothing has to be decided between
them.
Processes of one node take turns by a lock on its own disk.
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
"""Kind -> key -> record, as JSON."""


class NodeFiles:
    """The files of all nodes in one directory. ``local``: a directory of this node's own disk."""

    def __init__(self, directory: Path, local: Path) -> None:
        self._directory = directory / DIRECTORY
        self._local = local

    def all(self) -> list[Words]:
        """The words of each node, by the names of the files. What cannot be read is passed over."""
        return [_words_in(path) for path in self._files()]

    @contextmanager
    def change(self) -> Iterator[Words]:
        """The words of this node, to be changed; kept when the block is left. Raises ``StoreError``.

        On the server before it shows: a reader has the old file or the new one.
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
    """The name of this node's files: drawn once for its local directory, which is what its processes share."""
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
    """Key and words of ``kind`` of all nodes."""
    return [record for words in nodes for record in words.get(kind, {}).items()]


def records_of(found: list[tuple[str, JSON]], kind: type[_T]) -> list[_T]:
    """Return the records of a kind; entries that cannot be decoded are skipped."""
    out = []
    for _, words in found:
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            out.append(codec.decoded(kind, words))
    return out


def words_of(record: object) -> JSON:
    """The words of a record."""
    return codec.encoded(record)
